"""DeepSeek's configuration from and to the config.json of a Hugging Face folder."""

import re
from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.errors import UserError
from moezoo.models.config_json import check_activation, get_or, read_rope, read_yarn, require, write_rope
from moezoo.models.deepseek import LAYER_NAMES as LAYER_NAMES
from moezoo.models.deepseek import NAMES as NAMES
from moezoo.models.deepseek import DeepSeekConfig

# The type alone gives the router: softmax for deepseek_v2, sigmoid with a choice bias for the others.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


# Tensors that only layers for multi-token prediction have (DeepSeek-V3, section 2.2).
_NEXT_TOKEN = ("eh_proj", "enorm", "hnorm", "shared_head")


def find_unused(left: set[str], expected: set[str]) -> set[str]:
    """Return the tensors of the extra layers for multi-token prediction."""
    layer_of = {name: m[1] for name in left | expected if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    known = {layer_of[name] for name in expected if name in layer_of}
    further = {layer_of[name] for name in left if name in layer_of and name.split(".")[3] in _NEXT_TOKEN} - known
    return {name for name in left if layer_of.get(name) in further}


def config_from_hub(mapping: Mapping[str, Any]) -> DeepSeekConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        if mapping.get(key):
            raise UserError(f"config.json: {key} is true; this family does not have it")
    sigmoid = mapping["model_type"] != "deepseek_v2"
    check_activation(mapping)
    method = mapping.get("topk_method") or "greedy"
    if not sigmoid and method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"config.json: topk_method {method}; this family reads greedy and group_limited_greedy")
    grouped = sigmoid or method == "group_limited_greedy"
    groups, kept = (8, 4) if sigmoid else (1, 1)  # for missing keys
    rope = read_rope(mapping)
    settings = dict(
        vocab=require(mapping, "vocab_size"),
        embed=require(mapping, "hidden_size"),
        layers=require(mapping, "num_hidden_layers"),
        dense_layers=require(mapping, "first_k_dense_replace"),
        heads=require(mapping, "num_attention_heads"),
        q_lora=mapping.get("q_lora_rank"),
        kv_lora=require(mapping, "kv_lora_rank"),
        nope_dim=require(mapping, "qk_nope_head_dim"),
        rope_dim=require(mapping, "qk_rope_head_dim"),
        value_dim=require(mapping, "v_head_dim"),
        mlp=require(mapping, "intermediate_size"),
        expert_mlp=require(mapping, "moe_intermediate_size"),
        experts=require(mapping, "n_routed_experts"),
        experts_per_token=require(mapping, "num_experts_per_tok"),
        shared_experts=mapping.get("n_shared_experts") or 0,
        router=dict(
            score="sigmoid" if sigmoid else "softmax",
            groups=(mapping.get("n_group") or groups) if grouped else 1,
            kept_groups=(mapping.get("topk_group") or kept) if grouped else 1,
            group_score="sum_of_top2" if sigmoid else "max",
            # transformers ignores this key for V2.
            gates="renormalised" if sigmoid and mapping.get("norm_topk_prob", True) else "scores",
            scale=get_or(mapping, "routed_scaling_factor", 2.5 if sigmoid else 1.0),
            choice_bias="learned" if sigmoid else "none",
        ),
        rope_base=get_or(rope, "rope_theta", 1e4),
        # Only V3 has this key.
        rope_pairs="interleaved" if mapping.get("rope_interleave", True) or not sigmoid else "halves",
        max_length=mapping.get("max_position_embeddings") or (4096 if sigmoid else 2048),
        norm_eps=require(mapping, "rms_norm_eps"),
        init_std=get_or(mapping, "initializer_range", 0.02),
        yarn=read_yarn(mapping),
    )
    return convert(DeepSeekConfig, settings, "config.json: model")


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
    mapping = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": c.layers,
        "first_k_dense_replace": c.dense_layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "q_lora_rank": c.q_lora,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope_dim,
        "qk_rope_head_dim": c.rope_dim,
        "v_head_dim": c.value_dim,
        "intermediate_size": c.mlp,
        "moe_intermediate_size": c.expert_mlp,
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "n_shared_experts": c.shared_experts,
        "n_group": r.groups,
        "topk_group": r.kept_groups,
        "norm_topk_prob": r.gates == "renormalised",
        "routed_scaling_factor": r.scale,
        "rope_parameters": write_rope(c.rope_base, c.yarn),
        "rope_interleave": c.rope_pairs == "interleaved",
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_eps,
        "initializer_range": c.init_std,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    if not third:
        mapping["topk_method"] = "group_limited_greedy" if r.groups > 1 else "greedy"
    return mapping
