"""Causal attention over packed documents, with grouped key-value heads and an optional window."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PyTree

from moezoo.nn.base import Attended, SelfAttention
from moezoo.nn.cache import Past
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context, TokenPositions
from moezoo.nn.rotary import Rotary
from moezoo.parallel.axes import Bias, Weight
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.execution import Execution
from moezoo.parallel.stored import Stored

# Queries scored at once: bounds the scores held to [batch, heads, this, seq].
_QUERY_CHUNK = 512
_MASKED = -1e30  # finite: a row with nothing to see becomes uniform instead of NaN

# What norms of queries and keys take together.
NormOver = Literal["nothing", "head", "projection"]


def attend(
    q: Float[Array, "batch seq kv_heads group head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    context: Context,
    *,
    scale: float | Float[Array, ""],
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
    q: Array, queries: TokenPositions, k: Array, v: Array, keys: TokenPositions, scale: Any, window: int | None
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


class Attention(SelfAttention):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions.

    Optional parts, None where a family lacks them: norms of queries and keys, over each head or over the whole
    projection (`norm_over`); biases; `clip`, a bound on the size of each number of
    queries, keys and values; `window`, the tokens that a query sees, itself included.
    """

    query: Weight[Array, "embed -> heads head_dim"]
    key: Weight[Array, "embed -> kv_heads head_dim"]
    value: Weight[Array, "embed -> kv_heads head_dim"]
    out: Weight[Array, "heads head_dim -> embed"]
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    query_bias: Bias[Array, "heads head_dim"] | None
    key_bias: Bias[Array, "kv_heads head_dim"] | None
    value_bias: Bias[Array, "kv_heads head_dim"] | None
    out_bias: Bias[Array, "embed"] | None
    rotary: Rotary = eqx.field(static=True)
    norm_over: NormOver = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rotary,
        norm_over: NormOver = "nothing",
        norm_eps: float = 1e-6,
        biases: Literal["none", "all"] = "none",
        clip: float | None = None,
        window: int | None = None,
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
        self.query_norm = self.key_norm = None
        if norm_over != "nothing":
            query_size, key_size = (n * head_dim if norm_over == "projection" else head_dim for n in (heads, kv_heads))
            self.query_norm = RMSNorm(query_size, norm_eps, dtype=dtype)
            self.key_norm = RMSNorm(key_size, norm_eps, dtype=dtype)
        self.query_bias = self.key_bias = self.value_bias = self.out_bias = None
        if biases == "all":
            self.query_bias = jnp.zeros((heads, head_dim), dtype)
            self.key_bias = jnp.zeros((kv_heads, head_dim), dtype)
            self.value_bias = jnp.zeros((kv_heads, head_dim), dtype)
            self.out_bias = jnp.zeros((embed,), dtype)
        self.rotary, self.norm_over, self.clip, self.window = rotary, norm_over, clip, window

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> Attended:
        """Attend, to what is `past` too. Where the sequence is split, keys and values are gathered, queries stay."""
        q = self.rotary(self._project(x, self.query, self.query_bias, self.query_norm), context)
        k = self.rotary(self._project(x, self.key, self.key_bias, self.key_norm), context)
        v = self._project(x, self.value, self.value_bias, None)
        kept: PyTree = KeyValue(k, v)
        if past is None:
            k, v = (gather_tokens(y, execution.sequence_axes, 1, tokens=execution.token_axes) for y in (k, v))
        else:
            (k, v), kept = past.append(kept)
        q = rearrange(q, "b s (k g) h -> b s k g h", k=k.shape[2])
        scale = q.shape[-1] ** -0.5
        if context.numbers is not None:
            scale = scale * context.numbers.score_scale
        y = attend(q, k, v, context, scale=scale, window=self.window)
        y = project(rearrange(y, "b s k g h -> b s (k g) h"), self.out, inputs=2)
        return Attended(y if self.out_bias is None else y + self.out_bias[None, None], kept)

    def count_slots(self, length: int) -> int:
        """Those of the window."""
        return length if self.window is None else min(length, self.window)

    def _project(
        self, x: Array, weight: Array | Stored, bias: Array | None, norm: Callable[[Array], Array] | None
    ) -> Float[Array, "batch seq some_heads head_dim"]:
        y = project(x, weight)
        if bias is not None:
            y = y + bias[None, None]
        if norm is not None and self.norm_over == "projection":
            y = norm(rearrange(y, "b s n h -> b s (n h)")).reshape(y.shape)
        elif norm is not None:
            y = norm(y)
        if self.clip is None:
            return y
        # Not `jnp.clip`, a compiled function of its own: with it, jax 0.10 lets the collectives of a program that comes
        # from the compilation cache overtake each other on a CPU.
        return jax.lax.clamp(jnp.asarray(-self.clip, y.dtype), y, jnp.asarray(self.clip, y.dtype))
