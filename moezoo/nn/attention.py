"""Causal attention over packed documents, with grouped key-value heads, and perhaps a window or stretches.

Shapes: x [B, S, d]; q [B, S, kv_heads, group, head_dim] with group = heads / kv_heads; k [B, S, kv_heads, head_dim]; v
[B, S, kv_heads, value_dim], where value_dim is head_dim in nearly all families.
Naive equivalent: softmax(scale q k^T) v over the keys of the same document that are not later than the query.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PyTree

from moezoo.nn.base import Mixer, MixerOutput
from moezoo.nn.cache import Past, Slots
from moezoo.nn.context_parallel import attend_whole, context_parallel
from moezoo.nn.linear import normal, project
from moezoo.nn.norm import RMSNorm, normalise
from moezoo.nn.positions import Context
from moezoo.nn.rotary import NO_QUERY_SCALE, QueryScale, Rotary, Turn
from moezoo.parallel.axes import Bias, Weight
from moezoo.parallel.collectives import InnerGroup
from moezoo.parallel.context_parallel import (
    BothCoordinates,
    Interval,
    Reach,
    Scoring,
    SplitOperands,
    mean_seen,
    most_seen,
)
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.stored import Stored

# What a norm of queries and keys is computed over.
NormOver = Literal["nothing", "head", "projection"]
# What values are made of: a projection of their own, or that of keys, before the keys' norm and rotation.
ValuesFrom = Literal["own", "keys"]
# Which projections have biases; `inputs` are those to queries, keys and values.
Biases = Literal["none", "inputs", "all"]


class KeyValue(NamedTuple):
    """The key and value of each token, which later tokens attend to."""

    key: Float[Array, "*dims kv_heads head_dim"]
    value: Float[Array, "*dims kv_heads value_dim"]


def expand(weights: None, kept: KeyValue) -> tuple[Array, Array]:
    """Return what tokens keep: it is keys and values already."""
    del weights
    return kept.key, kept.value


class Attention(Mixer):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with rotary positions, or none.

    Optional parts:

    | field | meaning |
    |---|---|
    | `query_norm`, `key_norm` | norms over each head or over the whole projection (`norm_over`) |
    | `*_bias` | biases of all projections, or of all but `out` (`biases`) |
    | `sinks` | a score per head, of a value of zero, that every query sees (Xiao et al., 2024, arXiv:2309.17453) |
    | `clip` | bound on the magnitude of the numbers in queries, keys and values |
    | `value` | None where values are what keys are projected to (`values_from`) |
    | `value_epsilon` | that of a norm of each head's values, without a scale; None for no norm |
    | `value_scale` | the factor of values (MiMo-V2-Flash; Xiaomi, 2025) |
    | `scale` | the factor of scores; None for `head_dim` ** -0.5 |
    | `rotary` | None for queries and keys that know no positions |
    | `turned_epsilon` | that of a norm of each head's rotated queries and keys, without a scale; None for no norm |
    | `query_scale` | a factor on queries that grows with their position |
    | `window` | the tokens that a query sees, itself included; or `Stretches` of which it sees its own |
    | `gate` | a projection whose sigmoid is a factor of each head's result (Qiu et al., 2025, arXiv:2505.06708) |
    """

    splits_sequences: ClassVar[bool] = True
    query: Weight[Array, "embed -> heads head_dim"]
    key: Weight[Array, "embed -> kv_heads head_dim"]
    value: Weight[Array, "embed -> kv_heads head_dim"] | None
    out: Weight[Array, "heads head_dim -> embed"]
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    query_bias: Bias[Array, "heads head_dim"] | None
    key_bias: Bias[Array, "kv_heads head_dim"] | None
    value_bias: Bias[Array, "kv_heads head_dim"] | None
    out_bias: Bias[Array, "embed"] | None
    sinks: Bias[Array, "heads"] | None
    gate: Weight[Array, "embed -> heads head_dim"] | None
    gate_bias: Bias[Array, "heads head_dim"] | None
    rotary: Rotary | None = eqx.field(static=True)
    norm_over: NormOver = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    window: Reach = eqx.field(static=True)
    turned_epsilon: float | None = eqx.field(static=True)
    query_scale: QueryScale = eqx.field(static=True)
    value_epsilon: float | None = eqx.field(static=True)
    value_scale: float = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rotary | None,
        value_dim: int | None = None,
        norm_over: NormOver = "nothing",
        norm_eps: float = 1e-6,
        norm_around_one: bool = False,
        norm_cast_last: bool = False,
        norm_values: bool = False,
        norm_turned: bool = False,
        query_scale: QueryScale = NO_QUERY_SCALE,
        values_from: ValuesFrom = "own",
        value_scale: float = 1.0,
        scale: float | None = None,
        biases: Biases = "none",
        sinks: bool = False,
        clip: float | None = None,
        window: Reach = None,
        gated: bool = False,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 4)
        std, value_dim = embed**-0.5, head_dim if value_dim is None else value_dim
        self.query = normal(keys[0], (embed, heads, head_dim), std, dtype)
        self.key = normal(keys[1], (embed, kv_heads, head_dim), std, dtype)
        self.value = normal(keys[2], (embed, kv_heads, value_dim), std, dtype) if values_from == "own" else None
        self.out = normal(keys[3], (heads, value_dim, embed), out_std * (heads * value_dim) ** -0.5, dtype)
        self.query_norm = self.key_norm = None
        if norm_over != "nothing":
            query_size, key_size = (n * head_dim if norm_over == "projection" else head_dim for n in (heads, kv_heads))
            self.query_norm, self.key_norm = (
                RMSNorm(size, norm_eps, around_one=norm_around_one, cast_last=norm_cast_last, dtype=dtype)
                for size in (query_size, key_size)
            )
        self.query_bias = self.key_bias = self.value_bias = self.out_bias = None
        if biases != "none":
            self.query_bias = jnp.zeros((heads, head_dim), dtype)
            self.key_bias = jnp.zeros((kv_heads, head_dim), dtype)
            self.value_bias = None if self.value is None else jnp.zeros((kv_heads, value_dim), dtype)
        if biases == "all":
            self.out_bias = jnp.zeros((embed,), dtype)
        self.sinks = jnp.zeros((heads,), dtype) if sinks else None
        self.gate = self.gate_bias = None
        if gated:
            # Not one of `keys`, which are those of `fold_in` with 0 to 3.
            self.gate = normal(jax.random.fold_in(key, 4), (embed, heads, value_dim), std, dtype)
            self.gate_bias = None if biases == "none" else jnp.zeros((heads, value_dim), dtype)
        self.rotary, self.norm_over, self.clip, self.window = rotary, norm_over, clip, window
        self.value_epsilon, self.value_scale = norm_eps if norm_values else None, value_scale
        self.turned_epsilon, self.query_scale = norm_eps if norm_turned else None, query_scale
        self.scale = scale

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Attend to these tokens, or with a `past` to all tokens in it. On a split sequence keys and values travel."""
        group = execution.inner_group("heads")
        x, (query_norm, key_norm) = group.enter(x), group.enter_parameters((self.query_norm, self.key_norm))
        turn, seen = self.prepare(context) if context.prepared is None else context.prepared
        q = self._turned(self._normed(self._project(x, self.query, self.query_bias), query_norm, group), turn)
        projected = self._project(x, self.key, self.key_bias)
        k = self._turned(self._normed(projected, key_norm, group), turn)
        v = projected if self.value is None else self._project(x, self.value, self.value_bias)
        v = self._normed(v if self.value_epsilon is None else normalise(v, self.value_epsilon), None, group)
        if self.value_scale != 1:
            v = (v.astype(jnp.float32) * self.value_scale).astype(v.dtype)  # the product is rounded, not the factor
        kept: PyTree = KeyValue(k, v)
        q = rearrange(self.query_scale(q, context), "b s (k g) h -> b s k g h", k=k.shape[2])
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        sinks = None if self.sinks is None else rearrange(self.sinks, "(k g) -> k g", k=k.shape[2])
        scoring = Scoring(scale, self.window, sinks, execution.kernel("attention"))
        if past is None:
            attend = context_parallel(execution).attend
            operands = SplitOperands(q, kept, None, expand, context.coordinates, scoring, seen, context.chunks)
            y = attend(operands, execution.sequence_group)
        else:
            k, v = past.state.with_token(kept, past)
            y = attend_whole(q, k, v, BothCoordinates(context.queries, past.keys), scoring)
        y = rearrange(y, "b s k g h -> b s (k g) h")
        if self.gate is not None:
            gate = project(x, self.gate)
            y = y * jax.nn.sigmoid(gate if self.gate_bias is None else gate + self.gate_bias[None, None])
        y = project(y, self.out, inputs=2)
        return MixerOutput(y, kept, self.out_bias)

    def prepare(self, context: Context) -> tuple[Turn | None, Interval | None]:
        """Return the turn of rotary positions, and the keys that each query sees."""
        turn = None if self.rotary is None else self.rotary.turn(context.queries.position)
        return turn, context.seen(self.window)

    def state(self, length: int) -> Slots:
        """Declare a key and a value per token, with a window or stretches those of as many tokens as one has."""
        return Slots.declare(min(length, most_seen(self.window) or length), KeyValue(**self.shared_sizes()))

    def mean_seen(self, length: int) -> float:
        """Return the mean number of keys that queries of a document of `length` tokens see."""
        return mean_seen(self.window, length)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return those of keys and values."""
        return self.key.shape[-1], self.out.shape[-2]

    def shared_sizes(self) -> dict[str, Any]:
        """Return the sizes of keys and values."""
        sizes = zip(KeyValue._fields, self.head_sizes, strict=True)
        return {name: {"kv_heads": self.key.shape[-2], "head_dim": size} for name, size in sizes}

    def _project(
        self, x: Array, weight: Array | Stored, bias: Array | None
    ) -> Float[Array, "batch seq some_heads head_dim"]:
        y = project(x, weight)
        return y if bias is None else y + bias[None, None]

    def _turned(
        self, x: Float[Array, "batch seq some_heads head_dim"], turn: Turn | None
    ) -> Float[Array, "batch seq some_heads head_dim"]:
        """Return queries or keys after their rotation, and its norm."""
        x = x if self.rotary is None or turn is None else self.rotary(x, turn)
        return x if self.turned_epsilon is None else normalise(x, self.turned_epsilon)

    def _normed(
        self, y: Float[Array, "batch seq some_heads head_dim"], norm: Callable[..., Array] | None, group: InnerGroup
    ) -> Float[Array, "batch seq some_heads head_dim"]:
        """Return queries, keys or values after their norm and the bound."""
        if norm is not None and self.norm_over == "projection":
            y = norm(rearrange(y, "b s n h -> b s (n h)"), group).reshape(y.shape)
        elif norm is not None:
            y = norm(y)
        if self.clip is None:
            return y
        # Not `jnp.clip`: its nested function lets collectives run out of order on a CPU in programs that jax 0.10 loads
        # from the compilation cache.
        return jax.lax.clamp(jnp.asarray(-self.clip, y.dtype), y, jnp.asarray(self.clip, y.dtype))
