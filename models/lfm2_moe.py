"""LFM2 with experts (Liquid AI, 2025, arXiv:2511.23404): gated short convolutions, and attention between.

`moezoo.models.lfm2_moe_hub` maps it to Hugging Face folders.

    x = embedding[tokens]                                       # [B, S, d]
    for each layer:
        x = x + mixer(norm(x))                                  # a gated short convolution, or attention
        x = x + mlp(norm(x))                                    # the first `dense_layers` layers
        x = x + sum_k gate_k * expert_k(norm(x))                # the other layers
    logits = norm(x) @ unembedding                              # [B, S, vocab]

B batch, S sequence, d `embed`. A convolution (`moezoo.nn.gated_convolution`) reads a token and the few before it.
Attention has grouped key-value heads, a norm of each query and key, and rotary positions.

Gates are sigmoids of the router's logits, divided by their sum plus 1e-6 over the chosen experts; a choice bias, which
is in no gate, keeps loads even.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Limit, check_layers, extended
from moezoo.models.parts import block, grouped_attention, mixture, mlp, out_std
from moezoo.moe.router import Choice
from moezoo.nn.gated_convolution import GatedConvolution
from moezoo.nn.rotary import Rotary, Yarn
from moezoo.typed import AtMost, Count, Size

_ROUTER = Choice("sigmoid", choice_bias="learned", added_to_sum=1e-6)

# What mixes the tokens of a layer, and what follows.
Kind = tuple[Literal["convolution", "attention"], Literal["dense", "moe"]]


@dataclasses.dataclass(frozen=True)
class Lfm2MoeConfig(GroupedAttentionConfig):
    """Settings of an LFM2 with experts. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `attention_layers` | the layers, from 0, that have attention; None: every fourth, 2, 6, 10, ... |
    | `taps` | the tokens that a convolution reads: a token and those before it |
    | `convolution_bias` | whether convolutions and the projections around them have biases |
    | `dense_layers`, `mlp` | number of first layers that have an MLP instead of experts, and its width |
    | `router` | how experts are chosen and gates computed |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    attention_layers: tuple[int, ...] | None = None
    taps: Size = 3
    convolution_bias: Literal["none", "all"] = "none"
    dense_layers: Annotated[Count, AtMost("layers", strict=True)] = 1
    mlp: int = 512
    router: Choice = _ROUTER
    rope_base: float = 1e6
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0))
    tied_embeddings: bool = True
    max_length: int = 32768
    load_balance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_layers(self, "attention_layers")
        if self.dense_layers and self.mlp < 1:
            raise UserError(f"model.mlp={self.mlp} must be greater than 0 with model.dense_layers={self.dense_layers}")
        self.router.check(self.experts, self.experts_per_token)

    @property
    def longest(self) -> Limit:
        """`max_length`, or what YaRN extends texts to."""
        return extended(self.max_length, self.yarn)


def every_fourth(layers: int) -> tuple[int, ...]:
    """Return the layers with attention where no setting names them."""
    return tuple(range(2, layers, 4))


def kinds(c: Lfm2MoeConfig) -> list[list[Kind]]:
    """The parts of each layer, in two runs."""
    attends = frozenset(every_fourth(c.layers) if c.attention_layers is None else c.attention_layers)

    def run(layers: range, feed_forward: Literal["dense", "moe"]) -> list[Kind]:
        return [("attention" if i in attends else "convolution", feed_forward) for i in layers]

    return [run(range(c.dense_layers), "dense"), run(range(c.dense_layers, c.layers), "moe")]


def make_block(kind: Kind, c: Lfm2MoeConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    mixer, feed_forward = kind
    first, *others = jax.random.split(key, 3)
    if mixer == "attention":
        mixes = grouped_attention(c, dtype, first, rotary=Rotary(c.head_dim, c.rope_base, c.yarn), norm_over="head")
    else:
        biases = c.convolution_bias
        mixes = GatedConvolution(c.embed, c.taps, biases=biases, out_std=out_std(c), dtype=dtype, key=first)
    if feed_forward == "dense":
        return block(c, dtype, mixes, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, mixes, mixture(c, dtype, others, c.router))
