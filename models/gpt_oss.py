"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): windows in every second layer, attention sinks, experts with biases.

The file has, in this order, the configuration and the layers. `moezoo.models.gpt_oss_hub` maps them to Hugging Face
folders.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # of the window, or of all tokens; each head has a sink
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. A sink is a learned score that joins the softmax of
a head's scores and has no value. With router logits x W + b, gates are a softmax over the K largest. An expert is

    gate, up = min(x W_gate + b_gate, limit), clamp(x W_up + b_up, -limit, limit)
    expert(x) = (gate * sigmoid(alpha gate) * (up + 1)) W_down + b_down
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.convert import Positive, Size
from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.clamped_swiglu import ClampedSwiGLU
from moezoo.nn.norm import RMSNorm
from moezoo.nn.rotary import Rotary
from moezoo.nn.yarn import Yarn

# What a query sees.
Kind = Literal["window", "all"]


@dataclasses.dataclass(frozen=True)
class GptOssConfig(GroupedAttentionConfig):
    """Settings of a gpt-oss model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `attention_bias` | whether the four projections of attention have biases |
    | `window` | the tokens that a query sees, itself included, in layers with a window; None: no layer has one |
    | `full_layers` | the layers, from 0, whose queries see all tokens; None: every second one, 1, 3, 5, ... |
    | `swiglu_alpha`, `swiglu_limit` | the activation of experts (`moezoo.nn.clamped_swiglu`) |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_mlp: int = 128
    experts: int = 16
    experts_per_token: int = 4
    attention_bias: Literal["none", "all"] = "all"
    window: Size | None = 64
    full_layers: tuple[int, ...] | None = None
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0
    rope_base: float = 150000.0
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0, truncate=False))
    max_length: int = 32768
    norm_eps: float = 1e-5
    load_balance: float = 0.01
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.0
    init_std: float = 0.02
    tied_embeddings: bool = False

    def __post_init__(self):
        super().__post_init__()
        if outside := [i for i in self.full_layers or () if not 0 <= i < self.layers]:
            raise UserError(
                f"model.full_layers names layer {outside[0]}, but model.layers={self.layers} has layers 0 to "
                f"{self.layers - 1}"
            )

    @property
    def sees_all(self) -> bool:
        """Whether the queries of some layer see all tokens up to themselves."""
        return "all" in kinds(self)[0]


def kinds(c: GptOssConfig) -> list[list[Kind]]:
    """What the queries of each layer see."""
    if c.window is None:
        return [["all"] * c.layers]
    full = range(1, c.layers, 2) if c.full_layers is None else frozenset(c.full_layers)
    return [["all" if i in full else "window" for i in range(c.layers)]]


def make_block(kind: Kind, c: GptOssConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    for_attention, for_router, for_experts = jax.random.split(key, 3)
    options: dict[str, Any] = {"out_std": (2 * c.layers) ** -0.5, "dtype": dtype}
    attention = Attention(
        c.embed,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=Rotary(c.head_dim, c.rope_base, c.yarn),
        biases=c.attention_bias,
        sinks=True,
        window=c.window if kind == "window" else None,
        **options,
        key=for_attention,
    )
    router = Router(c.embed, c.experts, c.experts_per_token, Choice(), bias="trained", dtype=dtype, key=for_router)
    activation = ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit)
    experts = Experts(c.experts, c.embed, c.expert_mlp, activation=activation, biases="all", **options, key=for_experts)
    norms = [RMSNorm(c.embed, c.norm_eps, dtype=dtype) for _ in range(2)]
    return Block(norms[0], attention, norms[1], MoE(router, experts))
