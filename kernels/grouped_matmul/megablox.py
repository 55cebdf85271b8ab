"""Megablox, JAX's grouped products for TPUs in Pallas: an alternative to XLA's own, `ragged_dot`.

A step multiplies a tile of rows by a tile of one group's matrix. A tile that meets several groups is visited once for
each, and only the rows of the group are stored. Sums are in float32 and rounded once, in the kernel, so no product or
gradient is held in float32. Nobody here has timed it on a TPU.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.kernels.calls import call_unchecked
from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes

# The rows of a tile, and the bytes of its other dimension: three tiles, each twice, and the sums must fit in the memory
# of a core. A tile may reach beyond a matrix, but not beyond all rows.
ROWS, BYTES = 512, 2048
_LANES = 128  # a tile is a multiple of this


def _tiles(rows: Array, outputs: int) -> tuple[int, int, int]:
    """Return the sizes of tiles: of rows, of inputs and of outputs."""
    most = (ROWS, *2 * (BYTES // rows.dtype.itemsize,))
    count, inputs, outputs = map(min, most, (_up(size, _LANES) for size in (*rows.shape, outputs)))
    return count, inputs, outputs


def _up(size: int, multiple: int) -> int:
    return -(-max(size, 1) // multiple) * multiple


def _padded(x: Array, tile: int) -> Array:
    more = _up(x.shape[0], tile) - x.shape[0]
    return jnp.pad(x, ((0, more), (0, 0))) if more else x


def multiply(
    rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Multiply each row by its group's matrix.

    The kernel does not write rows beyond the last group. It writes the others in place, into zeros.
    """
    count, outputs = rows.shape[0], weights.shape[3 - contract]
    tiles = _tiles(rows, outputs)

    def kernel(rows: Array, *rest: Array) -> Array:
        zeros = jnp.zeros((rows.shape[0], outputs), rows.dtype)
        options: Any = {"tiling": tiles, "transpose_rhs": contract == 2, "existing_out": zeros}
        return gmm(rows, *rest, preferred_element_type=rows.dtype, **options)

    return call_unchecked(kernel, _padded(rows, tiles[0]), weights, group_sizes)[:count]


def outer(
    rows: Float[Array, "rows inputs"], others: Float[Array, "rows outputs"], group_sizes: GroupSizes, dtype: DTypeLike
) -> GroupMatrices:
    """Return rows.T @ others for the rows of each group. The kernel writes zeros for a group without rows."""
    tiles = _tiles(rows, others.shape[1])

    def kernel(rows: Array, others: Array, sizes: Array) -> Array:
        return tgmm(rows.T, others, sizes, preferred_element_type=dtype, tiling=tiles)

    return call_unchecked(kernel, *(_padded(x, tiles[0]) for x in (rows, others)), group_sizes)
