"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): windows in every second layer, attention sinks, experts with biases.

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
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Limit, Window, check_layers, extended
from moezoo.models.config_json import ConfigJson
from moezoo.models.hub import SILU, Found, Hub, Key, ModelType, Part, common, rope
from moezoo.models.names import GROUPED_ATTENTION, MLP, MOE, layers, rows
from moezoo.models.parts import block, grouped_attention, mixture
from moezoo.moe.router import Choice
from moezoo.nn.mlp import ClampedSwiGLU
from moezoo.nn.rotary import Rotary, Yarn
from moezoo.typed import Positive

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
    | `swiglu_alpha`, `swiglu_limit` | the activation of experts (`moezoo.nn.mlp`) |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    attention_bias: Literal["none", "all"] = "all"
    window: Window | None = 64
    full_layers: tuple[int, ...] | None = None
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0
    rope_base: float = 150000.0
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0, truncate=False))
    max_length: int = 32768

    def __post_init__(self):
        super().__post_init__()
        check_layers(self, "full_layers")

    @property
    def longest(self) -> Limit:
        """`max_length`, or what YaRN extends texts to."""
        return extended(self.max_length, self.yarn)

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
    first, *others = jax.random.split(key, 3)
    rotary, window = Rotary(c.head_dim, c.rope_base, c.yarn), c.window if kind == "window" else None
    options: dict[str, Any] = {"biases": c.attention_bias, "sinks": True, "window": window}
    attention = grouped_attention(c, dtype, first, rotary=rotary, **options)
    activation = ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit)
    experts = mixture(c, dtype, others, Choice(), bias="trained", activation=activation, biases="all")
    return block(c, dtype, attention, experts)


# Hugging Face folders.
_EXPERTS = """
    experts.gate+experts.up=gate_up_proj experts.gate_bias+experts.up_bias=gate_up_proj_bias
    experts.down=down_proj experts.down_bias=down_proj_bias
"""
_ROUTER = rows(f"{MOE}router.", f"{MLP}router.", "weight=weight bias=bias")
_ROWS = layers(GROUPED_ATTENTION, (*_ROUTER, *rows(MOE, f"{MLP}experts.", _EXPERTS, "alternating")))
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_WINDOW, _ALL = "sliding_attention", "full_attention"


def _read_windows(config: ConfigJson, found: Found) -> Found:
    """Return the window and the layers without one."""
    window = config.read("sliding_window", int | None, 128)
    layers = found["layers"]
    types = config.read_layer_types((_WINDOW, _ALL), layers)
    if types is None:
        types = tuple(_ALL if i % 2 else _WINDOW for i in range(layers))
    if window is None and _WINDOW in types:
        raise UserError(
            f"config.json: sliding_window=null, but layer {types.index(_WINDOW)} of layer_types is {_WINDOW}; "
            "write the size of the window"
        )
    full = tuple(i for i, kind in enumerate(types) if kind == _ALL)
    if len(full) == layers:
        return {"window": None}
    return {"window": window, "full_layers": None if full == tuple(range(1, layers, 2)) else full}


def _write_windows(c: GptOssConfig) -> Mapping[str, Any]:
    return {
        # transformers makes a mask of the window even where no layer uses it.
        "sliding_window": c.window or c.max_length,
        "layer_types": [_ALL if kind == "all" else _WINDOW for kind in kinds(c)[0]],
    }


_SETTINGS = common(131072, norm_eps=1e-5) | {
    "expert_mlp": Key("intermediate_size"),
    "load_balance": Key("router_aux_loss_coef", 0.001),
    "swiglu_alpha": Key("swiglu_alpha", 1.702),
    "hidden_act_alpha": Part(write=lambda c: {"hidden_act_alpha": c.swiglu_alpha}),  # SGLang's name
    "swiglu_limit": Key("swiglu_limit", 7.0),
    "kv_heads": Key("num_key_value_heads", 8),
    "head_dim": Key("head_dim", 64),
    "experts": Key("num_local_experts num_experts"),
}
_FURTHER = {
    "attention_bias": Key("attention_bias", True, words=("none", "all")),
    "windows": Part(
        _read_windows,
        _write_windows,
        {"window": "sliding_window", "full_layers": "layer_types"},
        forms=("full_layers",),
    ),
    "rope": rope("yarn", 150000.0, _YARN),
    "hidden_act": SILU,
}
# Second names of settings, which transformers does not read.
_ONLY: Mapping[str, Any] = {
    "experts_per_token": lambda found: found["experts_per_token"],
    "hidden_act_alpha": lambda found: found["swiglu_alpha"],
}
_WITHOUT_EFFECT = "initial_context_length"
HUB = Hub(
    {"gpt_oss": "sinks, windows in every second layer, experts with biases; gpt-oss-20b and 120b"},
    {"gpt_oss": ModelType("GptOss", _SETTINGS, _FURTHER, _ROWS, _ONLY, _WITHOUT_EFFECT)},
    lambda config: "gpt_oss",
)
