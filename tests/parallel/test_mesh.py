"""Mesh shapes and the devices behind them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from refusals import refused

import moezoo
from moezoo.host import processors
from moezoo.parallel.mesh import (
    AXES,
    THREAD_VARIABLES,
    MeshShape,
    abstract_mesh,
    cpu_devices,
    give_threads,
    has_started,
    make_mesh,
    mesh_of,
    prepare,
    take_back_threads,
)


def test_shape():
    assert MeshShape().devices == 1
    shape = MeshShape(fsdp=2, expert=4)
    assert shape.sizes == {"stage": 1, "data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}
    assert shape.devices == 8
    assert MeshShape(fsdp=-1, expert=4).devices == 4


def test_mesh_has_every_axis_and_the_first_devices():
    mesh = make_mesh(MeshShape(fsdp=2, expert=2))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"stage": 1, "data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 1}
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    explicit = MeshShape(fsdp=2, expert=2, axis_types="explicit")
    for each in (make_mesh(explicit), abstract_mesh(explicit)):
        assert set(each.axis_types) == {jax.sharding.AxisType.Explicit}


def test_arrays_of_64_bits_are_refused():
    """By what every command and every function that computes calls first."""
    config = moezoo.models.MixtralConfig(vocab=8, embed=8, layers=1, expert_mlp=4, head_dim=4)
    model = moezoo.models.Mixtral(config, key=jax.random.key(0))
    jax.config.update("jax_enable_x64", True)
    try:
        for call in (
            lambda: make_mesh(MeshShape()),
            lambda: abstract_mesh(MeshShape()),
            lambda: moezoo.generate(model, [[1]], max_new_tokens=1),
        ):
            with refused("JAX_ENABLE_X64=1", "unset"):
                call()
    finally:
        jax.config.update("jax_enable_x64", False)


def test_minus_one_takes_the_rest():
    assert make_mesh(MeshShape(fsdp=-1, expert=2)).shape["fsdp"] == 4
    assert make_mesh(MeshShape(expert=-1)).shape["expert"] == 8
    assert make_mesh(MeshShape(data=8, fsdp=-1)).shape["fsdp"] == 1
    with refused("mesh.fsdp=-1", "3", "8 devices", "set mesh.fsdp to a number"):
        make_mesh(MeshShape(fsdp=-1, expert=3))


def test_too_few_devices():
    with refused("mesh.fsdp=2 mesh.expert=4 needs 8 devices", "4 (gpu)", "JAX_PLATFORMS=cpu"):
        mesh_of(MeshShape(fsdp=2, expert=4), [SimpleNamespace(platform="gpu")] * 4)
    with refused("mesh.expert=16 needs 16 devices", "8", "moezoo.cpu_devices(16)", "JAX_NUM_CPU_DEVICES=16"):
        make_mesh(MeshShape(expert=16))


def test_cpu_devices_after_jax_has_started():
    assert jax.device_count() == 8
    assert has_started()
    cpu_devices(8)  # the number that JAX has started with
    with refused("cpu_devices(4)", "8 CPU devices", "restart the notebook's kernel"):
        cpu_devices(4)
    with refused("cpu_devices: count=0", "at least 1"):
        cpu_devices(0)


def test_eight_cpu_devices_in_a_fresh_process():
    """No variable of the environment sets the number of devices, as in a notebook. A second call is allowed."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    code = "import moezoo; moezoo.cpu_devices(8); moezoo.cpu_devices(8); import jax; print(jax.device_count('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8"]


@pytest.mark.parametrize(("version", "wanted"), [("0.10.2", 8), ("0.10.2", 1), ("0.12.0", 8)])
def test_jax_10_loads_no_programs_of_several_cpu_devices(monkeypatch, version, wanted):
    """Whatever folder JAX has been given. It would load them without the order of their collectives."""
    changed = {}
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    prepare(wanted)
    off = {"jax_enable_compilation_cache": False} if (version, wanted) == ("0.10.2", 8) else {}
    assert {name: value for name, value in changed.items() if "cache" in name} == off


@pytest.mark.parametrize(
    ("value", "devices", "wanted"), [(None, 1, [False]), (None, 8, []), ("0", 8, [False]), ("True", 1, [True])]
)
def test_where_programs_run(monkeypatch, value, devices, wanted):
    """By default programs of one CPU device run on the thread that calls them; the user's variable is obeyed."""
    changed = []
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    monkeypatch.setattr("moezoo.parallel.mesh.give_threads", lambda devices: None)
    monkeypatch.setattr(jax.config, "update", lambda *what: changed.append(what))
    monkeypatch.delenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", value)
    cpu_devices(devices)
    assert [on for name, on in changed if name == "jax_cpu_enable_async_dispatch"] == wanted
    monkeypatch.setenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", "perhaps")
    with refused("JAX_CPU_ENABLE_ASYNC_DISPATCH=perhaps", "true or false", "unset"):
        cpu_devices(devices)


_THREADS = """
import os, sys
from moezoo.parallel.mesh import MeshShape, cpu_devices, make_mesh
count, last = map(int, sys.argv[1:])
if count:
    cpu_devices(count)
def show():
    print({name: os.environ[name] for name in ("PJRT_NPROC", "NPROC") if name in os.environ})
show()
make_mesh(MeshShape(fsdp=last))
show()
names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


def threads_of(count: int, last: int, **settings: str) -> list[str]:
    """Return the variables before and after the start on `last` devices, and the threads of XLA's pool.

    Call `cpu_devices(count)` before, unless that is 0.
    """
    environment = {k: v for k, v in os.environ.items() if k not in (*THREAD_VARIABLES, "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-c", _THREADS, str(count), str(last)]
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_threads_of_cpu_devices():
    """With jax 0.10, four per device while JAX starts; a number of the user's own stays, and children inherit none."""
    early = jax.__version__.startswith("0.10.")
    one, two = str(processors()), str(max(8 if early else 2, processors()))
    by_call = str({"PJRT_NPROC": "8"} if early and processors() < 8 else {})
    assert threads_of(2, 2) == [by_call, "{}", two]
    assert threads_of(0, 2) == ["{}", "{}", two]
    assert threads_of(0, 1) == ["{}", "{}", one]
    assert threads_of(0, -1, JAX_NUM_CPU_DEVICES="2") == ["{}", "{}", two]
    for name in THREAD_VARIABLES:
        own = str({name: "5"})
        assert threads_of(2, 2, **{name: "5"}) == [own, own, "5"]


@pytest.mark.parametrize(
    ("version", "devices", "wanted"),
    [("0.10.2", 8, "32"), ("0.10.2", 1, None), ("0.10.2", 99, "256"), ("0.12.0", 8, None)],
)
def test_threads_by_version_and_devices(monkeypatch, version, devices, wanted):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr("moezoo.parallel.mesh.processors", lambda: 2)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    give_threads(3)
    give_threads(devices)  # the last call before JAX starts counts
    assert os.environ.get("PJRT_NPROC") == wanted
    take_back_threads()
    assert "PJRT_NPROC" not in os.environ
