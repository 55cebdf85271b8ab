"""Grouped-query attention with a window in most layers, and experts by a sigmoid router. The settings choose the model.

`moezoo.models.windowed_hub` maps it to Hugging Face folders.

    x = embedding[tokens]                                          # [B, S, d], in `afmoe` times sqrt(d)
    for each layer:
        x = x + attention(norm(x))                                 # of the window, or of all tokens
        x = x + mlp(norm(x))                                       # layers without experts
        x = x + shared(norm(x)) + sum_k gate_k * expert_k(norm(x)) # layers with experts
    logits = norm(x) @ unembedding                                 # [B, S, vocab]

B batch, S sequence, d `embed`; in `afmoe` what is added to x goes through a further norm. A token chooses experts as in
DeepSeek-V3 (2024, arXiv:2412.19437, section 2.1.2); `shared` is an MLP as wide as `shared_experts` experts.

| `model_type` | layers without a window | heads | shared experts |
|---|---|---|---|
| `mimo_v2_flash` (Xiaomi, 2025) | other key-value heads and base, no sinks | narrow values, times a constant | none |
| `exaone_moe` (LG AI Research, 2026, K-EXAONE) | nothing is rotated | norms of each query and key | yes |
| `afmoe` (Arcee AI, 2025, Trinity) | nothing is rotated | the same norms, results times a gate | yes |
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Window, check_heads, check_layers
from moezoo.models.parts import grouped_attention, mixture, mlp, norm
from moezoo.moe.router import Choice
from moezoo.nn.attention import Biases, NormOver
from moezoo.nn.rotary import Rotary
from moezoo.typed import AtMost, Count, Even, Positive, Size

_ROUTER = Choice("sigmoid", group_score="sum_of_top2", choice_bias="learned")

# What the queries of a layer see, and what follows attention.
Kind = tuple[Literal["window", "all"], Literal["mlp", "moe"]]


@dataclasses.dataclass(frozen=True)
class WindowedConfig(GroupedAttentionConfig):
    """Settings of a model with a window in most layers. The defaults are a laptop-sized MiMo-V2-Flash.

    | field | meaning |
    |---|---|
    | `model_type` | the names in its Hugging Face folder; it changes no number |
    | `window` | the tokens that a query sees, itself included, in layers with a window |
    | `full_layers` | the layers, from 0, whose queries see all tokens; None: the first, and 5, 11, 17, ... |
    | `full_kv_heads` | `kv_heads` of these layers |
    | `full_rope_base` | `rope_base` of these layers; None: nothing is rotated there |
    | `rotary_dims` | the first dimensions of each query and key, which are rotated; None for all |
    | `value_dim` | size of a head's value; `head_dim` is that of its query and its key |
    | `value_scale` | the factor of values |
    | `sinks` | which layers have a sink per head |
    | `norm_over` | what the norms of queries and keys are over; `nothing` for no norms |
    | `attention_bias` | which projections of attention have biases; `inputs` are those to queries, keys and values |
    | `attention_gate` | whether a head's results are multiplied by the sigmoid of a projection |
    | `norms` | `before` each part, or `around`: also of what it adds, and norms multiply before they round |
    | `embeddings` | as they are (`plain`), or `scaled` by the root of `embed` |
    | `mlp`, `mlp_layers` | width of the MLP in layers without experts, and these layers, from 0 |
    | `shared_experts` | width of the shared MLP, in experts; 0 for none |
    | `router` | how experts are chosen and gates computed |

    `moezoo.models.config` describes the others.
    """

    model_type: Literal["mimo_v2_flash", "exaone_moe", "afmoe"] = "mimo_v2_flash"
    layers: int = 6
    window: Window = 64
    full_layers: tuple[int, ...] | None = None
    full_kv_heads: Size = 1
    full_rope_base: Positive | None = 5e6
    rotary_dims: Annotated[Even, AtMost("head_dim")] | None = 10
    value_dim: Size = 24
    value_scale: Positive = 0.707
    sinks: Literal["none", "windows"] = "windows"
    norm_over: NormOver = "nothing"
    attention_bias: Biases = "none"
    attention_gate: Literal["none", "sigmoid"] = "none"
    norms: Literal["before", "around"] = "before"
    embeddings: Literal["plain", "scaled"] = "plain"
    mlp: Size = 512
    mlp_layers: tuple[int, ...] = (0,)
    shared_experts: Count = 0
    router: Choice = _ROUTER
    max_length: int = 32768
    load_balance: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_heads(self, "full_kv_heads")
        check_layers(self, "full_layers")
        check_layers(self, "mlp_layers")
        self.router.check(self.experts, self.experts_per_token)
        if {*range(self.layers)} <= {*self.mlp_layers}:
            raise UserError(
                f"model.mlp_layers={list(self.mlp_layers)} leaves no layer of model.layers={self.layers} with experts; "
                "name fewer layers"
            )

    @property
    def sees_all(self) -> bool:
        """Whether the queries of some layer see all tokens up to themselves."""
        return any(sight == "all" for sight, _ in kinds(self)[0])

    @property
    def norms_cast_last(self) -> bool:
        """They do where they are around each part."""
        return self.norms == "around"

    @property
    def embedding_factor(self) -> float:
        """The root of the width, or 1."""
        return self.embed**0.5 if self.embeddings == "scaled" else 1.0

    @property
    def variant(self) -> str:
        """The `model_type`."""
        return self.model_type


def usual_full_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose queries see all tokens where no setting names them."""
    return (0, *range(5, layers, 6))


def kinds(c: WindowedConfig) -> list[list[Kind]]:
    """What the queries of each layer see, and its feed-forward part."""
    full = frozenset(usual_full_layers(c.layers) if c.full_layers is None else c.full_layers)
    without = frozenset(c.mlp_layers)
    return [[("all" if i in full else "window", "mlp" if i in without else "moe") for i in range(c.layers)]]


def make_block(kind: Kind, c: WindowedConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    sight, feed_forward = kind
    first, *others = jax.random.split(key, 4)
    options: dict[str, Any] = {"biases": c.attention_bias, "value_dim": c.value_dim, "value_scale": c.value_scale}
    options |= {"norm_over": c.norm_over, "gated": c.attention_gate == "sigmoid"}
    if sight == "window":
        options |= {"window": c.window, "sinks": c.sinks == "windows"}
    else:
        options |= {"kv_heads": c.full_kv_heads}
    base = c.rope_base if sight == "window" else c.full_rope_base
    rotary = None if base is None else Rotary(c.rotary_dims or c.head_dim, base)
    before, after, before_next, after_next = (norm(c, dtype) for _ in range(4))
    if c.norms == "before":
        after = after_next = None
    attention = grouped_attention(c, dtype, first, rotary=rotary, **options)
    if feed_forward == "mlp":
        part = mlp(c, dtype, others[0], c.mlp)
    else:
        part = mixture(c, dtype, others, c.router, shared=c.shared_experts * c.expert_mlp)
    return Block(before, attention, before_next, part, after_attention_norm=after, after_feed_forward_norm=after_next)
