"""The choice of a kernel's backend: by order, by target, and by the lowering if the target is unknown."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh
from refusals import refused

from moezoo import Execution, MeshShape, compose
from moezoo.moe.dispatch import Ring
from moezoo.parallel.kernels import (
    PLATFORMS,
    Chosen,
    KernelOrder,
    Kernels,
    Target,
    anywhere,
    choose,
    device_target,
    run,
)
from moezoo.parallel.mesh import abstract_mesh, make_mesh
from moezoo.parallel.mesh_execution import on_mesh

BACKENDS = {
    "new_gpus": lambda target: target.platform == "cuda" and (target.capability or "") >= "9.0",
    "gpus": lambda target: target.platform in ("cuda", "rocm"),
    "portable": anywhere,
}
CPU, OLD, NEW, AMD = Target("cpu"), Target("cuda", "8.0"), Target("cuda", "9.0"), Target("rocm", "gfx942")


def chosen(names, target, own=("new_gpus", "gpus", "portable")):
    """Return the backends' names by platform; with a known target, under ""."""
    return {at: one.name for at, one in choose("product", BACKENDS, KernelOrder(names, target), lambda target: own)}


@pytest.mark.parametrize(
    ("target", "wanted"),
    [(CPU, "portable"), (OLD, "gpus"), (NEW, "new_gpus"), (AMD, "gpus"), (Target("tpu"), "portable")],
)
def test_the_first_backend_that_runs_on_the_target(target, wanted):
    assert chosen((), target) == {"": wanted}
    assert chosen(("portable", "gpus"), target) == {"": "portable"}
    assert chosen(("gpus", "portable"), target) == {"": "portable" if target.platform in ("cpu", "tpu") else "gpus"}


def test_without_a_target_there_is_one_for_each_platform():
    """The capability of a GPU is unknown, so no backend that needs one is chosen."""
    assert chosen((), None) == {"cpu": "portable", "cuda": "gpus", "rocm": "gpus", "tpu": "portable"}
    portable = Chosen("portable")
    assert choose("product", BACKENDS, "portable", lambda target: ()) == tuple((p, portable) for p in PLATFORMS)


def test_a_backend_gets_the_gpu_if_one_is_known():
    """Then a program without a target has a branch for it, also where the backend is that of other platforms."""
    one = ("portable",)
    assert choose("product", BACKENDS, KernelOrder(one, OLD), lambda target: ()) == (("", Chosen("portable", OLD)),)
    assert choose("product", BACKENDS, KernelOrder(one, CPU), lambda target: ()) == (("", Chosen("portable")),)
    choice = tuple((at, Chosen("portable", OLD if at == "cuda" else None)) for at in PLATFORMS)
    functions = {Chosen("portable"): jnp.sin, Chosen("portable", OLD): jnp.cos}
    traced = jax.jit(lambda x: run(choice, functions.__getitem__, x)).trace(jnp.ones(3))
    assert "stablehlo.cosine" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.sine" in traced.lower(lowering_platforms=("rocm",)).as_text()


def test_unknown_names_and_backends_that_do_not_run():
    with refused("product", "'gpu'", "did you mean 'gpus'?"):
        chosen(("portable", "gpu"), CPU)
    with refused("product=new_gpus gpus", "cpu", "choose portable"):
        chosen(("new_gpus", "gpus"), CPU)
    with refused("product=new_gpus", "cuda 8.0", "choose gpus or portable"):
        chosen(("new_gpus",), OLD)


@pytest.mark.parametrize("value", [("portable",), ["portable"], 5])
def test_what_is_no_name_is_refused(value):
    """Settings have a list of names, the argument of a function has one."""
    with refused(f"product: implementation is {value!r}, expected the name of a backend or None"):
        choose("product", BACKENDS, value, lambda target: ())


