"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): many small experts, and normalised queries and keys.

The file has, in this order, the configuration, the layers, and their mapping to Hugging Face folders.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # norms of queries and keys over all heads as one vector
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. Gates are the softmax over all E experts, by default
not renormalised. Queries, keys and values may be clipped. The unembedding is a matrix of its own or, with
`tied_embeddings`, the embedding's transpose.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.convert import Positive, convert
from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.models.config_json import (
    COMMON_KEYS,
    ConfigJson,
    always,
    nothing_unused,
    read_rope,
    write_keys,
    write_rope,
)
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.nn.attention import Attention
from moezoo.nn.norm import RMSNorm
from moezoo.nn.rotary import Rotary
from moezoo.nn.yarn import Yarn


@dataclasses.dataclass(frozen=True)
class OlmoeConfig(GroupedAttentionConfig):
    """Settings of an OLMoE model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `router` | how experts are chosen and gates computed |
    | `clip_qkv` | bound on the magnitude of the numbers in queries, keys and values; None for no bound |
    | `attention_bias` | whether the four projections of attention have biases |

    `moezoo.models.config` describes the others.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    expert_mlp: int = 128
    experts: int = 16
    experts_per_token: int = 4
    router: Choice = dataclasses.field(default_factory=lambda: Choice(gates="scores"))
    clip_qkv: Positive | None = None
    attention_bias: Literal["none", "all"] = "none"
    rope_base: float = 1e4
    max_length: int = 4096
    norm_eps: float = 1e-5
    load_balance: float = 0.01
    load_balance_over: Literal["batch", "sequence"] = "batch"
    z_loss: float = 0.001
    init_std: float = 0.02
    tied_embeddings: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)


def kinds(c: OlmoeConfig) -> list[list[str]]:
    """Layers of one kind."""
    return [["moe"] * c.layers]


def make_block(kind: str, c: OlmoeConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    del kind
    for_attention, for_router, for_experts = jax.random.split(key, 3)
    out_std = (2 * c.layers) ** -0.5
    attention = Attention(
        c.embed,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=Rotary(c.head_dim, c.rope_base),
        norm_over="projection",
        norm_eps=c.norm_eps,
        biases=c.attention_bias,
        clip=c.clip_qkv,
        out_std=out_std,
        dtype=dtype,
        key=for_attention,
    )
    router = Router(c.embed, c.experts, c.experts_per_token, c.router, dtype=dtype, key=for_router)
    experts = Experts(c.experts, c.embed, c.expert_mlp, out_std=out_std, dtype=dtype, key=for_experts)
    norms = [RMSNorm(c.embed, c.norm_eps, dtype=dtype) for _ in range(2)]
    return Block(norms[0], attention, norms[1], MoE(router, experts))


# Hugging Face folders: path of our array -> tensor name, and our setting -> key of config.json.
MODEL_TYPES = {"olmoe": "norms over all queries and all keys, softmax router; OLMoE"}
WITHOUT_EFFECT = {"olmoe": ()}
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
    "feed_forward.router.weight": f"{_MLP}.gate.weight",
    "feed_forward.experts.gate": f"{_MLP}.experts.{{expert}}.gate_proj.weight",
    "feed_forward.experts.up": f"{_MLP}.experts.{{expert}}.up_proj.weight",
    "feed_forward.experts.down": f"{_MLP}.experts.{{expert}}.down_proj.weight",
}
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"expert_mlp": "intermediate_size", "clip_qkv": "clip_qkv"}
_PLAIN |= {"load_balance": "router_aux_loss_coef"}
KEYS = _PLAIN | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "experts": "num_experts"}
KEYS |= {"rope_base": "rope_theta"}
keys, layer_names = always(KEYS), always(LAYER_NAMES)
# For missing keys.
_DEFAULTS = {"load_balance": 0.01, "max_length": 4096, "init_std": 0.02, "clip_qkv": None}


def config_from_hub(mapping: Mapping[str, Any]) -> OlmoeConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config = ConfigJson(mapping)
    settings = config.read_all(OlmoeConfig, _PLAIN, _DEFAULTS)
    settings |= {
        # transformers reads both names, and its newer versions write the first.
        "experts": config.read_either(("num_local_experts", "num_experts"), int),
        "router": {"gates": "renormalised" if config.read("norm_topk_prob", bool, False) else "scores"},
        "attention_bias": "all" if config.read("attention_bias", bool, False) else "none",
        "kv_heads": config.read("num_key_value_heads", int | None, None) or settings["heads"],
        "head_dim": settings["embed"] // settings["heads"],
        "rope_base": read_rope(config, settings["max_length"]).base,
    }
    config.refuse_others({"head_dim": (settings["head_dim"],)})
    return convert(OlmoeConfig, settings, "model")


def config_to_hub(config: OlmoeConfig) -> dict[str, Any]:
    """Return the keys that transformers reads. Raises `UserError` for settings that it does not have."""
    c, router = config, config.router
    if c.heads * c.head_dim != c.embed:
        raise UserError(
            f"model.head_dim={c.head_dim} times model.heads={c.heads} is not model.embed={c.embed}; OLMoE in "
            "transformers needs them equal"
        )
    # With one group, `group_score` has no effect; `bias_rate` has none without a choice bias.
    if router != Choice(gates=router.gates, bias_rate=router.bias_rate, group_score=router.group_score):
        raise UserError(
            f"model.router has score={router.score}, groups={router.groups}, scale={router.scale}, "
            f"choice_bias={router.choice_bias}, least_sum={router.least_sum}; olmoe in transformers has only softmax, "
            "1, 1.0, none and 0"
        )
    return write_keys(c, _PLAIN | {ours: KEYS[ours] for ours in ("kv_heads", "experts")}) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "norm_topk_prob": router.gates == "renormalised",
        "attention_bias": c.attention_bias == "all",
        "rope_parameters": write_rope(c.rope_base, Yarn()),
        "hidden_act": "silu",
    }
