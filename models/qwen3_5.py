"""Qwen3-Next and the text part of Qwen3.5 (Qwen team, 2025 and 2026): gated delta rule, and gated attention between.

    x = embedding[tokens]                                       # [B, S, d]
    for each layer:
        x = x + mixer(norm(x))                                  # the delta rule, or in every fourth layer attention
        x = x + sigmoid(w . norm(x)) * shared(norm(x)) + sum_k gate_k * expert_k(norm(x))
        x = x + mlp(norm(x))                                    # instead, in layers without experts
    logits = norm(x) @ unembedding                              # [B, S, vocab]

B batch, S sequence, d `embed`. Norms multiply by 1 + scale, except that of the delta rule's results. A token chooses
the best K = `experts_per_token` of `experts` experts by a softmax over all. Attention (`moezoo.nn.attention`) has norms
of each query and key, rotates a part of each head, and multiplies its results by a sigmoid. The mixer by the delta rule
(`moezoo.nn.delta`) has a decay per value head and no positions: its convolutions and its state depend on the order.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Limit, check_experts, check_layers, extended, with_experts
from moezoo.models.parts import block, grouped_attention, mixture, mlp, out_std
from moezoo.moe.router import Choice
from moezoo.nn.delta import DeltaMixer, DeltaSizes, FullGate, HeadDecay
from moezoo.nn.rotary import Rotary, Yarn
from moezoo.typed import AtMost, Even, Size

# What mixes the tokens of a layer, and what follows.
Kind = tuple[Literal["delta", "attention"], Literal["mlp", "moe"]]


@dataclasses.dataclass(frozen=True)
class Qwen35Config(GroupedAttentionConfig):
    """Settings of a Qwen3.5 or a Qwen3-Next. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `model_type` | the names in its Hugging Face folder; it changes no number |
    | `delta` | the sizes of the mixer by the delta rule |
    | `attention_every` | layer i has attention if it divides i + 1 |
    | `attention_layers` | the layers, from 0, that have attention instead; None: by `attention_every` |
    | `rotary_dims` | the first dimensions of each head, which are rotated; None for all |
    | `attention_bias` | whether the projections of attention have biases |
    | `shared_mlp` | width of the shared MLP |
    | `moe_every`, `mlp_layers` | layer i has experts if `moe_every` divides i + 1 and `mlp_layers` does not name i |
    | `mlp` | width of the MLP in layers without experts |
    | `router` | how experts are chosen and gates computed |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    model_type: Literal["qwen3_5_moe", "qwen3_next"] = "qwen3_5_moe"
    delta: DeltaSizes = dataclasses.field(default_factory=DeltaSizes)
    attention_every: Size = 4
    attention_layers: tuple[int, ...] | None = None
    rotary_dims: Annotated[Even, AtMost("head_dim")] | None = 8
    attention_bias: Literal["none", "all"] = "none"
    shared_mlp: Size = 128
    mlp: Size = 512
    moe_every: Size = 1
    mlp_layers: tuple[int, ...] = ()
    router: Choice = dataclasses.field(default_factory=Choice)
    rope_base: float = 1e7
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0))
    max_length: int = 32768
    norm_eps: float = 1e-6
    load_balance: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)
        check_layers(self, "attention_layers")
        check_layers(self, "mlp_layers")
        check_experts(self, self.moe_every, self.mlp_layers)

    @property
    def norms_around_one(self) -> bool:
        """They are."""
        return True

    @property
    def longest(self) -> Limit:
        """`max_length`, or what YaRN extends texts to."""
        return extended(self.max_length, self.yarn)

    @property
    def variant(self) -> str:
        """The `model_type`."""
        return self.model_type


def kinds(c: Qwen35Config) -> list[list[Kind]]:
    """The parts of each layer."""
    attends = range(c.attention_every - 1, c.layers, c.attention_every)
    if c.attention_layers is not None:
        attends = frozenset(c.attention_layers)
    experts = with_experts(c.layers, c.moe_every, c.mlp_layers)
    return [[("attention" if i in attends else "delta", "moe" if i in experts else "mlp") for i in range(c.layers)]]


def make_block(kind: Kind, c: Qwen35Config, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    mixer, feed_forward = kind
    first, *others = jax.random.split(key, 4)
    if mixer == "attention":
        rotary = Rotary(c.rotary_dims or c.head_dim, c.rope_base, c.yarn)
        mixes = grouped_attention(c, dtype, first, rotary=rotary, norm_over="head", biases=c.attention_bias, gated=True)
    else:
        inside, for_decay, for_gate = jax.random.split(first, 3)
        decay = HeadDecay(c.embed, c.delta, dtype=dtype, key=for_decay)
        gate = FullGate(c.embed, c.delta, dtype=dtype, key=for_gate)
        mixes = DeltaMixer(
            c.embed, c.delta, decay, gate, epsilon=c.norm_eps, out_std=out_std(c), dtype=dtype, key=inside
        )
    if feed_forward == "mlp":
        return block(c, dtype, mixes, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, mixes, mixture(c, dtype, others, c.router, shared=c.shared_mlp, shared_gated=True))