def test_the_lowering_chooses_where_platforms_differ():
    functions = {"portable": jnp.sin, "gpus": jnp.cos}
    choice = tuple((platform, Chosen(name)) for platform, name in chosen((), None).items())
    traced = jax.jit(lambda x: run(choice, lambda one: functions[one.name], x)).trace(jnp.ones(3))
    for platform, name in (("cpu", "sine"), ("cuda", "cosine"), ("tpu", "sine")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"stablehlo.{name}" in text
        assert ("stablehlo.sine" in text) != ("stablehlo.cosine" in text)


def test_one_choice_for_all_platforms_needs_no_lowering():
    gpus = Chosen("gpus")
    for choice in ((("", gpus),), tuple((platform, gpus) for platform in PLATFORMS)):
        program = jax.make_jaxpr(lambda x, c=choice: run(c, {gpus: jnp.cos}.__getitem__, x))(1.0)
        assert [equation.primitive.name for equation in program.eqns] == ["cos"]


def test_the_target_is_that_of_the_mesh():
    assert on_mesh(Execution()).target is None
    assert on_mesh(Execution(mesh=abstract_mesh(MeshShape()))).target is None
    execution = on_mesh(Execution(mesh=make_mesh(MeshShape()), kernels=Kernels(attention=("reference",))))
    assert isinstance(execution.mesh, Mesh)
    assert execution.target == CPU
    assert execution.kernel("attention") == KernelOrder(("reference",), CPU)
    assert execution.kernel("grouped_matmul") == KernelOrder((), CPU)
    abstract = execution.mesh.abstract_mesh
    assert isinstance(abstract, AbstractMesh)
    assert on_mesh(Execution(mesh=abstract)).target == CPU


def test_gpus_of_two_vendors():
    """JAX's own devices report a capability; abstract devices report none."""
    kinds = [("gpu", "9.0", "NVIDIA H200", NEW), ("gpu", "gfx942", "AMD Instinct MI300X", AMD)]
    kinds += [("gpu", None, "NVIDIA H200", Target("cuda")), ("gpu", None, "AMD Instinct MI300X", Target("rocm"))]
    for platform, capability, kind, wanted in [*kinds, ("tpu", None, "TPU v5p", Target("tpu"))]:
        attributes = {} if capability is None else {"compute_capability": capability}
        assert device_target(SimpleNamespace(platform=platform, device_kind=kind, **attributes)) == wanted


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"kernels": ("chunked",)}, ["kernels=[chunked]", "a value of Kernels"]),
        ({"kernels": Kernels(attention="chunked")}, ["kernels=", "tuples of names"]),  # type: ignore[arg-type]
        ({"dispatch": "ring"}, ["dispatch='ring'", "moezoo.moe.dispatch.Ring()", "moezoo.execution(cfg)"]),
        ({"dispatch": Ring}, ["dispatch=<class", "moezoo.moe.dispatch.Ring()"]),
        ({"context_parallel": "gather"}, ["context_parallel='gather'", "moezoo.execution(cfg)"]),
        ({"remat": "ful"}, ["remat=ful", "full, offload, dots, none"]),
        ({"routing": "chance"}, ["routing=chance", "learned, random, balanced"]),
        ({"dtype": jnp.int32}, ["dtype=int32", "float32, bfloat16"]),
        ({"dtype": "flot32"}, ["dtype=flot32", "float32, bfloat16"]),
        ({"reduce_dtype": jnp.float16}, ["reduce_dtype=float16", "float32, bfloat16"]),
    ],
)
def test_an_execution_checks_its_fields(options, parts):
    execution = Execution()
    for name, value in options.items():  # past the suite's type checker, which refuses first
        object.__setattr__(execution, name, value)
    with refused(*parts):
        execution.__post_init__()


def test_execution_settings_check_dtypes():
    """Made in Python, they refuse what the configuration refuses."""
    settings = compose().execution
    object.__setattr__(settings, "param_dtype", "float16")
    with refused("execution.param_dtype=float16", "float32, bfloat16"):
        settings.__post_init__()
