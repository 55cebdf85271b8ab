"""Products of the kernels for Hopper and Blackwell run on while tiles are loaded: none may lose what it reads.

A GPU runs a product while the program goes on, and where a load overwrites its operands the result is undefined.
Interpreted kernels cannot show that. So the order of the instructions is read (`instructions.py`).
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from instructions import rings_of, running_at_loads, texts_of

from moezoo.kernels.grouped_matmul import chips, tensor_cores
from moezoo.kernels.grouped_matmul.chips import Tiles

ROWS, EMBED, WIDTH, GROUPS = 300, 512, 256, 4
CHIPS = {"hopper": (chips.HOPPER, (9, 0)), "blackwell": (chips.BLACKWELL, (10, 0))}
# A name for each main loop -> the function, the shapes of its operands, and the number of its sums.
LOOPS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], int]] = {
    "multiply": (
        lambda chip, x, w, sizes: tensor_cores.multiply(chip, x, w, sizes, 1),
        ((ROWS, EMBED), (GROUPS, EMBED, WIDTH)),
        1,
    ),
    "multiply by transposed": (
        lambda chip, x, w, sizes: tensor_cores.multiply(chip, x, w, sizes, 2),
        ((ROWS, EMBED), (GROUPS, WIDTH, EMBED)),
        1,
    ),
    "gated": (
        lambda chip, x, a, b, sizes: tensor_cores.row_products(chip, (x,), (a, b), sizes, 1, lambda *both: both, 2),
        ((ROWS, EMBED), *2 * ((GROUPS, EMBED, WIDTH),)),
        2,
    ),
    "by rows": (
        lambda chip, x, y, a, b, sizes: tensor_cores.row_products(
            chip, (x, y), (a, b), sizes, 2, lambda total: (total,), 1
        ),
        (*2 * ((ROWS, EMBED),), *2 * ((GROUPS, WIDTH, EMBED),)),
        1,
    ),
    "outer": (
        lambda chip, x, y, sizes: tensor_cores.outer(chip, x, y, sizes, jnp.bfloat16),
        ((ROWS, EMBED), (ROWS, WIDTH)),
        1,
    ),
}


def shapes_of(loop: str) -> list[jax.ShapeDtypeStruct]:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in LOOPS[loop][1]]
    return [*shapes, jax.ShapeDtypeStruct((GROUPS,), jnp.int32)]


def running(patch: pytest.MonkeyPatch, loop: str, name: str) -> list[int]:
    """Return, for each load in the loops of a kernel, how many products may still read what it overwrites."""
    (chip, generation), (function, _, sums) = CHIPS[name], LOOPS[loop]
    gpu: Any = importlib.import_module("jax.experimental.mosaic.gpu")
    with patch.context() as here:
        for place in (gpu.core, gpu.utils):
            here.setattr(place, "_infer_arch", lambda: generation, raising=False)
        rings = rings_of(here)
        (text,) = texts_of(here, functools.partial(function, chip), *shapes_of(loop))
    (ring,) = set(rings)
    assert ring.later == 1 < ring.steps
    return running_at_loads(text, ring, sums)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("loop", LOOPS)
def test_no_load_overwrites_what_a_product_may_read(loop, chip, monkeypatch):
    found = running(monkeypatch, loop, chip)
    assert found
    assert not any(found)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("waits", ["for one product less", "never"])
def test_a_missing_wait_is_seen(loop, waits, monkeypatch):
    really: Any = chips.plgpu.wgmma_wait
    late = (lambda count: really(count + 1)) if waits != "never" else lambda count: None
    monkeypatch.setattr(chips.plgpu, "wgmma_wait", late)
    assert any(running(monkeypatch, loop, "hopper"))


def test_a_missing_wait_between_loops_is_seen(monkeypatch):
    monkeypatch.setitem(CHIPS, "hopper", (chips.HOPPER._replace(settle=lambda *_: None), (9, 0)))
    assert any(running(monkeypatch, "by rows", "hopper"))


def test_a_missing_wait_at_a_barrier_is_seen(monkeypatch):
    monkeypatch.setattr(chips.plgpu, "barrier_wait", lambda barrier: None)
    assert any(running(monkeypatch, "multiply", "blackwell"))


def least(tiles: Tiles) -> Tiles:
    """Return tiles of these sizes with the fewest buffers that are not refused."""
    sizes = (tiles._replace(buffers=buffers) for buffers in range(2**14, 2**18, 2**14))
    return next(each for each in sizes if not each.refusal())


@pytest.mark.parametrize(
    "tiles",
    [Tiles(rows=rows, columns=columns) for rows in (64, 128) for columns in (64, 128)] + [Tiles(depth=128)],
    ids=lambda tiles: "x".join(map(str, tiles[:3])),
)
def test_two_steps_fit_where_sizes_are_not_refused(tiles, monkeypatch):
    """And sizes that are refused have a loop in which they do not."""
    rings, fewest = rings_of(monkeypatch), least(tiles)

    def trace(tiles: Tiles) -> None:
        for loop, (function, *_) in LOOPS.items():
            jax.eval_shape(functools.partial(function, chips.HOPPER._replace(tiles=tiles)), *shapes_of(loop))

    trace(fewest)
    assert min(ring.steps for ring in rings) == 2
    fewer = fewest._replace(buffers=fewest.buffers - 1)
    assert fewer.refusal()
    with pytest.raises(AssertionError):
        trace(fewer)


def test_one_step_is_loaded_once(monkeypatch):
    """Where the depth of all is that of one step, no buffer is filled again."""
    rings = rings_of(monkeypatch)
    shapes = (ROWS, 64), (GROUPS, 64, WIDTH)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    jax.eval_shape(functools.partial(LOOPS["multiply"][0], chips.HOPPER), x, w, shapes_of("multiply")[-1])
    assert rings == [(1, 0)]
