"""The portable backend: a loop over blocks of rows, each block within one group, that ends with the last used row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.collectives import vary_like

_BLOCK_ROWS = 128


class _Blocks(NamedTuple):
    """The blocks of all groups in order: block i is rows [start, stop) of group `group`; there are `count`."""

    group: Int[Array, " blocks"]
    start: Int[Array, " blocks"]
    stop: Int[Array, " blocks"]
    count: Int[Array, ""]


def _blocks(group_sizes: Int[Array, " groups"], rows: int, block: int) -> _Blocks:
    ends = jnp.cumsum(group_sizes)
    per_group = (group_sizes + block - 1) // block
    block_ends = jnp.cumsum(per_group)
    # Every group adds at most one partly filled block.
    index = jnp.arange(rows // block + group_sizes.shape[0], dtype=group_sizes.dtype)
    group = jnp.searchsorted(block_ends, index, side="right", method="compare_all").astype(group_sizes.dtype)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    start = (ends - group_sizes)[group] + (index - (block_ends - per_group)[group]) * block
    return _Blocks(group, start, jnp.minimum(start + block, ends[group]), block_ends[-1])


def _at(blocks: _Blocks, i: Int[Array, ""], rows: int, block: int):
    """Block i: its group, the first row of a window of `block` rows that holds it, and which of those rows it owns."""
    start, stop = blocks.start[i], blocks.stop[i]
    window = jnp.minimum(start, rows - block)
    row = window + jnp.arange(block, dtype=window.dtype)
    return blocks.group[i], window, ((row >= start) & (row < stop))[:, None]


def _multiply(
    rows: Float[Array, "rows inputs"], weights: Float[Array, "groups inputs outputs"], sizes: Int[Array, " groups"]
) -> Float[Array, "rows outputs"]:
    total, block = rows.shape[0], min(_BLOCK_ROWS, rows.shape[0])
    blocks = _blocks(sizes, total, block)

    def step(i: Int[Array, ""], result: Array) -> Array:
        group, window, mine = _at(blocks, i, total, block)
        x = lax.dynamic_slice_in_dim(rows, window, block)
        y = jnp.dot(x, weights[group], preferred_element_type=jnp.float32).astype(rows.dtype)
        old = lax.dynamic_slice_in_dim(result, window, block)
        return lax.dynamic_update_slice_in_dim(result, jnp.where(mine, y, old), window, 0)

    result = vary_like(jnp.zeros((total, weights.shape[2]), rows.dtype), rows)
    return lax.fori_loop(jnp.zeros_like(blocks.count), blocks.count, step, result)


def _outer(
    rows: Float[Array, "rows inputs"], others: Float[Array, "rows outputs"], sizes: Int[Array, " groups"]
) -> Float[Array, "groups inputs outputs"]:
    """For each group the product rows.T @ others over its rows, in float32."""
    total, block = rows.shape[0], min(_BLOCK_ROWS, rows.shape[0])
    blocks = _blocks(sizes, total, block)

    def step(i: Int[Array, ""], result: Array) -> Array:
        group, window, mine = _at(blocks, i, total, block)
        x = lax.dynamic_slice_in_dim(rows, window, block)
        y = lax.dynamic_slice_in_dim(others, window, block)
        zero = jnp.zeros((), rows.dtype)
        # Both sides are masked: zero times a NaN beyond the last group is a NaN.
        product = jnp.dot(jnp.where(mine, x, zero).T, jnp.where(mine, y, zero), preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(result, result[group] + product, group, 0)

    shape = (sizes.shape[0], rows.shape[1], others.shape[1])
    result = vary_like(jnp.zeros(shape, jnp.float32), rows)
    return lax.fori_loop(jnp.zeros_like(blocks.count), blocks.count, step, result)


@jax.custom_vjp
def blocked(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "rows outputs"]:
    """`grouped_matmul` as a loop over blocks of rows; its work grows with the rows used, not with the groups."""
    return _multiply(rows, weights, group_sizes)


def _forward(rows, weights, group_sizes):
    return _multiply(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(residuals, cotangent):
    rows, weights, group_sizes = residuals
    return (
        _multiply(cotangent, weights.transpose(0, 2, 1), group_sizes),
        _outer(rows, cotangent, group_sizes).astype(weights.dtype),
        None,
    )


blocked.defvjp(_forward, _backward)
