"""Complete partial results of attention: join other keys, add sinks."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.attention.base import Attended, Softmax


def join(one: Attended, other: Attended) -> Attended:
    """Return the result of the same queries over the keys of both parts, which must be disjoint."""
    total = jnp.logaddexp(one.logsumexp, other.logsumexp)
    return Attended(_scaled(one, total) + _scaled(other, total), total)


def add_sinks(attended: Attended, sinks: Float[Array, "kv_heads group"]) -> Attended:
    """Add a key of score `sinks` and value zero to every query. Call it once, after all partial results are joined."""
    total = jnp.logaddexp(attended.logsumexp, sinks.astype(jnp.float32)[None, None])
    return Attended(_scaled(attended, total), total)


def _scaled(part: Attended, total: Array) -> Array:
    """Return a part's share of a softmax over more keys."""
    share = jnp.exp(part.logsumexp - total)[..., None]
    return (part.result.astype(jnp.float32) * share).astype(part.result.dtype)


def join_softmax(one: Softmax, other: Softmax) -> Softmax:
    """Return the softmax of the same queries over the keys of both parts, which must be disjoint; in float32.

    Unlike the log-sum-exp of `join`, the two numbers per query lose nothing where scores are large.
    """
    highest = jnp.maximum(one.highest, other.highest)
    totals = [part.total * jnp.exp(part.highest - highest) for part in (one, other)]
    total = totals[0] + totals[1]
    shares = [(each / total)[..., None] for each in totals]
    results = [part.result.astype(jnp.float32) * share for part, share in zip((one, other), shares, strict=True)]
    return Softmax(results[0] + results[1], highest, total)
