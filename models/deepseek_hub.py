"""DeepSeek's configuration from and to the config.json of a Hugging Face folder."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from moezoo.convert import convert
from moezoo.errors import UserError
from moezoo.models.config_json import COMMON_KEYS, YARN_KEYS, ConfigJson, always, read_rope, write_keys, write_rope
from moezoo.models.deepseek import LAYER_NAMES, DeepSeekConfig
from moezoo.models.deepseek import NAMES as NAMES

# The type alone gives the router: softmax for deepseek_v2, sigmoid with a choice bias for the others.
MODEL_TYPES = {
    "deepseek_v2": "softmax router; DeepSeek-V2 and V2-Lite",
    "deepseek_v3": "sigmoid router with a choice bias; DeepSeek-V3 and R1, Kimi K2, Moonlight",
    "kimi_k2": "as deepseek_v3",
}
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope_dim": "qk_nope_head_dim"}
_PLAIN |= {"rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
_PLAIN |= {"mlp": "intermediate_size", "expert_mlp": "moe_intermediate_size"}
KEYS = _PLAIN | {"dense_layers": "first_k_dense_replace", "experts": "n_routed_experts"}
KEYS |= {"shared_experts": "n_shared_experts", "rope_base": "rope_theta"}
KEYS |= {"router.groups": "n_group", "router.kept_groups": "topk_group", "router.scale": "routed_scaling_factor"}
KEYS |= YARN_KEYS
keys, layer_names = always(KEYS), always(LAYER_NAMES)
_ONLY: Mapping[str, Any] = {"attention_bias": (False,), "moe_layer_freq": (1,)}
# Coefficients of routing losses, which transformers does not have; how experts were split; further layers, which are
# not loaded; sizes that follow from others.
_WITHOUT_EFFECT = ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")
_WITHOUT_EFFECT += ("head_dim", "qk_head_dim")


# Tensors that only layers for multi-token prediction have (DeepSeek-V3, section 2.2).
_NEXT_TOKEN = ("eh_proj", "enorm", "hnorm", "shared_head")


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of the extra layers for multi-token prediction."""
    layer_of = {name: m[1] for name in left | expected if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    known = {layer_of[name] for name in expected if name in layer_of}
    further = {layer_of[name] for name in left if name in layer_of and name.split(".")[3] in _NEXT_TOKEN} - known
    return {name: "multi-token prediction" for name in left if layer_of.get(name) in further}


def config_from_hub(mapping: Mapping[str, Any]) -> DeepSeekConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config, third = ConfigJson(mapping), mapping["model_type"] != "deepseek_v2"
    defaults = {"init_std": 0.02, "q_lora": None, "max_length": 4096 if third else 2048}
    settings = config.read_all(DeepSeekConfig, _PLAIN, defaults)
    rope = read_rope(config, settings["max_length"], ("default", "yarn"))
    if third:
        groups, kept = config.read("n_group", int, 8), config.read("topk_group", int, 4)
        normalised, interleaved = config.read("norm_topk_prob", bool, True), config.read("rope_interleave", bool, True)
        only = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    else:
        groups, kept = (config.read(key, int | None, None) for key in ("n_group", "topk_group"))
        if config.read("topk_method", Literal["greedy", "group_limited_greedy"], "greedy") == "greedy":
            groups = kept = 1
        normalised, interleaved = False, True
        config.read("rope_interleave", bool, True)  # without effect, as in transformers
        only = {"scoring_func": ("softmax",), "norm_topk_prob": (False,)}
    settings |= {
        "dense_layers": config.read("first_k_dense_replace", int, least=0),
        "experts": config.read_either(("n_routed_experts", "num_local_experts", "num_experts"), int),
        "shared_experts": config.read("n_shared_experts", int | None, 0, least=0) or 0,
        "router": {
            "score": "sigmoid" if third else "softmax",
            "groups": groups,
            "kept_groups": kept,
            "group_score": "sum_of_top2" if third else "max",
            "gates": "renormalised" if normalised else "scores",
            "scale": config.read("routed_scaling_factor", float, 2.5 if third else 1.0),
            "choice_bias": "learned" if third else "none",
        },
        "rope_base": rope.base,
        "rope_pairs": "interleaved" if interleaved else "halves",
        "yarn": rope.yarn,
    }
    # Each head has keys and values of its own, made of the latent.
    only |= {"num_key_value_heads": (settings["heads"],)}
    config.refuse_others(_ONLY | only, _WITHOUT_EFFECT)
    return convert(DeepSeekConfig, settings, "model")


def config_to_hub(config: DeepSeekConfig) -> dict[str, Any]:
    """Return the keys that transformers reads. Raises `UserError` for a router that is neither V2's nor V3's."""
    c, r = config, config.router
    third = r.score == "sigmoid"
    if third != (r.choice_bias == "learned") or (r.groups > 1 and third != (r.group_score == "sum_of_top2")):
        raise UserError(
            f"model.router.score={r.score} with model.router.choice_bias={r.choice_bias} and "
            f"model.router.group_score={r.group_score} is neither DeepSeek-V2's router nor DeepSeek-V3's, and "
            "transformers has no other"
        )
    if not third and (r.gates == "renormalised" or c.rope_pairs == "halves"):
        raise UserError(
            f"model.router.gates={r.gates} and model.rope_pairs={c.rope_pairs}: DeepSeek-V2 in transformers has only "
            "scores and interleaved"
        )
    name = "DeepseekV3" if third else "DeepseekV2"
    plain = ("dense_layers", "experts", "shared_experts")
    mapping = write_keys(c, _PLAIN | {ours: KEYS[ours] for ours in plain}) | {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": c.heads,
        "n_group": r.groups,
        "topk_group": r.kept_groups,
        "norm_topk_prob": r.gates == "renormalised",
        "routed_scaling_factor": r.scale,
        "rope_parameters": write_rope(c.rope_base, c.yarn),
        "rope_interleave": c.rope_pairs == "interleaved",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    if not third:
        mapping["topk_method"] = "group_limited_greedy" if r.groups > 1 else "greedy"
    return mapping
