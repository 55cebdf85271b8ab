"""MLPs of experts for so few rows that reading their matrices takes the time: row by row, without copying a matrix.

Rows are sorted by expert, so the later rows of an expert find its matrices in the CPU's cache.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.kernels.grouped_matmul.backend import Activation
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.stacked import InStack, times_matrix

# Rows per expert up to which blocks, which copy a matrix once and multiply it fast, take longer.
ROWS_PER_EXPERT = 4


def suits(rows: int, *weights: Array | InStack) -> bool:
    """Return whether this way is the fastest on a CPU: for few rows, and for weights that are in their stack."""
    return all(
        isinstance(w, InStack) and w.shape[1] % 16 == 0 and rows <= ROWS_PER_EXPERT * w.shape[0] for w in weights
    )


def mlp(
    rows: Float[Array, "rows embed"],
    gate: InStack,
    up: InStack,
    down: InStack,
    group_sizes: Int[Array, " groups"],
    *,
    activation: Activation,
) -> Float[Array, "rows embed"]:
    """Return down(activation(gate x, up x)) of each row's expert; zero for rows after the last group."""
    ends = jnp.cumsum(group_sizes)
    expert = (lax.iota(jnp.int32, rows.shape[0])[:, None] >= ends[None]).sum(1, dtype=jnp.int32)

    def times(x: Array, weights: InStack, expert: Array) -> Array:
        return times_matrix(x, weights.stack, (weights.layer, expert), weights.dtype).astype(rows.dtype)

    def one(i: Int[Array, ""], result: Array) -> Array:
        x, e = rows[i], expert[i]
        y = times(activation(times(x, gate, e), times(x, up, e)), down, e)
        return lax.dynamic_update_index_in_dim(result, y, i, 0)

    result = vary_like(jnp.zeros_like(rows), rows, gate.stack, up.stack, down.stack, group_sizes)
    count = ends[-1]
    return lax.fori_loop(jnp.zeros_like(count), count, one, result)
