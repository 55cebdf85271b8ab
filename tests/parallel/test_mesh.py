"""Mesh shapes and the devices behind them."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from moezoo.errors import UserError
from moezoo.parallel.mesh import AXES, MeshShape, cpu_devices, has_started, make_mesh, mesh_of, prepare


def refuses(said, function, *arguments, **options):
    """`function` raises exactly this line."""
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        function(*arguments, **options)


def test_shape():
    assert MeshShape().devices == 1
    shape = MeshShape(fsdp=2, expert=4)
    assert shape.sizes == {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}
    assert shape.devices == 8
    assert MeshShape(fsdp=-1, expert=4).devices == 4


def test_shapes_that_make_no_sense():
    refuses("mesh.fsdp=0 must be at least 1, or -1 for all devices left", MeshShape, fsdp=0)
    refuses("mesh.expert=-2 must be at least 1, or -1 for all devices left", MeshShape, expert=-2)
    refuses("mesh.data and mesh.expert are both -1; only one axis can take the rest", MeshShape, data=-1, expert=-1)


def test_mesh_has_every_axis_and_the_first_devices():
    mesh = make_mesh(MeshShape(fsdp=2, expert=2))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 1}
    assert list(mesh.devices.flat) == jax.devices()[:4]
    # The step names its own collectives, and so would sharding propagation under another type.
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_minus_one_takes_the_rest():
    assert make_mesh(MeshShape(fsdp=-1, expert=2)).shape["fsdp"] == 4
    assert make_mesh(MeshShape(expert=-1)).shape["expert"] == 8
    assert make_mesh(MeshShape(data=8, fsdp=-1)).shape["fsdp"] == 1
    refuses(
        "mesh.fsdp=-1 takes all devices the other axes leave, but they multiply to 3, which does not divide 8 devices; "
        "set mesh.fsdp to a number",
        make_mesh,
        MeshShape(fsdp=-1, expert=3),
    )


def test_too_few_accelerators_offers_the_cpu():
    refuses(
        "mesh.fsdp=2 mesh.expert=4 needs 8 devices but this machine has 4 (gpu); choose a smaller mesh, or "
        "set JAX_PLATFORMS=cpu to run on 8 virtual CPU devices",
        mesh_of,
        MeshShape(fsdp=2, expert=4),
        [SimpleNamespace(platform="gpu")] * 4,
    )


def test_too_few_cpu_devices_says_how_to_have_more():
    refuses(
        "mesh.expert=16 needs 16 devices but JAX has already started with 8 on the CPU; ask for 16 first: "
        "moezoo.cpu_devices(16) or JAX_NUM_CPU_DEVICES=16",
        make_mesh,
        MeshShape(expert=16),
    )


def test_cpu_devices_too_late():
    assert jax.device_count() == 8
    assert has_started()
    cpu_devices(8)  # what there is already
    refuses(
        "cpu_devices(4) comes too late: JAX has already started with 8 CPU devices; call it before anything else of "
        "JAX (restart the notebook's kernel first)",
        cpu_devices,
        4,
    )
    refuses("cpu_devices(0): must be at least 1", cpu_devices, 0)


@pytest.mark.parametrize(
    "first",
    [
        "moezoo.cpu_devices(8); moezoo.cpu_devices(8)",
        "moezoo.make_mesh(moezoo.MeshShape(expert=8))",
    ],
)
def test_eight_cpu_devices_in_a_fresh_process(first):
    """Where nobody asked for devices beforehand, as in a notebook or a script."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    if "cpu_devices" not in first:
        settings["JAX_PLATFORMS"] = "cpu"  # on a machine with accelerators the mesh would take those
    command = [sys.executable, "-c", f"import moezoo; {first}; import jax; print(jax.device_count('cpu'))"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8"]


@pytest.mark.parametrize("chosen", ["", "--xla_cpu_enable_concurrency_optimized_scheduler=true"])
def test_programs_from_a_cache_run_in_order(monkeypatch, chosen):
    """With jax 0.10, whose cached programs else compute other numbers; the suite has a cache. A user's choice stays."""
    monkeypatch.setenv("XLA_FLAGS", chosen)
    monkeypatch.setattr("moezoo.parallel.mesh.has_started", lambda: False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    prepare(8)
    added = "--xla_cpu_enable_concurrency_optimized_scheduler=false" * jax.__version__.startswith("0.10.")
    assert os.environ["XLA_FLAGS"] == (chosen or added)
