"""Seconds on links: by hand, against link loads of plain schedules, and against JAX's own layouts."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from refusals import refused

from moezoo.parallel.mesh import AXES, MeshShape, mesh_of
from moezoo.parallel.traffic import Row, Traffic, TrafficTable
from moezoo.tools.absent import absent_devices
from moezoo.tools.plan.hardware import CHIPS, Slice, parse_slice, places_of

GIGA = 10**9


def one(collective: str, *axes: str) -> TrafficTable:
    """Return the table of one collective that brings 1 GB to each device."""
    return TrafficTable({Row("", "forward", collective, axes): Traffic(1, GIGA)})


def seconds(topology: str, collective: str, axes: str, **mesh: Any) -> dict[str, float]:
    """Return the seconds of each cut that anything passes."""
    found = parse_slice(topology).link_seconds(MeshShape(**mesh).sizes, one(collective, *axes.split()))
    return {name: value for name, value in found.items() if value}


def test_sizes():
    assert [parse_slice(text).devices for text in ("v5p", "v5p:8x8x8", "v5e:4x8", "tpu7x", "tpu7x:4x4x4")] == [
        *(8, 512, 32, 8, 128)
    ]
    assert [parse_slice(text).devices for text in ("h200", "h200:4", "b200:16x8")] == [8, 4, 128]
    assert str(parse_slice("v6e:4x4")) == "v6e:4x4"
    assert {Slice(chip, chip.eight).devices for chip in CHIPS.values()} == {8}


def test_refuses_a_mesh():
    with refused("topology=v5p:2x2x2 has 8 devices and the mesh 16; choose equal numbers"):
        seconds("v5p", "psum", "fsdp", fsdp=16)


def test_torus_by_hand():
    """512 chips: experts along x, parameters over y and z; links of 100 GB/s, rings of 8."""
    mesh = {"fsdp": 64, "expert": 8}
    # Seven eighths of what comes from 63 devices passes either dimension alone: (8 - 1) / 63 of it.
    alone = pytest.approx(7 / 63 / 200)
    both = seconds("v5p:8x8x8", "all_gather", "fsdp", **mesh)
    assert both["ICI yz"] == pytest.approx(1 / 400)
    assert (both["ICI y"], both["ICI z"], both["ICI xy"]) == (alone, alone, pytest.approx(7 / 63 / 400))
    assert both["ICI"] == pytest.approx(1 / 600)
    assert "ICI x" not in both
    # Rows travel two hops on average, and an eighth of them none, which is not received.
    rows = {"ICI x": 2 * 8 / 7 / 200, "ICI xy": 2 * 8 / 7 / 400, "ICI xz": 2 * 8 / 7 / 400, "ICI": 2 * 8 / 7 / 600}
    assert seconds("v5p:8x8x8", "ragged_all_to_all", "expert", **mesh) == pytest.approx(rows)
    # Over two dimensions, neighbours may be at the same place of one of them.
    assert seconds("v5p:8x8x8", "ppermute", "expert", **mesh)["ICI x"] == pytest.approx(1 / 200)
    found = {"ICI yz": pytest.approx(1 / 400), "ICI": pytest.approx(1 / 600)}
    assert seconds("v5p:8x8x8", "ppermute", "fsdp", **mesh) == found


def test_lines_and_rings():
    """A line of 8 has 14 links in both directions, 7/4 per chip; a ring of 16 has 2. Both of 50 GB/s."""
    assert seconds("v5e:1x8", "all_gather", "fsdp", fsdp=8) == pytest.approx({"ICI": 1 / (50 * 7 / 4)})
    assert seconds("v5e:1x16", "all_gather", "fsdp", fsdp=16) == pytest.approx({"ICI": 1 / 100})
    assert seconds("v5e:1x8", "all_to_all", "fsdp", fsdp=8) == pytest.approx({"ICI": 8 / 7 * 63 / 24 / (50 * 7 / 4)})


def test_two_devices_of_a_chip():
    """They share the links of the chip, and have one of their own."""
    found = seconds("tpu7x:4x4x4", "all_gather", "fsdp", fsdp=128)
    assert found["ICI and D2D"] == pytest.approx(1 / (6 * 50 + 600))
    # Both devices of a chip need the same 126 parts, which enter it once.
    assert found["ICI"] == pytest.approx(63 / 127 / (6 * 50))
    assert CHIPS["tpu7x"].flops == pytest.approx(2307e12 / 2)


def test_nodes_by_hand():
    """8 nodes of 8 GPUs: 450 GB/s in a node, 50 GB/s out of it."""
    mesh = {"fsdp": 8, "expert": 8}
    assert seconds("h200:8x8", "all_gather", "expert", **mesh) == pytest.approx({"NVLink": 1 / 500})
    across = {"network": 1 / 50, "NVLink": 1 / 500}
    assert seconds("h200:8x8", "reduce_scatter", "fsdp", **mesh) == pytest.approx(across)
    # What a node needs enters it once, for all its GPUs; each GPU's rows are its own.
    assert seconds("h200:8x8", "all_gather", "fsdp expert", **mesh)["network"] == pytest.approx(7 / 63 / 50)
    assert seconds("h200:8x8", "psum", "expert fsdp", **mesh)["network"] == pytest.approx(8 / 63 / 50 / 2)
    assert seconds("h200:8x8", "all_to_all", "fsdp expert", **mesh)["network"] == pytest.approx(56 / 63 / 50)
    assert seconds("h200:8", "all_to_all", "expert", expert=8) == pytest.approx({"NVLink": 1 / 450})
    # The last mesh axis has half a node: an axis of 8 before it reaches into 4 nodes.
    assert seconds("h200:4x8", "all_gather", "fsdp", fsdp=8, expert=4)["network"] == pytest.approx(3 / 7 / 50)


def test_an_all_to_all_on_a_ring_is_the_load_of_its_busiest_link():
    """With each row on the shortest way, and half of those to the opposite chip each way round."""
    size, loads = 8, {}
    for source, hops in itertools.product(range(8), range(1, 5)):
        for way, step in itertools.product((1, -1), range(hops)):
            link = (source + way * step) % size, way
            loads[link] = loads.get(link, 0) + GIGA / 7 / (2 if hops == 4 else 1)
    found = seconds("v5p:8x1x1", "all_to_all", "expert", expert=8)["ICI"]
    assert found == pytest.approx(max(loads.values()) / 100e9)


@pytest.mark.parametrize(("topology", "fsdp", "expert"), [("v5p:4x4x8", 16, 8), ("v5e:4x8", 4, 8), ("v6e:16x4", 16, 4)])
def test_no_schedule_is_faster(topology, fsdp, expert):
    """Gathers that pass one dimension after the other, in both directions of a ring and at the end of a line."""
    where = parse_slice(topology)
    for axes in (("fsdp",), ("expert",), ("fsdp", "expert")):
        total = math.prod({"fsdp": fsdp, "expert": expert}[axis] for axis in axes)
        places = np.moveaxis(
            places_of(where, (1, fsdp, expert, 1, 1)), [AXES.index(axis) for axis in axes], range(len(axes))
        )
        group = places.reshape(total, -1, places.shape[-1])[:, 0]
        each, taken, time = GIGA / (total - 1), 1, 0.0
        for dim, size in enumerate(where.sizes):
            part = len(set(group[:, dim]))
            ring = part == size and size % where.chip.ring == 0
            time += each * taken * (part - 1) / where.chip.link_speed / (2 if ring else 1)
            taken *= part
        assert taken == total
        found = where.link_seconds(
            {"data": 1, "fsdp": fsdp, "expert": expert, "context": 1, "tensor": 1}, one("all_gather", *axes)
        )
        assert 0 < max(found.values()) <= time


@pytest.mark.parametrize("topology", ["v5e:4x8", "v5p:4x4x2", "tpu7x:4x4x1", "h200:4x8"])
def test_faster_links_never_slow_anything(topology):
    where, mesh = parse_slice(topology), {"fsdp": 4, "expert": 8}
    for field in ("link_speed", "network_speed", "inner_speed"):
        faster = where._replace(chip=where.chip._replace(**{field: 2 * getattr(where.chip, field)}))
        for kind in ("all_gather", "all_to_all", "psum", "ppermute"):
            table = one(kind, "fsdp", "expert")
            before, after = where.link_seconds(mesh, table), faster.link_seconds(mesh, table)
            assert all(0 <= after[name] <= before[name] for name in before)
            if getattr(where.chip, field):
                assert any(after[name] < before[name] for name in before)


def test_rows_add_up():
    where, mesh = parse_slice("v5e:4x8"), {"fsdp": 4, "expert": 8}
    tables = one("all_gather", "fsdp"), one("all_to_all", "expert")
    apart = [where.link_seconds(mesh, table) for table in tables]
    together = where.link_seconds(mesh, TrafficTable({**tables[0], **tables[1]}))
    assert together == pytest.approx({name: apart[0][name] + apart[1][name] for name in together})
    assert set(where.link_seconds(mesh, TrafficTable()).values()) == {0.0}
    assert parse_slice("v5e:1x1").link_seconds({"fsdp": 1}, one("psum", "fsdp")) == {}


@pytest.mark.absent
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e", {"fsdp": 2, "expert": 4}),
        ("v5e:4x8", {"fsdp": 4, "expert": 8}),
        ("v5p:4x4x4", {"fsdp": 8, "expert": 8}),
        ("v6e:8x8", {"data": 2, "fsdp": 8, "expert": 4}),
        ("tpu7x", {"fsdp": 8}),
        ("tpu7x:4x4x4", {"fsdp": 16, "expert": 8}),
    ],
    ids=str,
)
def test_meshes_lie_as_on_the_real_slice(topology, mesh):
    shape = MeshShape(**mesh)
    there, own = (
        mesh_of(shape, absent_devices(topology)).devices,
        places_of(parse_slice(topology), tuple(shape.sizes.values())),
    )
    places = [(*device.coords, device.core_on_chip) for device in there.flat]
    torus = own.shape[-1] - 1
    assert (np.asarray(places)[:, [*range(torus), 3]] == own.reshape(-1, torus + 1)).all()
