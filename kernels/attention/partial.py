"""Partial results of attention made whole: of other keys, and of sinks."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.attention.base import Attended


def join(one: Attended, other: Attended) -> Attended:
    """What the same queries get over the keys of both, of which none is in both."""
    total = jnp.logaddexp(one.logsumexp, other.logsumexp)
    return Attended(_scaled(one, total) + _scaled(other, total), total)


def add_sinks(attended: Attended, sinks: Float[Array, "kv_heads group"]) -> Attended:
    """A key more for every query, of score `sinks` and a value of zero; once, after all partial results are joined."""
    total = jnp.logaddexp(attended.logsumexp, sinks.astype(jnp.float32)[None, None])
    return Attended(_scaled(attended, total), total)


def _scaled(part: Attended, total: Array) -> Array:
    """Its share of a softmax over more keys."""
    share = jnp.exp(part.logsumexp - total)[..., None]
    return (part.result.astype(jnp.float32) * share).astype(part.result.dtype)
