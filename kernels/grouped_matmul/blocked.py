"""The portable backend: group after group, the rows of each in blocks, nothing for rows beyond the last group.

On a CPU a product inside a loop is one call of a fast matrix product. Three choices make use of that:

- A group's matrix is sliced out of `weights` once per group, not once per block, and never transposed in memory.
- A group's rows are cut into large blocks while they fit, then into smaller ones. Only the last block is partly filled,
  so at most `BLOCKS[-1] - 1` rows per group are computed in vain.
- Groups without rows are skipped.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moezoo.kernels.grouped_matmul.backend import GroupMatrices, GroupSizes
from moezoo.parallel.collectives import vary_like
from moezoo.parallel.stacks import turned
from moezoo.parallel.stored import Matrices, matrix_of

BLOCKS = (256, 128, 32)


class Blocks(NamedTuple):
    """Rows per block, sorted, the largest first.

    - `products`: of a product alone, as `BLOCKS`;
    - `experts`: of a whole MLP of an expert in one loop, as `moezoo.kernels.grouped_matmul.routed.SIZES`.
    """

    products: tuple[int, ...]
    experts: tuple[int, ...]


# A step of a loop costs a GPU some launches, so there are few of them: a block is large, and only few sizes are tried.
# Even 512 rows times 2,048 columns, 64 tiles of 128 x 128 numbers, do not occupy all multiprocessors (110 to 150 of
# them). Not measured.
ON_GPUS = Blocks((512, 128), (512, 128))

Mask = Bool[Array, "block 1"] | None
# (carry, first row of the block, which of its rows count or None for all, rows per block) -> carry
Step = Callable[[Any, Int[Array, ""], Mask, int], Any]


def repeat(count: Int[Array, ""], body: Callable[[Int[Array, ""], Any], Any], carry: Any) -> Any:
    """Run `body(i, carry)` for `i` from 0 to `count` - 1."""
    return lax.fori_loop(jnp.zeros_like(count), count, body, carry)


def each_group(group_sizes: GroupSizes, step: Callable[..., Any], carry: Any) -> Any:
    """Run `step(group, its first row, the row after its last, carry)` for each group that has rows."""
    ends = jnp.cumsum(group_sizes)
    used = group_sizes > 0
    order = jnp.argsort(~used, stable=True).astype(group_sizes.dtype)

    def body(i: Int[Array, ""], carry: Any) -> Any:
        g = order[i]
        return step(g, ends[g] - group_sizes[g], ends[g], carry)

    return repeat(used.sum(dtype=group_sizes.dtype), body, carry)


def _over_rows(
    start: Int[Array, ""], stop: Int[Array, ""], rows: int, blocks: tuple[int, ...], step: Step, carry: Any
) -> Any:
    """Run `step` over blocks that cover rows [start, stop) of `rows` exactly once."""
    *larger, smallest = [block for block in blocks if block <= rows] or [rows]
    for block in larger:
        count = (stop - start) // block
        carry = repeat(count, _on_full_blocks(start, block, step), carry)
        start = start + count * block

    def last(i: Int[Array, ""], carry: Any) -> Any:
        window, mask = _window(start + i * smallest, stop, rows, smallest)
        return step(carry, window, mask, smallest)

    return repeat((stop - start + smallest - 1) // smallest, last, carry)


def _on_full_blocks(start: Int[Array, ""], block: int, step: Step) -> Callable[[Int[Array, ""], Any], Any]:
    return lambda i, carry: step(carry, start + i * block, None, block)


def _window(
    first: Int[Array, ""], stop: Int[Array, ""], rows: int, block: int
) -> tuple[Int[Array, ""], Bool[Array, "block 1"]]:
    """Return the first row of a block and which of its rows are in [first, stop).

    A block that would end beyond `rows` begins earlier.
    """
    window = jnp.minimum(first, rows - block)
    row = window + lax.iota(window.dtype, block)
    return window, ((row >= first) & (row < stop))[:, None]


def _slice(x: Float[Array, "rows a"], first: Int[Array, ""], mask: Mask, block: int) -> Float[Array, "block a"]:
    """Return the rows of a block, with zeros in rows that do not count. (Times zero would keep a NaN.)"""
    part = lax.dynamic_slice_in_dim(x, first, block)
    return part if mask is None else jnp.where(mask, part, jnp.zeros((), x.dtype))


def dot(x: Float[Array, "block a"], y: Float[Array, "b c"], x_dim: int, y_dim: int) -> Float[Array, "d e"]:
    """Sum the product over one dimension of each operand, in float32."""
    x = x if x_dim else turned(x)
    return lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=jnp.float32)


def multiply(
    rows: Float[Array, "rows a"],
    weights: GroupMatrices | Matrices,
    group_sizes: GroupSizes,
    contract: Literal[1, 2],
    blocks: tuple[int, ...] | None = None,
) -> Float[Array, "rows b"]:
    """Multiply group after group, skipping those without rows; in `BLOCKS` unless `blocks` are given.

    The sum is over dimension `contract` of the weights [groups, 1, 2].
    """

    def group(g: Int[Array, ""], start: Int[Array, ""], stop: Int[Array, ""], result: Array) -> Array:
        weight = matrix_of(weights, g)

        def step(result: Array, first: Int[Array, ""], mask: Mask, block: int) -> Array:
            x = lax.dynamic_slice_in_dim(rows, first, block)
            y = dot(x, weight, 1, contract - 1).astype(rows.dtype)
            if mask is not None:
                y = jnp.where(mask, y, lax.dynamic_slice_in_dim(result, first, block))
            return lax.dynamic_update_slice_in_dim(result, y, first, 0)

        return _over_rows(start, stop, rows.shape[0], blocks or BLOCKS, step, result)

    result = vary_like(jnp.zeros((rows.shape[0], weights.shape[3 - contract]), rows.dtype), rows)
    return each_group(group_sizes, group, result)


def outer(
    rows: Float[Array, "rows inputs"],
    others: Float[Array, "rows outputs"],
    group_sizes: GroupSizes,
    dtype: DTypeLike,
    blocks: tuple[int, ...] | None = None,
) -> GroupMatrices:
    """Sum over a group's blocks in float32 and write the sum once; zero for groups without rows.

    The sum begins with the product of the rows that do not fill a largest block, so a small group has no other.
    """
    ends = jnp.cumsum(group_sizes)
    total, largest = rows.shape[0], min((blocks or BLOCKS)[0], rows.shape[0])
    smallest = (blocks or BLOCKS)[-1]
    sizes = sorted({min(size, largest) for size in range(smallest, largest + smallest, smallest)})

    def product(first: Int[Array, ""], mask: Mask, block: int) -> Array:
        return dot(_slice(rows, first, mask, block), _slice(others, first, mask, block), 0, 0)

    def group(bounds: tuple[Array, Array]) -> Array:
        start, stop = bounds
        count = (stop - start) // largest
        first = start + count * largest

        def rest(size: int) -> Array:
            window, mask = _window(first, stop, total, size)
            return product(window, mask, size)

        def nothing() -> Array:
            return vary_like(jnp.zeros((rows.shape[1], others.shape[1]), jnp.float32), rows, group_sizes)

        which = jnp.searchsorted(jnp.asarray([0, *sizes]), stop - first)
        begun = lax.switch(which, [nothing, *(functools.partial(rest, size) for size in sizes)])
        body = _on_full_blocks(start, largest, lambda sum_, first, mask, block: sum_ + product(first, mask, block))
        return repeat(count, body, begun).astype(dtype)

    return lax.map(group, (ends - group_sizes, ends))
