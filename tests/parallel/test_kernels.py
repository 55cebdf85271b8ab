"""The choice of a kernel's backend: by order, by what a program is compiled for, and by the lowering where it must."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh

from moezoo import Execution, MeshShape
from moezoo.errors import UserError
from moezoo.parallel.kernels import PLATFORMS, KernelOrder, Kernels, Target, anywhere, choose, device_target, run
from moezoo.parallel.mesh import abstract_mesh, make_mesh

BACKENDS = {
    "new_gpus": lambda target: target.platform == "cuda" and (target.capability or "") >= "9.0",
    "gpus": lambda target: target.platform in ("cuda", "rocm"),
    "portable": anywhere,
}
CPU, OLD, NEW, AMD = Target("cpu"), Target("cuda", "8.0"), Target("cuda", "9.0"), Target("rocm", "gfx942")


def chosen(names, target, own=("new_gpus", "gpus", "portable")):
    """The backends by platform; a known target's under ""."""
    return dict(choose("product", BACKENDS, KernelOrder(names, target), lambda target: own))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [(CPU, "portable"), (OLD, "gpus"), (NEW, "new_gpus"), (AMD, "gpus"), (Target("tpu"), "portable")],
)
def test_the_first_that_runs_on_the_target(target, wanted):
    assert chosen((), target) == {"": wanted}
    assert chosen(("portable", "gpus"), target) == {"": "portable"}
    assert chosen(("gpus", "portable"), target) == {"": "portable" if target.platform in ("cpu", "tpu") else "gpus"}


def test_without_a_target_there_is_one_for_each_platform():
    """A GPU's capability is unknown, so that nothing is chosen that needs one."""
    assert chosen((), None) == {"cpu": "portable", "cuda": "gpus", "rocm": "gpus", "tpu": "portable"}
    assert choose("product", BACKENDS, "portable", lambda target: ()) == tuple((p, "portable") for p in PLATFORMS)


def test_names_that_cannot_be():
    with pytest.raises(UserError, match=r"^product: no backend 'gpu'; did you mean 'gpus'\?$"):
        chosen(("portable", "gpu"), CPU)
    with pytest.raises(UserError, match=r"^product=new_gpus gpus: does not run on cpu; choose portable$"):
        chosen(("new_gpus", "gpus"), CPU)
    with pytest.raises(UserError, match=r"^product=new_gpus: does not run on cuda 8.0; choose gpus or portable$"):
        chosen(("new_gpus",), OLD)


def test_the_lowering_chooses_where_platforms_differ():
    functions, choice = {"portable": jnp.sin, "gpus": jnp.cos}, tuple(chosen((), None).items())
    traced = jax.jit(lambda x: run(choice, functions.__getitem__, x)).trace(jnp.ones(3))
    for platform, name in (("cpu", "sine"), ("cuda", "cosine"), ("tpu", "sine")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"stablehlo.{name}" in text
        assert ("stablehlo.sine" in text) != ("stablehlo.cosine" in text)


def test_one_choice_for_all_leaves_nothing_to_the_lowering():
    for choice in ((("", "gpus"),), tuple((platform, "gpus") for platform in PLATFORMS)):
        program = jax.make_jaxpr(lambda x, c=choice: run(c, {"gpus": jnp.cos}.__getitem__, x))(1.0)
        assert [equation.primitive.name for equation in program.eqns] == ["cos"]


def test_the_target_is_that_of_the_mesh():
    assert Execution().target is None
    assert Execution(mesh=abstract_mesh(MeshShape())).target is None
    execution = Execution(mesh=make_mesh(MeshShape()), kernels=Kernels(attention=("reference",)))
    assert isinstance(execution.mesh, Mesh)
    assert execution.target == CPU
    assert execution.kernel("attention") == KernelOrder(("reference",), CPU)
    assert execution.kernel("grouped_matmul") == KernelOrder((), CPU)
    abstract = execution.mesh.abstract_mesh
    assert isinstance(abstract, AbstractMesh)
    assert Execution(mesh=abstract).target == CPU


def test_devices_that_say_gpu_are_told_apart():
    """As JAX's own devices, and those of meshes that are only compiled for, describe themselves."""
    kinds = [("gpu", "9.0", "NVIDIA H200", NEW), ("gpu", "gfx942", "AMD Instinct MI300X", AMD)]
    kinds += [("gpu", None, "NVIDIA H200", Target("cuda")), ("gpu", None, "AMD Instinct MI300X", Target("rocm"))]
    for platform, capability, kind, wanted in [*kinds, ("tpu", None, "TPU v5p", Target("tpu"))]:
        attributes = {} if capability is None else {"compute_capability": capability}
        assert device_target(SimpleNamespace(platform=platform, device_kind=kind, **attributes)) == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": ("chunked",)}, r"^kernels=\('chunked',\): expected tuples of names, such as moezoo.Kernels\("),
        ({"kernels": Kernels(attention="chunked")}, r"expected tuples of names"),  # type: ignore[arg-type]
        ({"context_parallel": "gather"}, r"^context_parallel='gather' is no ContextParallel"),
        ({"remat": "ful"}, r"^remat='ful': did you mean 'full'"),
        ({"routing": "chance"}, r"^routing='chance': valid: "),
    ],
)
def test_an_execution_checks_what_it_is_given(options, said):
    execution = Execution()
    for name, value in options.items():  # past the suite's type checker, which refuses first
        object.__setattr__(execution, name, value)
    with pytest.raises(UserError, match=said):
        execution.__post_init__()
