"""gpt-oss's configuration from and to the config.json of a Hugging Face folder, and its tensor names."""

from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.errors import UserError
from moezoo.models.base import Alternating
from moezoo.models.config_json import (
    COMMON_KEYS,
    YARN_KEYS,
    ConfigJson,
    always,
    nothing_unused,
    read_rope,
    write_keys,
    write_rope,
)
from moezoo.models.gpt_oss import GptOssConfig, kinds

MODEL_TYPES = {"gpt_oss": "sinks, windows in every second layer, experts with biases; gpt-oss-20b and 120b"}
find_unused = nothing_unused
# Path of our array -> tensor name.
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.norm.scale": "model.norm.weight",
    "unembedding.weight": "lm_head.weight",
}
_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_EXPERTS = "feed_forward.experts"
_LAYER_NAMES = {
    "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "attention.query": f"{_ATTENTION}.q_proj.weight",
    "attention.key": f"{_ATTENTION}.k_proj.weight",
    "attention.value": f"{_ATTENTION}.v_proj.weight",
    "attention.out": f"{_ATTENTION}.o_proj.weight",
    "attention.query_bias": f"{_ATTENTION}.q_proj.bias",
    "attention.key_bias": f"{_ATTENTION}.k_proj.bias",
    "attention.value_bias": f"{_ATTENTION}.v_proj.bias",
    "attention.out_bias": f"{_ATTENTION}.o_proj.bias",
    "attention.sinks": f"{_ATTENTION}.sinks",
    "feed_forward_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "feed_forward.router.weight": f"{_MLP}.router.weight",
    "feed_forward.router.bias": f"{_MLP}.router.bias",
    (f"{_EXPERTS}.gate", f"{_EXPERTS}.up"): Alternating(f"{_MLP}.experts.gate_up_proj"),
    (f"{_EXPERTS}.gate_bias", f"{_EXPERTS}.up_bias"): Alternating(f"{_MLP}.experts.gate_up_proj_bias"),
    f"{_EXPERTS}.down": Alternating(f"{_MLP}.experts.down_proj"),
    f"{_EXPERTS}.down_bias": Alternating(f"{_MLP}.experts.down_proj_bias"),
}
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"expert_mlp": "intermediate_size", "load_balance": "router_aux_loss_coef"}
_PLAIN |= {"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"}
_PLAIN |= {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_WRITTEN = _PLAIN | {"experts": "num_local_experts"}
_KEYS = _WRITTEN | {"window": "sliding_window", "full_layers": "layer_types", "rope_base": "rope_theta"} | YARN_KEYS
keys, layer_names = always(_KEYS), always(_LAYER_NAMES)
# For missing keys.
_DEFAULTS = {"max_length": 131072, "init_std": 0.02, "load_balance": 0.001, "norm_eps": 1e-5}
_DEFAULTS |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "kv_heads": 8, "head_dim": 64}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
# A second name of a length, which transformers does not read.
WITHOUT_EFFECT = {"gpt_oss": ("initial_context_length",)}
_WINDOW, _ALL = "sliding_attention", "full_attention"


def config_from_hub(mapping: Mapping[str, Any]) -> GptOssConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    if not mapping.get("rope_scaling") and not mapping.get("rope_parameters"):
        mapping = {**mapping, "rope_parameters": _YARN}
    config = ConfigJson(mapping)
    settings = config.read_all(GptOssConfig, _PLAIN, _DEFAULTS)
    rope = read_rope(config, settings["max_length"], ("default", "yarn"), base=150000.0)
    settings |= _read_windows(config, settings["layers"])
    settings |= {
        "experts": config.read_either(("num_local_experts", "num_experts"), int),
        "attention_bias": "all" if config.read("attention_bias", bool, True) else "none",
        "rope_base": rope.base,
        "yarn": rope.yarn,
    }
    # A second name of a setting. transformers does not read it.
    config.refuse_others({"experts_per_token": (settings["experts_per_token"],)}, WITHOUT_EFFECT["gpt_oss"])
    return convert(GptOssConfig, settings, "model")


def _read_windows(config: ConfigJson, layers: int) -> dict[str, Any]:
    """Return the window and the layers without one."""
    window = config.read("sliding_window", int | None, 128)
    types = config.read("layer_types", tuple[str, ...] | None, None)
    if types is None:
        types = tuple(_ALL if i % 2 else _WINDOW for i in range(layers))
    if unknown := sorted(set(types) - {_WINDOW, _ALL}):
        raise UserError(f"config.json: layer_types names '{unknown[0]}': expected {_WINDOW} or {_ALL}")
    if len(types) != layers:
        raise UserError(
            f"config.json: layer_types names {len(types)} layers, but num_hidden_layers={layers}; one of them is wrong"
        )
    if window is None and _WINDOW in types:
        raise UserError(
            f"config.json: sliding_window=null, but layer {types.index(_WINDOW)} of layer_types is {_WINDOW}; "
            "write the size of the window"
        )
    full = tuple(i for i, kind in enumerate(types) if kind == _ALL)
    if len(full) == layers:
        return {"window": None}
    return {"window": window, "full_layers": None if full == tuple(range(1, layers, 2)) else full}


def config_to_hub(config: GptOssConfig) -> dict[str, Any]:
    """Return the keys that transformers reads."""
    return write_keys(config, _WRITTEN) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": config.attention_bias == "all",
        # transformers makes a mask of the window even where no layer uses it.
        "sliding_window": config.window or config.max_length,
        "layer_types": [_ALL if kind == "all" else _WINDOW for kind in kinds(config)[0]],
        "rope_parameters": write_rope(config.rope_base, config.yarn),
        "hidden_act": "silu",
    }
