"""Qwen3-MoE (Yang et al., 2025, arXiv:2505.09388): grouped-query attention with normalised heads; experts or MLPs.

The file has, in this order, the configuration, one layer, the model, and its mapping to Hugging Face folders.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # each head's query and key is normalised, then rotated
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token, or mlp(norm(x))
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. Gates are a softmax over the K largest router
logits. Embedding and unembedding are separate matrices.
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
from moezoo.models.config_json import nothing_unused, read_flag, read_grouped, read_yarn, write_grouped, write_rope
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
class Qwen3MoeConfig(GroupedAttentionConfig):
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

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)
        if outside := [i for i in self.mlp_layers if not 0 <= i < self.layers]:
            raise UserError(
                f"model.mlp_layers names layer {outside[0]}, but model.layers={self.layers} has layers 0 to "
                f"{self.layers - 1}"
            )
        if "moe" not in self.kinds:
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


def _make_block(kind: Literal["mlp", "moe"], c: Qwen3MoeConfig, dtype: jnp.dtype, key: Array) -> Block:
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


class Qwen3Moe(LanguageModel):
    """The model: `model(tokens)` returns logits, and routing of the layers with experts (`LanguageModel.__call__`)."""

    embedding: TokenEmbedding
    stacks: tuple[Stack, ...]
    unembedding: Unembedding
    config: Qwen3MoeConfig = eqx.field(static=True)

    def __init__(self, config: Qwen3MoeConfig, *, dtype: DTypeLike = jnp.float32, key: Array):
        c, dtype = config, jnp.dtype(dtype)
        for_embedding, for_layers, for_head = jax.random.split(key, 3)
        self.config = c
        self.embedding = TokenEmbedding(c.vocab, c.embed, std=c.init_std, dtype=dtype, key=for_embedding)
        keys = jax.random.split(for_layers, c.layers)
        self.stacks = make_stacks(c.kinds, lambda kind, key: _make_block(kind, c, dtype, key), keys)
        self.unembedding = Unembedding(c.embed, c.vocab, epsilon=c.norm_eps, std=c.init_std, dtype=dtype, key=for_head)


# Hugging Face folders: path of our array -> tensor name, and our setting -> key of config.json.
MODEL_TYPES = ("qwen3_moe",)
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
_KEYS = {"vocab": "vocab_size", "embed": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_KEYS |= {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": "intermediate_size"}
_KEYS |= {"expert_mlp": "moe_intermediate_size", "experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_KEYS |= {"moe_every": "decoder_sparse_step", "norm_eps": "rms_norm_eps", "max_length": "max_position_embeddings"}
_KEYS |= {"init_std": "initializer_range", "load_balance": "router_aux_loss_coef"}
# For missing keys.
_DEFAULTS = {"decoder_sparse_step": 1, "max_position_embeddings": 32768, "initializer_range": 0.02}
_DEFAULTS |= {"router_aux_loss_coef": 0.001}


def config_from_hub(mapping: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    size = mapping.get("hidden_size", 0) // (mapping.get("num_attention_heads") or 1)
    settings = read_grouped(mapping, _KEYS, _DEFAULTS | {"head_dim": size})
    layers = range(settings["layers"])
    settings |= {
        "mlp_layers": [i for i in mapping.get("mlp_only_layers") or [] if i in layers],
        "window": mapping.get("sliding_window", 4096) if read_flag(mapping, "use_sliding_window") else None,
        "yarn": read_yarn(mapping),
    }
    return convert(Qwen3MoeConfig, settings, "config.json: model")


def config_to_hub(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the keys that transformers reads. Raises `UserError` for a router that it does not have."""
    return write_grouped(config, _KEYS, "qwen3_moe", "Qwen3Moe") | {
        "mlp_only_layers": list(config.mlp_layers),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "rope_parameters": write_rope(config.rope_base, config.yarn),
    }
