"""The product for so few rows that most of the time goes into reading matrices: row by row, without copying a matrix.

Rows are sorted by group, so the later rows of a group find its matrix in the CPU's cache. Forward passes only.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.kernels.grouped_matmul.backend import GroupSizes
from moezoo.kernels.grouped_matmul.blocked import repeat
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.low_rank import LowRank
from moezoo.parallel.stacks import TERMS, InStack, times_matrix
from moezoo.parallel.stored import Stored

# With room for more rows per group than this, blocks take less time (`moezoo.kernels.grouped_matmul.routed`): they copy
# a matrix once and multiply it fast.
ROWS_PER_GROUP = 2


def suits(rows: int, weights: Array | Stored) -> bool:
    """Return whether this way is the fastest on a CPU, for most of the work with these weights."""
    weights = weights.base if isinstance(weights, LowRank) else weights
    return isinstance(weights, InStack) and weights.shape[1] % TERMS == 0 and rows <= ROWS_PER_GROUP * weights.shape[0]


def multiply(
    rows: Float[Array, "rows inputs"], weights: InStack, group_sizes: GroupSizes
) -> Float[Array, "rows outputs"]:
    """Multiply each row by its group's matrix; the rows after the last group become zero."""
    ends = jnp.cumsum(group_sizes)
    group = (lax.iota(jnp.int32, rows.shape[0])[:, None] >= ends[None]).sum(1, dtype=jnp.int32)

    def one(i: Int[Array, ""], result: Array) -> Array:
        y = times_matrix(rows[i], weights.stack, (weights.layer, group[i]), weights.dtype)
        return lax.dynamic_update_index_in_dim(result, y.astype(rows.dtype), i, 0)

    result = vary_like(jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype), rows, weights.stack, group_sizes)
    return repeat(ends[-1], one, result)
