"""Kimi Linear (Kimi Team, 2025, arXiv:2510.26692): Kimi Delta Attention, and latent attention between.

`moezoo.models.kimi_linear_hub` maps it to Hugging Face folders.

    x = embedding[tokens]                                              # [B, S, d]
    for each layer:
        x = x + mixer(norm(x))                                         # the delta rule, or latent attention
        x = x + mlp(norm(x))                                           # the first `dense_layers` layers
        x = x + shared(norm(x)) + sum_k gate_k * expert_k(norm(x))     # the other layers
    logits = norm(x) @ unembedding                                     # [B, S, vocab]

B batch, S sequence, d `embed`. The mixer by the delta rule (`moezoo.nn.delta`) has a decay per channel of a key, and a
gate of low rank. Latent attention (`moezoo.nn.latent_attention`) rotates nothing: the other layers know the order.

A token chooses experts as in DeepSeek-V3 (2024, arXiv:2412.19437, section 2.1.2); `shared` is an MLP as wide as
`shared_experts` experts.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import ModelConfig, check_layers
from moezoo.models.parts import block, mixture, mlp, out_std
from moezoo.moe.router import Choice
from moezoo.nn.delta import ChannelDecay, DeltaMixer, DeltaSizes, LowRankGate
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.typed import AtMost, Count, Size

_ROUTER = Choice("sigmoid", group_score="sum_of_top2", scale=2.446, choice_bias="learned")

# What mixes the tokens of a layer, and what follows.
Kind = tuple[Literal["delta", "attention"], Literal["dense", "moe"]]


@dataclasses.dataclass(frozen=True)
class KimiLinearConfig(ModelConfig):
    """Settings of a Kimi Linear model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `attention_layers` | the layers, from 0, that have latent attention; None: every fourth, 3, 7, ..., and the last |
    | `delta` | the sizes of the mixers by the delta rule; decays have the rank `key_dim`, gates `value_dim` |
    | `heads` | the heads of latent attention |
    | `q_lora`, `kv_lora` | sizes of its latents of queries (None: no latent) and of keys and values |
    | `nope_dim`, `rope_dim` | per head: the part of a key from the latent, and the part that all heads share |
    | `value_dim` | per head: a value |
    | `dense_layers`, `mlp` | number of first layers that have an MLP instead of experts, and its width |
    | `shared_experts` | width of the shared MLP, in experts; 0 for none |
    | `router` | how experts are chosen and gates computed |

    `moezoo.models.config.ModelConfig` describes the others.
    """

    attention_layers: tuple[int, ...] | None = None
    delta: DeltaSizes = dataclasses.field(default_factory=lambda: DeltaSizes(8, 8, 16, 16))
    q_lora: Size | None = None
    kv_lora: Size = 32
    nope_dim: Size = 32
    rope_dim: Size = 16
    value_dim: Size = 32
    dense_layers: Annotated[Count, AtMost("layers", strict=True)] = 1
    mlp: int = 512
    shared_experts: Count = 1
    router: Choice = _ROUTER
    load_balance: float = 0.0001
    load_balance_over: Literal["batch", "sequence"] = "sequence"

    def __post_init__(self):
        super().__post_init__()
        check_layers(self, "attention_layers")
        if self.dense_layers and self.mlp < 1:
            raise UserError(f"model.mlp={self.mlp} must be greater than 0 with model.dense_layers={self.dense_layers}")
        self.router.check(self.experts, self.experts_per_token)


def every_fourth(layers: int) -> tuple[int, ...]:
    """Return the layers with latent attention where no setting names them: every fourth, and the last."""
    return tuple(i for i in range(layers) if i % 4 == 3 or i == layers - 1)


def kinds(c: KimiLinearConfig) -> list[list[Kind]]:
    """The parts of each layer, in two runs."""
    attends = frozenset(every_fourth(c.layers) if c.attention_layers is None else c.attention_layers)

    def run(layers: range, feed_forward: Literal["dense", "moe"]) -> list[Kind]:
        return [("attention" if i in attends else "delta", feed_forward) for i in layers]

    return [run(range(c.dense_layers), "dense"), run(range(c.dense_layers, c.layers), "moe")]


def make_block(kind: Kind, c: KimiLinearConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    mixer, feed_forward = kind
    first, *others = jax.random.split(key, 4)
    if mixer == "attention":
        sizes = LatentSizes(c.heads, c.q_lora, c.kv_lora, c.nope_dim, c.rope_dim, c.value_dim)
        mixes = LatentAttention(c.embed, sizes, rotary=None, out_std=out_std(c), dtype=dtype, key=first)
    else:
        inside, for_decay, for_gate = jax.random.split(first, 3)
        decay = ChannelDecay(c.embed, c.delta, rank=c.delta.key_dim, dtype=dtype, key=for_decay)
        gate = LowRankGate(c.embed, c.delta, rank=c.delta.value_dim, dtype=dtype, key=for_gate)
        mixes = DeltaMixer(
            c.embed, c.delta, decay, gate, epsilon=c.norm_eps, out_std=out_std(c), dtype=dtype, key=inside
        )
    if feed_forward == "dense":
        return block(c, dtype, mixes, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, mixes, mixture(c, dtype, others, c.router, shared=c.shared_experts * c.expert_mlp))
