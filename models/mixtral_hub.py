"""Mixtral's configuration from and to the config.json of a Hugging Face folder."""

from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.models.config_json import (
    check_activation,
    check_default_rope,
    get_or,
    nothing_unused,
    read_rope,
    refuse_tied,
    require,
)
from moezoo.models.mixtral import LAYER_NAMES as LAYER_NAMES
from moezoo.models.mixtral import NAMES as NAMES
from moezoo.models.mixtral import MixtralConfig

MODEL_TYPES = ("mixtral",)
find_unused = nothing_unused


def config_from_hub(mapping: Mapping[str, Any]) -> MixtralConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    refuse_tied(mapping)
    check_activation(mapping)
    check_default_rope(mapping)
    rope = read_rope(mapping)
    heads = require(mapping, "num_attention_heads")
    settings = dict(
        vocab=require(mapping, "vocab_size"),
        embed=require(mapping, "hidden_size"),
        layers=require(mapping, "num_hidden_layers"),
        heads=heads,
        kv_heads=require(mapping, "num_key_value_heads"),
        head_dim=mapping.get("head_dim") or require(mapping, "hidden_size") // heads,
        expert_mlp=require(mapping, "intermediate_size"),
        experts=require(mapping, "num_local_experts"),
        experts_per_token=require(mapping, "num_experts_per_tok"),
        window=mapping.get("sliding_window"),
        rope_base=get_or(rope, "rope_theta", 1e6),
        max_length=mapping.get("max_position_embeddings") or 131072,
        norm_eps=require(mapping, "rms_norm_eps"),
        load_balance=get_or(mapping, "router_aux_loss_coef", 0.001),
        init_std=get_or(mapping, "initializer_range", 0.02),
    )
    return convert(MixtralConfig, settings, "config.json: model")


def config_to_hub(config: MixtralConfig) -> dict[str, Any]:
    """Return the keys that transformers reads."""
    c = config
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.expert_mlp,
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "sliding_window": c.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_eps,
        "router_aux_loss_coef": c.load_balance,
        "initializer_range": c.init_std,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
