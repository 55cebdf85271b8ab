"""Which keys a query sees as an interval [first, after) of keys, where these are sorted; and intervals of blocks."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moezoo.kernels.attention.base import Coordinates
from moezoo.parallel.collectives import vary_like

Bounds = Int[Array, "batch queries"]
_LAST = jnp.iinfo(jnp.int32).max


def intervals(queries: Coordinates, keys: Coordinates, window: int | None) -> tuple[Bounds, Bounds]:
    """Return for each query the first key that it sees, and the one after the last; equal if it sees none.

    Keys of each row are sorted by segment, then position. Padding, segment 0, comes last. Queries have any order.
    """
    oldest = jnp.full_like(queries.position, -_LAST) if window is None else queries.position - (window - 1)
    sorted_keys = Coordinates(keys.position, _order(keys.segment))
    of_queries = _order(queries.segment)
    first = _count_before(sorted_keys, Coordinates(oldest, of_queries))
    return first, _count_before(sorted_keys, Coordinates(queries.position + 1, of_queries))


def _order(segment: Int[Array, "batch tokens"]) -> Int[Array, "batch tokens"]:
    return jnp.where(segment == 0, _LAST, segment)


def _count_before(keys: Coordinates, wanted: Coordinates) -> Bounds:
    """Return how many keys come before each of `wanted`: a binary search by pairs, which one number may not hold."""
    count = keys.position.shape[1]

    def halve(_: Int[Array, ""], found: tuple[Bounds, Bounds]) -> tuple[Bounds, Bounds]:
        low, high = found
        middle = (low + high) // 2
        position, segment = (jnp.take_along_axis(x, middle, axis=1, mode="clip") for x in keys)
        same = (segment == wanted.segment) & (position < wanted.position)
        before = (low < high) & (same | (segment < wanted.segment))
        return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    low = vary_like(jnp.zeros(wanted.position.shape, jnp.int32), *keys, *wanted)
    return lax.fori_loop(0, count.bit_length(), halve, (low, low + count))[0]


class Spans(NamedTuple):
    """For each block of queries: the keys [low, high) that any of them sees, and [start, stop) that all of them see."""

    low: Int[Array, "batch blocks"]
    high: Int[Array, "batch blocks"]
    start: Int[Array, "batch blocks"]
    stop: Int[Array, "batch blocks"]


def spans_of(first: Bounds, after: Bounds, block: int) -> Spans:
    """Return the keys that blocks of so many queries see; the last one is filled with queries that see none."""
    more = ((0, 0), (0, -first.shape[1] % block))
    first, after = (jnp.pad(x, more).reshape(x.shape[0], -1, block) for x in (first, after))
    some = first < after
    low, high = jnp.where(some, first, _LAST).min(-1), jnp.where(some, after, 0).max(-1)
    return Spans(jnp.minimum(low, high), high, first.max(-1), after.min(-1))


def meeting(spans: Spans, keys: int, block: int) -> tuple[Int[Array, "batch blocks"], Int[Array, "batch blocks"]]:
    """Return for each block of so many of all `keys` the first block of queries that meets it, and one after the last.

    Both are equal if none does.
    """
    key = (lax.iota(jnp.int32, -(-keys // block)) * block)[None, :, None]
    meets = (spans.low[:, None] < key + block) & (spans.high[:, None] > key)
    number = lax.iota(jnp.int32, spans.low.shape[1])[None, None]
    after = jnp.where(meets, number + 1, 0).max(-1)
    return jnp.minimum(jnp.where(meets, number, _LAST).min(-1), after), after
