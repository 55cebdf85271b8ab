"""Causal attention over packed documents, with grouped key-value heads and an optional window."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PyTree

from moezoo.nn.cache import Past
from moezoo.nn.linear import normal, project
from moezoo.nn.rope import frequencies, rotate
from moezoo.parallel.axes import Weight
from moezoo.parallel.collectives import gather, gather_tokens
from moezoo.parallel.execution import Execution

# Queries scored at once: bounds the scores held to [batch, heads, this, seq].
_QUERY_CHUNK = 512
_MASKED = -1e30  # finite: a row with nothing to see becomes uniform instead of NaN


class TokenPositions(NamedTuple):
    """Each token's `position` in its document, and its `segment`: the document's number in its row, 0 for padding."""

    position: Int[Array, "batch seq"]
    segment: Int[Array, "batch seq"]


class Context(NamedTuple):
    """What a layer's attention needs besides activations: the positions of this device's tokens, and of all keys."""

    queries: TokenPositions
    keys: TokenPositions


def gather_positions(queries: TokenPositions, execution: Execution) -> Context:
    """Gather positions over the axes that split the sequence: once per forward pass, as all layers share them."""
    axes = execution.sequence_axes
    keys = TokenPositions(*(gather(p, axes, 1, tokens=execution.token_axes) for p in queries))
    return Context(queries, keys)


def attend(
    q: Float[Array, "batch seq kv_heads group head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    context: Context,
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "batch seq kv_heads group value_dim"]:
    """Each query's average of values in its own document, at its own position or up to `window` - 1 before.

    Weights are the softmax of `scale` q . k, in float32. Order does not matter: positions and segments say who sees
    whom.
    """
    length = q.shape[1]
    if length <= _QUERY_CHUNK:
        return _attend(q, context.queries, k, v, context.keys, scale, window)
    pad = -length % _QUERY_CHUNK

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return rearrange(padded, "b (n c) ... -> n b c ...", c=_QUERY_CHUNK)

    @jax.checkpoint  # scores are recomputed, not kept
    def one(chunk: tuple[Array, TokenPositions]) -> Array:
        return _attend(*chunk, k, v, context.keys, scale, window)

    result = jax.lax.map(one, (chunks(q), TokenPositions(*map(chunks, context.queries))))
    return rearrange(result, "n b c ... -> b (n c) ...")[:, :length]


def _attend(
    q: Array, queries: TokenPositions, k: Array, v: Array, keys: TokenPositions, scale: float, window: int | None
) -> Array:
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) * scale
    distance = queries.position[:, :, None] - keys.position[:, None, :]
    seen = (queries.segment[:, :, None] == keys.segment[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED))
    return jnp.einsum("bkgqs,bskh->bqkgh", weights.astype(v.dtype), v)


class KeyValue(NamedTuple):
    """What a token leaves for those after it."""

    key: Float[Array, "*dims kv_heads head_dim"]
    value: Float[Array, "*dims kv_heads head_dim"]


class Attended(NamedTuple):
    """Attention's result; and what later tokens need of these, or all that is kept where there is a past."""

    y: Float[Array, "batch seq embed"]
    kept: PyTree


class Attention(eqx.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions."""

    query: Weight[Array, "embed -> heads head_dim"]
    key: Weight[Array, "embed -> kv_heads head_dim"]
    value: Weight[Array, "embed -> kv_heads head_dim"]
    out: Weight[Array, "heads head_dim -> embed"]
    rope_base: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope_base: float,
        window: int | None,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 4)
        std = embed**-0.5
        self.query = normal(keys[0], (embed, heads, head_dim), std, dtype)
        self.key = normal(keys[1], (embed, kv_heads, head_dim), std, dtype)
        self.value = normal(keys[2], (embed, kv_heads, head_dim), std, dtype)
        self.out = normal(keys[3], (heads, head_dim, embed), out_std * (heads * head_dim) ** -0.5, dtype)
        self.rope_base = rope_base
        self.window = window

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> Attended:
        """Attend, to what is `past` too. Where the sequence is split, keys and values are gathered, queries stay."""
        frequency = frequencies(self.query.shape[-1], self.rope_base)
        q = rotate(project(x, self.query), context.queries.position, frequency)
        k = rotate(project(x, self.key), context.queries.position, frequency)
        v = project(x, self.value)
        kept: PyTree = KeyValue(k, v)
        if past is None:
            k, v = (gather_tokens(y, execution.sequence_axes, 1, tokens=execution.token_axes) for y in (k, v))
        else:
            (k, v), kept = past.append(kept)
        q = rearrange(q, "b s (k g) h -> b s k g h", k=k.shape[2])
        y = attend(q, k, v, context, scale=q.shape[-1] ** -0.5, window=self.window)
        return Attended(project(rearrange(y, "b s k g h -> b s (k g) h"), self.out, inputs=2), kept)
