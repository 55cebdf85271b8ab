"""The portable backend: group after group, the rows of each in blocks, and no row beyond the last group.

What makes it fast on a CPU, where each product inside a loop is one call of a good matrix product:
- a group's matrix is taken out of `weights` once a group, not once a block, and never transposed in memory;
- a group goes in large blocks while they fit and then in small ones, of which only the last is partly filled, so that
  products have many rows and yet few are computed in vain: at most `_BLOCKS[-1] - 1` a group;
- groups without rows are not looked at.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moezoo.collectives import vary_like

_BLOCKS = (256, 64)

Mask = Bool[Array, "block 1"] | None
# carry, first row of the block, which of its rows count (None: all), rows a block -> carry
Step = Callable[[Any, Int[Array, ""], Mask, int], Any]


def _over_rows(start: Int[Array, ""], stop: Int[Array, ""], rows: int, step: Step, carry: Any) -> Any:
    """Run `step` over blocks that cover rows [start, stop) of `rows`, once each."""
    blocks = [block for block in _BLOCKS if block <= rows] or [rows]
    for block in blocks[:-1]:
        count = (stop - start) // block
        carry = lax.fori_loop(jnp.zeros_like(count), count, _whole(start, block, step), carry)
        start = start + count * block
    count = (stop - start + blocks[-1] - 1) // blocks[-1]
    return lax.fori_loop(jnp.zeros_like(count), count, _partial(start, stop, rows, blocks[-1], step), carry)


def _whole(start: Int[Array, ""], block: int, step: Step) -> Callable[[Int[Array, ""], Any], Any]:
    return lambda i, carry: step(carry, start + i * block, None, block)


def _partial(
    start: Int[Array, ""], stop: Int[Array, ""], rows: int, block: int, step: Step
) -> Callable[[Int[Array, ""], Any], Any]:
    def body(i: Int[Array, ""], carry: Any) -> Any:
        first = start + i * block
        window = jnp.minimum(first, rows - block)  # the last one must not reach beyond the array
        row = window + lax.iota(window.dtype, block)
        return step(carry, window, ((row >= first) & (row < stop))[:, None], block)

    return body


def _slice(x: Float[Array, "rows a"], first: Int[Array, ""], mask: Mask, block: int) -> Float[Array, "block a"]:
    """Rows of a block, zero where they do not count: not times zero, which would leave a NaN."""
    part = lax.dynamic_slice_in_dim(x, first, block)
    return part if mask is None else jnp.where(mask, part, jnp.zeros((), x.dtype))


def multiply(
    rows: Float[Array, "rows a"],
    weights: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
    contract: Literal[1, 2],
) -> Float[Array, "rows b"]:
    """Groups with rows, one after the other."""
    ends = jnp.cumsum(group_sizes)
    used = group_sizes > 0
    order = jnp.argsort(~used, stable=True).astype(group_sizes.dtype)
    count = used.sum(dtype=group_sizes.dtype)

    def group(i: Int[Array, ""], result: Array) -> Array:
        g = order[i]
        weight = lax.dynamic_index_in_dim(weights, g, keepdims=False)

        def step(result: Array, first: Int[Array, ""], mask: Mask, block: int) -> Array:
            x = lax.dynamic_slice_in_dim(rows, first, block)
            numbers = (((1,), (contract - 1,)), ((), ()))
            y = lax.dot_general(x, weight, numbers, preferred_element_type=jnp.float32).astype(rows.dtype)
            if mask is not None:
                y = jnp.where(mask, y, lax.dynamic_slice_in_dim(result, first, block))
            return lax.dynamic_update_slice_in_dim(result, y, first, 0)

        return _over_rows(ends[g] - group_sizes[g], ends[g], rows.shape[0], step, result)

    result = vary_like(jnp.zeros((rows.shape[0], weights.shape[3 - contract]), rows.dtype), rows)
    return lax.fori_loop(jnp.zeros_like(count), count, group, result)


def outer(
    rows: Float[Array, "rows inputs"],
    others: Float[Array, "rows outputs"],
    group_sizes: Int[Array, " groups"],
    dtype: DTypeLike,
) -> Float[Array, "groups inputs outputs"]:
    """A sum over a group's blocks in float32, written once; zero for groups without rows."""
    ends = jnp.cumsum(group_sizes)

    def step(total: Array, first: Int[Array, ""], mask: Mask, block: int) -> Array:
        x, y = _slice(rows, first, mask, block), _slice(others, first, mask, block)
        return total + lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def group(bounds: tuple[Array, Array]) -> Array:
        zero = vary_like(jnp.zeros((rows.shape[1], others.shape[1]), jnp.float32), rows)
        return _over_rows(*bounds, rows.shape[0], step, zero).astype(dtype)

    return lax.map(group, (ends - group_sizes, ends))
