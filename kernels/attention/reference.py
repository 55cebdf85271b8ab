"""The naive backend: all scores of up to `QUERY_CHUNK` queries, and their softmax."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from moezoo.kernels.attention.base import (
    FLOOR,
    NOTHING,
    Attended,
    Coordinates,
    Operands,
    Results,
    Scale,
    Softmax,
    sees,
)
from moezoo.parallel.collectives import ATTENTION, vary_like

# Bounds the memory for scores to [batch, heads, QUERY_CHUNK, keys].
QUERY_CHUNK = 512


def attend(operands: Operands, scale: Scale) -> Attended:
    """Attend chunk by chunk of queries, each over all keys."""

    def one(_: None, chunk: tuple[Array, Coordinates]) -> tuple[None, Attended]:
        return None, _attend(_with_queries(operands, *chunk), scale)

    _, attended = _in_chunks(one, None, (operands.q, operands.queries))
    # Named, so that policies of rematerialisation may save both results.
    return Attended(*(checkpoint_name(x, ATTENTION) for x in attended))


def _with_queries(operands: Operands, q: Array, queries: Coordinates) -> Operands:
    return dataclasses.replace(operands, q=q, queries=queries)


def _in_chunks(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, queries: PyTree) -> tuple[Any, Any]:
    """Return the last carry and the results of `step` on chunks of `queries`, arrays [batch, queries, ...].

    The last chunk is padded with zeros.
    """
    length = jax.tree.leaves(queries)[0].shape[1]
    if length <= QUERY_CHUNK:
        return step(carry, queries)
    pad = -length % QUERY_CHUNK

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return rearrange(padded, "b (n c) ... -> n b c ...", c=QUERY_CHUNK)

    # Scores are recomputed in the backward pass.
    carry, parts = jax.lax.scan(jax.checkpoint(step), carry, jax.tree.map(cut, queries))
    return carry, jax.tree.map(lambda x: rearrange(x, "n b c ... -> b (n c) ...")[:, :length], parts)


def _attend(operands: Operands, scale: Scale) -> Attended:
    masked, seen = _scores(operands, scale)
    weights = jax.nn.softmax(masked)
    result = jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(operands.v.dtype), operands.v)
    logsumexp = rearrange(jax.nn.logsumexp(masked, axis=-1), "b k g q -> b q k g")
    some = seen.any(-1)[:, :, None, None]
    return Attended(jnp.where(some[..., None], result, 0), jnp.where(some, logsumexp, NOTHING))


def _scores(operands: Operands, scale: Scale = 1.0) -> tuple[Array, Array]:
    """Return scores [batch, kv_heads, group, queries, keys], `NOTHING` for unseen keys; and which are seen."""
    scores = jnp.einsum("bqkgh,bskh->bkgqs", operands.q, operands.k, preferred_element_type=jnp.float32) * scale
    seen = sees(operands.queries, operands.keys, operands.window)
    return jnp.where(seen[:, None, None], scores, NOTHING), seen


def part(operands: Operands) -> Softmax:
    """Attend to a part of the keys, chunk by chunk of queries."""
    v = operands.v

    def one(none: None, chunk: tuple[Array, Coordinates]) -> tuple[None, Softmax]:
        scores, _ = _scores(_with_queries(operands, *chunk))
        highest = jnp.maximum(scores.max(-1), FLOOR)
        weights = jnp.exp(scores - highest[..., None])
        total = weights.sum(-1)
        total = jnp.where(total > 0, total, 1)
        result = jnp.einsum("bkgqs,bskh->bqkgh", (weights / total[..., None]).astype(v.dtype), v)
        return none, Softmax(result, *(rearrange(x, "b k g q -> b q k g") for x in (highest, total)))

    return _in_chunks(one, None, (operands.q, operands.queries))[1]


def part_gradients(operands: Operands, whole: Softmax, back: Results) -> tuple[Array, Array, Array]:
    """Return the gradients that go through a part of the keys, chunk by chunk of queries."""
    k, v = operands.k, operands.v
    wide = {"preferred_element_type": jnp.float32}

    def one(
        sums: tuple[Array, Array], chunk: tuple[Array, Coordinates, Softmax, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        q, queries, whole, back = chunk
        scores, _ = _scores(_with_queries(operands, q, queries))
        highest, total = (rearrange(x, "b q k g -> b k g q 1") for x in whole[1:])
        weights = jnp.exp(scores - highest) / jnp.where(total > 0, total, 1)  # 0 in the padding of a chunk
        through_result = (back.astype(jnp.float32) * whole.result.astype(jnp.float32)).sum(-1)
        less = rearrange(through_result, "b q k g -> b k g q 1")
        by_score = weights * (jnp.einsum("bqkgh,bskh->bkgqs", back, v, **wide) - less)
        by_score, weights = by_score.astype(q.dtype), weights.astype(v.dtype)
        by_k = jnp.einsum("bkgqs,bqkgh->bskh", by_score, q, **wide)
        by_v = jnp.einsum("bkgqs,bqkgh->bskh", weights, back, **wide)
        by_q = jnp.einsum("bkgqs,bskh->bqkgh", by_score, k, **wide).astype(q.dtype)
        return (sums[0] + by_k, sums[1] + by_v), by_q

    zeros = tuple(vary_like(jnp.zeros(x.shape, jnp.float32), x) for x in (k, v))
    (by_k, by_v), by_q = _in_chunks(one, zeros, (operands.q, operands.queries, whole, back))
    return by_q, by_k.astype(k.dtype), by_v.astype(v.dtype)
