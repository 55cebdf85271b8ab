"""Multi-head latent attention (DeepSeek-AI, 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1).

    latent = norm(x W_kv_down)            # [B, S, kv_lora], one per token; the cache keeps it
    shared = rotary(x W_kv_down')         # [B, S, rope_dim], one key per token for all heads; the cache keeps it
    q = [q_nope, rotary(q_rope)]          # [B, S, heads, nope_dim + rope_dim], from x or from a latent of queries
    k = [latent W_key_up, shared]         # [B, S, heads, nope_dim + rope_dim]
    v = latent W_value_up                 # [B, S, heads, value_dim]

Attention over q, k, v is the usual one; q may have a factor that grows with the position (`QueryScale`). Without a
rotary nothing knows positions, as in Kimi Linear (Kimi Team, 2025, arXiv:2510.26692), whose other layers do. Devices
that share heads have the same latents and the same shared key. B batch, S sequence.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.base import Mixer, MixerOutput
from moezoo.nn.cache import Past, Slots
from moezoo.nn.context_parallel import attend_whole, context_parallel
from moezoo.nn.linear import contract, normal, project
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context
from moezoo.nn.rotary import NO_QUERY_SCALE, QueryScale, Rotary, Turn
from moezoo.parallel.axes import Weight, name_sizes
from moezoo.parallel.collectives import InnerGroup
from moezoo.parallel.context_parallel import BothCoordinates, Interval, Scoring, SplitOperands
from moezoo.parallel.dropout import read_numbers, take_numbers
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.stored import Stored

name_sizes(q_lora_out="model.q_lora", kv_lora_out="model.kv_lora + model.rope_dim")
_NORM_EPS = 1e-6  # for the norms of latents in all released models, whatever epsilon the other norms have


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """The number of heads and the sizes of latents and heads.

    | field | size of |
    |---|---|
    | `q_lora`, `kv_lora` | the latent of queries (None: queries are projected directly), of keys and values |
    | `nope_dim`, `rope_dim` | the part of a head's query and key without rotation, and with it, if there is a rotary |
    | `value_dim` | a head's value |
    """

    heads: int
    q_lora: int | None
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class Latents(NamedTuple):
    """What keys and values of a token come from: its latent, and the key, perhaps rotated, that all heads share."""

    latent: Float[Array, "batch keys kv_lora"]
    shared: Float[Array, "batch keys rope_dim"]


class Joined(NamedTuple):
    """What a token keeps for later ones: its latent, then the shared key. One array, which one product reads."""

    latents: Float[Array, "batch keys kv_lora_out"]


def expand(
    weights: tuple[Array | Stored, Array | Stored], latents: Latents
) -> tuple[Float[Array, "batch keys heads head_dim"], Float[Array, "batch keys heads value_dim"]]:
    """Return keys and values of all heads. `weights`: key_up and value_up."""
    latent, (key_up, value_up) = read_numbers(latents.latent, weights)
    keys = project(latent, key_up)
    shared = jnp.broadcast_to(latents.shared[:, :, None], (*keys.shape[:3], latents.shared.shape[-1]))
    return jnp.concatenate([keys, shared], axis=-1), project(latent, value_up)


class LatentAttention(Mixer):
    """Attention whose keys and values come from one latent per token and one key per token, which `rotary` turns."""

    splits_sequences: ClassVar[bool] = True
    query: Weight[Array, "embed -> heads head_dim"] | None
    query_down: Weight[Array, "embed -> q_lora_out"] | None
    query_norm: RMSNorm | None
    query_up: Weight[Array, "q_lora -> heads head_dim"] | None
    kv_down: Weight[Array, "embed -> kv_lora_out"]  # the latent, then the shared key before its rotation
    kv_norm: RMSNorm
    key_up: Weight[Array, "kv_lora -> heads nope_dim"]
    value_up: Weight[Array, "kv_lora -> heads value_dim"]
    out: Weight[Array, "heads value_dim -> embed"]
    sizes: LatentSizes = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    query_scale: QueryScale = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        sizes: LatentSizes,
        *,
        rotary: Rotary | None,
        query_scale: QueryScale = NO_QUERY_SCALE,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        self.sizes, self.rotary, self.query_scale = sizes, rotary, query_scale
        keys = jax.random.split(key, 6)
        heads, nope, rope, value = sizes.heads, sizes.nope_dim, sizes.rope_dim, sizes.value_dim
        self.query = self.query_down = self.query_norm = self.query_up = None
        if sizes.q_lora is None:
            self.query = normal(keys[0], (embed, heads, nope + rope), embed**-0.5, dtype)
        else:
            lora = sizes.q_lora
            self.query_down = normal(keys[0], (embed, lora), embed**-0.5, dtype)
            self.query_norm = RMSNorm(lora, _NORM_EPS, dtype=dtype)
            self.query_up = normal(keys[1], (lora, heads, nope + rope), lora**-0.5, dtype)
        lora = sizes.kv_lora
        self.kv_down = normal(keys[2], (embed, lora + rope), embed**-0.5, dtype)
        self.kv_norm = RMSNorm(lora, _NORM_EPS, dtype=dtype)
        self.key_up = normal(keys[3], (lora, heads, nope), lora**-0.5, dtype)
        self.value_up = normal(keys[4], (lora, heads, value), lora**-0.5, dtype)
        self.out = normal(keys[5], (heads, value, embed), out_std * (heads * value) ** -0.5, dtype)

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Attend to these tokens, or with a `past` to all tokens in it. On a split sequence latents travel."""
        group = execution.inner_group("heads")
        turn, in_sight = self.prepare(context) if context.prepared is None else context.prepared
        plain, turned = self._queries(x, context, turn, group)
        latents = self.latents(x, turn)
        kept = Joined(jnp.concatenate(latents, axis=-1))
        scale = (self.sizes.nope_dim + self.sizes.rope_dim) ** -0.5
        scale *= 1.0 if self.rotary is None else self.rotary.scaling.score_scale
        scoring = Scoring(scale, order=execution.kernel("attention"))
        if past is None:
            # With many queries, making keys and values of every head takes the fewest operations.
            q, weights = jnp.concatenate([plain, turned], axis=-1)[:, :, :, None], (self.key_up, self.value_up)
            attend = context_parallel(execution).attend
            travels = latents._replace(latent=take_numbers(latents.latent, weights))
            at = context.coordinates
            operands = SplitOperands(q, group.enter(travels), weights, expand, at, scoring, in_sight, context.chunks)
            y = attend(operands, execution.sequence_group)[:, :, :, 0]
        else:
            seen = group.enter(past.state.with_token(kept, past))
            y = self._attend_to_latents(plain, turned, seen, BothCoordinates(context.queries, past.keys), scoring)
        return MixerOutput(project(y, self.out, inputs=2), kept)

    def prepare(self, context: Context) -> tuple[Turn | None, Interval | None]:
        """Return the turn of rotary positions, and the keys that each query sees."""
        turn = None if self.rotary is None else self.rotary.turn(context.queries.position)
        return turn, context.seen(None)

    def state(self, length: int) -> Slots:
        """Declare a latent and a shared key per token."""
        sizes: Any = {"kv_lora_out": self.sizes.kv_lora + self.sizes.rope_dim}
        return Slots.declare(length, Joined(sizes))

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return those of expanded keys and values."""
        return self.sizes.nope_dim + self.sizes.rope_dim, self.sizes.value_dim

    def shared_sizes(self) -> dict[str, Any]:
        """Return the sizes of latents and shared keys."""
        return {"latent": {"kv_lora": self.sizes.kv_lora}, "shared": {"rope_dim": self.sizes.rope_dim}}

    def _attend_to_latents(
        self, plain: Array, turned: Array, past: Joined, coordinates: BothCoordinates, scoring: Scoring
    ) -> Float[Array, "batch seq heads value_dim"]:
        """Return the same result without making keys and values of each head, for one query and many keys.

        q . (latent K) = (q K^T) . latent, and mean(latent V) = mean(latent) V. So all heads attend to the latents as to
        one key-value head (DeepSeek-V2, section 2.1.2). Values are the keys, of whose average the latent is kept: the
        part of shared keys costs fewer operations than a copy of all latents takes time.
        """
        q = jnp.concatenate([contract("bshn,lhn->bshl", plain, self.key_up), turned], axis=-1)
        k = past.latents[:, :, None]
        y = attend_whole(q[:, :, None], k, k, coordinates, scoring)[:, :, 0, :, : self.sizes.kv_lora]
        return contract("bshl,lhv->bshv", y, self.value_up)

    def _queries(
        self, x: Array, context: Context, turn: Turn | None, group: InnerGroup
    ) -> tuple[Float[Array, "batch seq heads nope_dim"], Float[Array, "batch seq heads rope_dim"]]:
        if self.query is not None:
            q = project(group.enter(x), self.query)
        else:
            assert self.query_down is not None
            assert self.query_norm is not None
            assert self.query_up is not None
            q = project(group.enter(self.query_norm(project(x, self.query_down))), self.query_up)
        plain, turned = jnp.split(self.query_scale(q, context), [self.sizes.nope_dim], axis=-1)
        return plain, self._turned(turned, turn)

    def latents(self, x: Float[Array, "batch seq embed"], turn: Turn | None) -> Latents:
        """Return what tokens keep for later ones."""
        latent, shared = jnp.split(project(x, self.kv_down), [self.sizes.kv_lora], axis=-1)
        return Latents(self.kv_norm(latent), self._turned(shared[:, :, None], turn)[:, :, 0])

    def _turned(self, x: Array, turn: Turn | None) -> Float[Array, "batch seq heads rope_dim"]:
        return x if self.rotary is None or turn is None else self.rotary(x, turn)
