"""Qwen3-MoE (Yang et al., 2025, arXiv:2505.09388): grouped-query attention with normalised heads; experts or MLPs.

The file has, in this order, the configuration, one layer, the model, and its mapping to Hugging Face folders.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # each head's query and key is normalised, then rotated
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token, or mlp(norm(x))
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. Gates are a softmax over the K largest router
logits. The unembedding is a matrix of its own or, with `tied_embeddings`, the embedding's transpose.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from moezoo.convert import Size, convert
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel, TokenEmbedding, Unembedding
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.models.config_json import (
    COMMON_KEYS,
    YARN_KEYS,
    ConfigJson,
    always,
    nothing_unused,
    read_grouped,
    read_head_dim,
    read_rope,
    write_grouped,
    write_rope,
)
from moezoo.models.layers import make_stacks
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.mlp import MLP
from moezoo.nn.norm import RMSNorm
from moezoo.nn.rotary import Rotary
from moezoo.nn.yarn import Yarn
from moezoo.parallel.axes import Stack


@dataclasses.dataclass(frozen=True)
class GroupedConfig(GroupedAttentionConfig):
    """Settings of a Qwen3-MoE model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `moe_every`, `mlp_layers` | layer i has experts if `moe_every` divides i + 1 and `mlp_layers` does not name i |
    | `mlp` | width of the MLP in layers without experts |
    | `router` | how experts are chosen and gates computed |
    | `attention_bias` | whether the four projections of attention have biases |
    | `window` | the tokens that a query sees, itself included; None for all |
    | `yarn` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: Size = 512
    expert_mlp: int = 128
    experts: int = 16
    experts_per_token: int = 4
    moe_every: Size = 1
    mlp_layers: tuple[int, ...] = ()
    router: Choice = dataclasses.field(default_factory=Choice)
    attention_bias: Literal["none", "all"] = "none"
    window: Size | None = None
    rope_base: float = 1e6
    yarn: Yarn = dataclasses.field(default_factory=lambda: Yarn(mscale=0.0, mscale_all=0.0))
    max_length: int = 32768
    norm_eps: float = 1e-6
    load_balance: float = 0.001
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.0
    init_std: float = 0.02
    tied_embeddings: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)
        if outside := [i for i in self.mlp_layers if not 0 <= i < self.layers]:
            raise UserError(
                f"model.mlp_layers names layer {outside[0]}, but model.layers={self.layers} has layers 0 to "
                f"{self.layers - 1}"
            )
        with_experts = range(self.moe_every - 1, self.layers, self.moe_every)
        if all(i in self.mlp_layers for i in with_experts):
            raise UserError(
                f"model.moe_every={self.moe_every} and model.mlp_layers={list(self.mlp_layers)} leave no layer of "
                f"model.layers={self.layers} with experts; lower moe_every or name fewer layers"
            )

    @property
    def kinds(self) -> list[Literal["mlp", "moe"]]:
        """The feed-forward part of each layer."""
        without = frozenset(self.mlp_layers)
        with_experts = [(i + 1) % self.moe_every == 0 and i not in without for i in range(self.layers)]
        return ["moe" if has else "mlp" for has in with_experts]


def _make_block(kind: Literal["mlp", "moe"], c: GroupedConfig, dtype: jnp.dtype, key: Array) -> Block:
    for_attention, first, for_experts = jax.random.split(key, 3)
    out_std = (2 * c.layers) ** -0.5
    attention = Attention(
        c.embed,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=Rotary(c.head_dim, c.rope_base, c.yarn),
        norm_over="head",
        norm_eps=c.norm_eps,
        biases=c.attention_bias,
        window=c.window,
        out_std=out_std,
        dtype=dtype,
        key=for_attention,
    )
    if kind == "mlp":
        feed_forward = MLP(c.embed, c.mlp, out_std=out_std, dtype=dtype, key=first)
    else:
        router = Router(c.embed, c.experts, c.experts_per_token, c.router, dtype=dtype, key=first)
        experts = Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std, dtype=dtype, key=for_experts)
        feed_forward = MoE(router, experts)
    norms = [RMSNorm(c.embed, c.norm_eps, dtype=dtype) for _ in range(2)]
    return Block(norms[0], attention, norms[1], feed_forward)


