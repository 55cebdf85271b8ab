"""Which keys a query sees, as one interval of keys, where these are sorted.

In keys sorted by segment, then position, those that a query sees follow each other: the keys of its document from the
first of its window or stretch up to itself. So two numbers per query replace a mask, whatever the order of the queries,
and one search per number finds them, once for all heads and layers with the same window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moezoo.parallel.collectives import vary_like
from moezoo.parallel.context_parallel import Coordinates, Interval, Reach, first_seen

Bounds = Int[Array, "batch queries"]
_LAST = jnp.iinfo(jnp.int32).max


def intervals(queries: Coordinates, keys: Coordinates, window: Reach) -> Interval:
    """Return the interval of keys that each query sees, as `moezoo.kernels.attention.base.sees` defines it.

    Args:
        queries: Their coordinates, in any order.
        keys: Their coordinates. Those of each row are sorted by segment, then position; padding, segment 0, is first or
            last.
        window: How far back a query sees.
    """
    # Where padding is first, the first key says so; elsewhere its number is one after the last segment.
    is_first = keys.segment[:, :1] == 0
    order = lambda segment: jnp.where((segment == 0) & ~is_first, _LAST, segment)  # noqa: E731
    oldest = first_seen(queries.position, window)
    keys, of_queries = Coordinates(keys.position, order(keys.segment)), order(queries.segment)
    first = _count_before(keys, Coordinates(oldest, of_queries))
    return Interval(first, _count_before(keys, Coordinates(queries.position + 1, of_queries)))


def _count_before(keys: Coordinates, wanted: Coordinates) -> Bounds:
    """Return how many keys come before each of `wanted`: a binary search by pairs, which one number may not hold."""
    count = keys.position.shape[1]

    def halve(_: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = found
        middle = (low + high) // 2
        position, segment = (jnp.take_along_axis(x, middle, axis=1, mode="clip") for x in keys)
        earlier = (segment == wanted.segment) & (position < wanted.position)
        before = (low < high) & (earlier | (segment < wanted.segment))
        return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    low = vary_like(jnp.zeros(wanted.position.shape, jnp.int32), *jax.tree.leaves((keys, wanted)))
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
