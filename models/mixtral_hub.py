"""Mixtral's configuration from and to the config.json of a Hugging Face folder."""

from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.models.config_json import (
    COMMON_KEYS,
    ConfigJson,
    always,
    nothing_unused,
    read_rope,
    write_keys,
    write_rope,
)
from moezoo.models.mixtral import LAYER_NAMES, MixtralConfig
from moezoo.models.mixtral import NAMES as NAMES
from moezoo.nn.yarn import Yarn

MODEL_TYPES = {"mixtral": "softmax router; Mixtral 8x7B and 8x22B"}
WITHOUT_EFFECT = {"mixtral": ()}
find_unused = nothing_unused
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"expert_mlp": "intermediate_size", "window": "sliding_window"}
_PLAIN |= {"load_balance": "router_aux_loss_coef"}
KEYS = _PLAIN | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "experts": "num_local_experts"}
KEYS |= {"rope_base": "rope_theta"}
keys, layer_names = always(KEYS), always(LAYER_NAMES)
# For missing keys.
_DEFAULTS = {"window": None, "max_length": 131072, "init_std": 0.02, "load_balance": 0.001}
_ONLY = {"attention_bias": (False,), "router_jitter_noise": (0,)}


def config_from_hub(mapping: Mapping[str, Any]) -> MixtralConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config = ConfigJson(mapping)
    settings = config.read_all(MixtralConfig, _PLAIN, _DEFAULTS)
    settings |= {
        "kv_heads": config.read("num_key_value_heads", int | None) or settings["heads"],
        "head_dim": config.read("head_dim", int | None, None) or settings["embed"] // settings["heads"],
        "experts": config.read_either(("num_local_experts", "num_experts"), int),
        "rope_base": read_rope(config, settings["max_length"], base=1e6).base,
    }
    config.refuse_others(_ONLY)
    return convert(MixtralConfig, settings, "model")


def config_to_hub(config: MixtralConfig) -> dict[str, Any]:
    """Return the keys that transformers reads."""
    keys = {ours: key for ours, key in KEYS.items() if ours != "rope_base"}
    return write_keys(config, keys) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_parameters": write_rope(config.rope_base, Yarn()),
        "hidden_act": "silu",
    }
