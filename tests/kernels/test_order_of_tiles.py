"""The bytes that grouped products read from a GPU's memory, by the order in which programs take tiles.

A model, not a measurement: programs run in their order, each reads its rows and its columns of matrices, and the second
cache keeps what was used last. Half of an H100's 50 MiB count, because each half of the processors has its own copies.
`pytest -n 0 -s tests/kernels/test_order_of_tiles.py` prints the table of docs/benchmarks.md.
"""

import functools
import math
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import ACCELERATOR
from moezoo.kernels.grouped_matmul import chips, tensor_cores

CACHE = 25 << 20
# The product -> its depth, its width, arrays of rows, matrices per array, and which dimension is summed over, by names.
PRODUCTS: dict[str, tuple[str, str, int, int, Any]] = {
    "up": ("embed", "mlp", 1, 1, 1),
    "gated": ("embed", "mlp", 1, 2, 1),
    "down": ("mlp", "embed", 1, 1, 1),
    "by rows": ("mlp", "embed", 2, 1, 2),
}


def order_of(patch: pytest.MonkeyPatch, product: str, name: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the tile (task, column) of each program of the real kernel, and the numbers of tasks and columns."""
    shape, (deep, wide, arrays, each, contract) = ACCELERATOR[name], PRODUCTS[product]
    depth, width, calls = getattr(shape, deep), getattr(shape, wide), []
    really: Any = tensor_cores.plgpu.planar_snake

    def record(program: Any, *rest: Any) -> Any:
        calls.append(rest)
        return really(program, *rest)

    x = jax.ShapeDtypeStruct((shape.rows, depth), jnp.bfloat16)
    matrix = (shape.experts, depth, width) if contract == 1 else (shape.experts, width, depth)
    w, sizes = jax.ShapeDtypeStruct(matrix, jnp.bfloat16), jax.ShapeDtypeStruct((shape.experts,), jnp.int32)

    def run(xs: Any, ws: Any, sizes: Any) -> Any:
        sums = 1 if arrays > 1 else each
        return tensor_cores.row_products(chips.HOPPER, xs, ws, sizes, contract, lambda *found: found, sums)

    with patch.context() as here:
        here.setattr(tensor_cores.plgpu, "planar_snake", record)
        jax.eval_shape(run, (x,) * arrays, (w,) * (arrays * each), sizes)
    (grid, *rest), *_ = calls
    order = jax.vmap(lambda program: jnp.stack(really(program, grid, *rest)))(jnp.arange(math.prod(grid)))
    return np.asarray(order), grid


def read_bytes(product: str, name: str, order: np.ndarray, grid: tuple[int, int]) -> int:
    """Return the bytes that a product reads, of groups of equal size."""
    shape, (deep, wide, arrays, each, _) = ACCELERATOR[name], PRODUCTS[product]
    of_rows, of_columns = 2 * getattr(shape, deep) * 128 * arrays, getattr(shape, deep) * 2 * arrays * each
    of_columns *= getattr(shape, wide) // grid[1]
    cached: OrderedDict[Any, int] = OrderedDict()
    total = used = 0
    for task, column in order:
        if task >= shape.rows // 128:  # not needed where groups begin at multiples of the height of a tile
            continue
        group = task * 128 * shape.experts // shape.rows
        for key, size in (("rows", task), of_rows), ((group, column), of_columns):
            if key not in cached:
                total, used = total + size, used + size
                cached[key] = size
            cached.move_to_end(key)
            while used > CACHE:
                used -= cached.popitem(last=False)[1]
    return total


@pytest.mark.parametrize(("product", "name"), [*((product, "S2") for product in PRODUCTS), ("gated", "L1")])
def test_rows_are_read_rarely(product, name, monkeypatch):
    """At most once per 8 columns of tiles, and matrices once."""
    shape, (deep, _, arrays, each, _) = ACCELERATOR[name], PRODUCTS[product]
    found, grid = order_of(monkeypatch, product, name)
    read = functools.partial(read_bytes, product, name)
    rows = 2 * shape.rows * getattr(shape, deep) * arrays
    matrices = 2 * shape.experts * shape.embed * shape.mlp * arrays * each
    total = read(found, grid)
    one_by_one = read(np.stack([np.tile(np.arange(grid[0]), grid[1]), np.repeat(np.arange(grid[1]), grid[0])], 1), grid)
    print(f"\n{name} {product}: {one_by_one / 1e9:.2f} GB column by column of tiles, {total / 1e9:.2f} in this order")
    assert total <= 1.02 * (rows * math.ceil(grid[1] / 8) + matrices)
    assert total < one_by_one / 2
