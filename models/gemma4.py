"""Gemma 4 26B-A4B (Google, 2026), the text part: an MLP beside the experts of each layer, and windows in most layers.

`moezoo.models.gemma4_hub` maps it to Hugging Face folders.

    x = sqrt(d) * embedding[tokens]                             # [B, S, d]
    for each layer:
        x = x + norm(attention(norm(x)))
        x = x + norm(norm(mlp(norm(x))) + norm(sum_k gate_k * expert_k(norm(x))))
        x = x * scale                                           # one stored number
    logits = cap * tanh(norm(x) @ unembedding / cap)            # [B, S, vocab]

B batch, S sequence, d `embed`; each norm has a scale of its own. The router (`moezoo.moe.router`) reads x itself: its
gates are a softmax over all experts, renormalised over the chosen ones, times a trained number per expert. Norms of
queries and keys have scales, that of values has none, and scores have no factor.

| layers | keys | key-value heads | values | rotated |
|---|---|---|---|---|
| most | of the window | `kv_heads` of `head_dim` | a projection of their own | all pairs |
| every sixth, and the last | all | `full_kv_heads` of `full_head_dim` | what keys are projected to | the first pairs |
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Window, check_heads, check_layers
from moezoo.models.parts import grouped_attention, mixture, norm
from moezoo.moe.mixture import BranchNorms
from moezoo.moe.router import Choice
from moezoo.nn.attention import ValuesFrom
from moezoo.nn.mlp import GeGLU
from moezoo.nn.rotary import Proportional, Rotary
from moezoo.typed import Even, Positive, Range, Size

# What a query sees.
Kind = Literal["window", "all"]


@dataclasses.dataclass(frozen=True)
class Gemma4Config(GroupedAttentionConfig):
    """Settings of a Gemma 4 with experts. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `mlp` | width of the MLP beside the experts |
    | `window` | the tokens that a query sees, itself included, in layers with a window |
    | `full_layers` | the layers, from 0, whose queries see all tokens, with the last; None: every sixth, and the last |
    | `full_kv_heads`, `full_head_dim` | `kv_heads` and `head_dim` of these layers |
    | `full_values` | what their values are made of |
    | `full_rope_base`, `full_rope_share` | `rope_base` of these layers, and the share of the pairs that rotate |
    | `logit_cap` | what logits stay below; None for no cap |

    `moezoo.models.config` describes the others.
    """

    layers: int = 6
    mlp: Size = 256
    window: Window = 64
    full_layers: tuple[int, ...] | None = None
    full_kv_heads: Size = 1
    full_head_dim: Even = 64
    full_values: ValuesFrom = "keys"
    full_rope_base: Positive = 1e6
    full_rope_share: Annotated[float, Range(at_least=0, at_most=1)] = 0.25
    logit_cap: Positive | None = 30.0
    tied_embeddings: bool = True
    max_length: int = 32768
    norm_eps: float = 1e-6
    load_balance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_heads(self, "full_kv_heads")
        check_layers(self, "full_layers")
        if kinds(self)[0][-1] != "all":
            raise UserError(
                f"model.full_layers={list(self.full_layers or ())} leaves out the last layer, {self.layers - 1}, whose "
                "queries always see all tokens; add it"
            )

    @property
    def sees_all(self) -> bool:
        """The last layer's queries see all tokens up to themselves."""
        return True

    @property
    def norms_cast_last(self) -> bool:
        """They do."""
        return True

    @property
    def embedding_factor(self) -> float:
        """The root of the width."""
        return self.embed**0.5


def kinds(c: Gemma4Config) -> list[list[Kind]]:
    """What the queries of each layer see."""
    full = {*range(5, c.layers, 6), c.layers - 1} if c.full_layers is None else frozenset(c.full_layers)
    return [["all" if i in full else "window" for i in range(c.layers)]]


def make_block(kind: Kind, c: Gemma4Config, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 4)
    options: dict[str, Any] = {"norm_over": "head", "norm_values": True, "scale": 1.0}
    if kind == "window":
        options |= {"rotary": Rotary(c.head_dim, c.rope_base), "window": c.window}
    else:
        rotary = Rotary(c.full_head_dim, c.full_rope_base, Proportional(c.full_rope_share))
        sizes = {"kv_heads": c.full_kv_heads, "head_dim": c.full_head_dim}
        options |= {"rotary": rotary, "values_from": c.full_values, **sizes}
    before, after, after_both, *beside = (norm(c, dtype) for _ in range(7))
    experts = mixture(
        c,
        dtype,
        others,
        Choice(),
        shared=c.mlp,
        norms=BranchNorms(*beside),
        scales="trained",
        activation=GeGLU(),
    )
    return Block(
        before,
        grouped_attention(c, dtype, first, **options),
        None,
        experts,
        after_attention_norm=after,
        after_feed_forward_norm=after_both,
        scale=jnp.ones((1,), jnp.float32),
    )
