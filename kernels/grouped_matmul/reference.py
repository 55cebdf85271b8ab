"""The naive backend: every group's matrix on every row, and a mask. It costs `groups` times the useful work."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes


def _mine(rows: Float[Array, "rows a"], group_sizes: GroupSizes) -> Float[Array, "groups rows a"]:
    ends = jnp.cumsum(group_sizes)[:, None]
    at = lax.broadcasted_iota(group_sizes.dtype, (group_sizes.shape[0], rows.shape[0]), 1)
    belongs = (at >= ends - group_sizes[:, None]) & (at < ends)
    # A product with the mask would spread a NaN from beyond the last group.
    return jnp.where(belongs[:, :, None], rows[None], jnp.zeros((), rows.dtype))


def multiply(
    rows: Float[Array, "rows a"], weights: GroupMatrices, group_sizes: GroupSizes, contract: Literal[1, 2]
) -> Float[Array, "rows b"]:
    """Sum (row belongs to the group) x row x matrix over groups."""
    equation = "gra,gab->rb" if contract == 1 else "gra,gba->rb"
    products = jnp.einsum(equation, _mine(rows, group_sizes), weights, preferred_element_type=jnp.float32)
    return products.astype(rows.dtype)


def outer(
    rows: Float[Array, "rows inputs"], others: Float[Array, "rows outputs"], group_sizes: GroupSizes, dtype: DTypeLike
) -> GroupMatrices:
    """Multiply each group's rows, with zeros for all others, by the same rows of `others`."""
    left, right = _mine(rows, group_sizes), _mine(others, group_sizes)
    return jnp.einsum("gra,grb->gab", left, right, preferred_element_type=jnp.float32).astype(dtype)