class Grouped(LanguageModel):
    """The model: `model(tokens)` returns logits, and routing of the layers with experts (`LanguageModel.__call__`)."""

    embedding: TokenEmbedding
    stacks: tuple[Stack, ...]
    unembedding: Unembedding
    config: GroupedConfig = eqx.field(static=True)

    def __init__(self, config: GroupedConfig, *, dtype: DTypeLike = jnp.float32, key: Array):
        c, dtype = config, jnp.dtype(dtype)
        for_embedding, for_layers, for_head = jax.random.split(key, 3)
        self.config = c
        self.embedding = TokenEmbedding(c.vocab, c.embed, std=c.init_std, dtype=dtype, key=for_embedding)
        keys = jax.random.split(for_layers, c.layers)
        self.stacks = make_stacks(c.kinds, lambda kind, key: _make_block(kind, c, dtype, key), keys)
        self.unembedding = Unembedding(
            c.embed, c.vocab, epsilon=c.norm_eps, std=c.init_std, tied=c.tied_embeddings, dtype=dtype, key=for_head
        )


# Hugging Face folders: path of our array -> tensor name, and our setting -> key of config.json.
MODEL_TYPES = {"qwen3_moe": "norms of each query and key, softmax router; Qwen3-MoE"}
find_unused = nothing_unused
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
LAYER_NAMES = {
    "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "attention.query": f"{_ATTENTION}.q_proj.weight",
    "attention.key": f"{_ATTENTION}.k_proj.weight",
    "attention.value": f"{_ATTENTION}.v_proj.weight",
    "attention.out": f"{_ATTENTION}.o_proj.weight",
    "attention.query_bias": f"{_ATTENTION}.q_proj.bias",
    "attention.key_bias": f"{_ATTENTION}.k_proj.bias",
    "attention.value_bias": f"{_ATTENTION}.v_proj.bias",
    "attention.out_bias": f"{_ATTENTION}.o_proj.bias",
    "attention.query_norm.scale": f"{_ATTENTION}.q_norm.weight",
    "attention.key_norm.scale": f"{_ATTENTION}.k_norm.weight",
    "feed_forward_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "feed_forward.gate": f"{_MLP}.gate_proj.weight",
    "feed_forward.up": f"{_MLP}.up_proj.weight",
    "feed_forward.down": f"{_MLP}.down_proj.weight",
    "feed_forward.router.weight": f"{_MLP}.gate.weight",
    "feed_forward.experts.gate": f"{_MLP}.experts.{{expert}}.gate_proj.weight",
    "feed_forward.experts.up": f"{_MLP}.experts.{{expert}}.up_proj.weight",
    "feed_forward.experts.down": f"{_MLP}.experts.{{expert}}.down_proj.weight",
}
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"kv_heads": "num_key_value_heads", "mlp": "intermediate_size"}
_PLAIN |= {"expert_mlp": "moe_intermediate_size", "moe_every": "decoder_sparse_step"}
_PLAIN |= {"load_balance": "router_aux_loss_coef"}
KEYS = _PLAIN | {"head_dim": "head_dim", "experts": "num_experts", "mlp_layers": "mlp_only_layers"}
KEYS |= {"window": "sliding_window", "rope_base": "rope_theta"} | YARN_KEYS
keys, layer_names = always(KEYS), always(LAYER_NAMES)
# For missing keys.
_DEFAULTS = {"moe_every": 1, "max_length": 32768, "init_std": 0.02, "load_balance": 0.001}
# The first three are of models with shared experts, biases and norms that Qwen3-MoE has not, or always has.
_ONLY = {"shared_expert_intermediate_size": (0,), "qkv_bias": (False,), "use_qk_norm": (True,)}


def config_from_hub(mapping: Mapping[str, Any]) -> GroupedConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config = ConfigJson(mapping)
    settings = read_grouped(config, GroupedConfig, _PLAIN, _DEFAULTS)
    mlp_layers = config.read("mlp_only_layers", tuple[int, ...] | None, None) or ()
    window = config.read("sliding_window", int | None, 4096)
    has_window = config.read("use_sliding_window", bool, False)
    rope = read_rope(config, settings["max_length"], ("default", "yarn"))
    settings |= {
        "head_dim": read_head_dim(config, settings["embed"], settings["heads"]),
        "mlp_layers": [i for i in mlp_layers if 0 <= i < settings["layers"]],
        "window": window if has_window else None,
        "rope_base": rope.base,
        "yarn": rope.yarn,
    }
    # The number of first layers without a window, which only some versions of transformers read.
    only, without_effect = (_ONLY | {"max_window_layers": (0,)}, ()) if has_window else (_ONLY, ("max_window_layers",))
    config.refuse_others(only, without_effect)
    return convert(GroupedConfig, settings, "model")


def config_to_hub(config: GroupedConfig) -> dict[str, Any]:
    """Return the keys that transformers reads. Raises `UserError` for a router that it does not have."""
    keys = _PLAIN | {ours: KEYS[ours] for ours in ("head_dim", "experts")}
    return write_grouped(config, keys, "qwen3_moe", "Qwen3Moe") | {
        "mlp_only_layers": list(config.mlp_layers),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "rope_parameters": write_rope(config.rope_base, config.yarn),
    }
