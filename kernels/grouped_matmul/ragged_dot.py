"""XLA's own grouped product, which is one kernel on a TPU.

On a CPU or a CUDA GPU XLA expands it to every group's matrix on every row.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes

# A TPU stores the last dimension in multiples of this. XLA's compiler chooses tiles of a narrow gradient, such as those
# of low-rank pairs, without counting that, and may then find no room for one (jax 0.12.0.1). It is computed transposed.
_LANES = 128


def multiply(
    rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Multiply ragged rows by one matrix per group."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (contract,)), ((), ())), [0], [0])
    products = lax.ragged_dot_general(rows, weights, group_sizes, numbers, preferred_element_type=jnp.float32)
    # XLA does not define the rows beyond the last group.
    used = lax.iota(group_sizes.dtype, rows.shape[0]) < group_sizes.sum(dtype=group_sizes.dtype)
    return jnp.where(used[:, None], products, 0).astype(rows.dtype)


def outer(
    rows: Float[Array, "rows inputs"], others: Float[Array, "rows outputs"], group_sizes: GroupSizes, dtype: DTypeLike
) -> GroupMatrices:
    """Contract the ragged dimension: one product per group."""
    if others.shape[1] < min(_LANES, rows.shape[1]):
        return outer(others, rows, group_sizes, dtype).swapaxes(1, 2)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(rows, others, group_sizes, numbers, preferred_element_type=jnp.float32).astype(dtype)
