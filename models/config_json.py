"""Reading and writing a Hugging Face config.json: the functions that several families use."""

import typing
from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.errors import UserError
from moezoo.moe.router import Choice
from moezoo.nn.yarn import Yarn


def require(mapping: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`. Raises `UserError` where it is missing or null."""
    if mapping.get(key) is None:
        raise UserError(f"config.json: {key} is missing or null; the folder has another kind of model, or is damaged")
    return mapping[key]


def get_or(mapping: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value of `key`, or `default` where it is missing or null."""
    return default if mapping.get(key) is None else mapping[key]


def check_activation(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the MLPs are SwiGLU."""
    if mapping.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"config.json: hidden_act is {mapping['hidden_act']}; this family supports only silu")


def read_rope(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, which are under `rope_scaling`, else `rope_parameters`, or at the top level."""
    rope = dict(mapping.get("rope_scaling") or mapping.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    for key in ("rope_theta", "original_max_position_embeddings"):
        if mapping.get(key) is not None and (key != "rope_theta" or key not in rope):
            rope[key] = mapping[key]
    return rope


def read_keys(mapping: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of required keys, by our names. `keys` maps our names to the keys of config.json."""
    return {ours: require(mapping, theirs) for ours, theirs in keys.items()}


def write_keys(config: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by the keys of config.json. Values get their declared type: transformers refuses 1 for 1.0."""
    kinds = typing.get_type_hints(type(config))
    return {theirs: kinds[ours](getattr(config, ours)) for ours, theirs in keys.items()}


def read_flag(mapping: Mapping[str, Any], key: str) -> bool:
    """Return a boolean; missing or null is False. Raises `UserError` for any other value."""
    return convert(bool, get_or(mapping, key, False), f"config.json: {key}")


def refuse_tied(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` where embedding and unembedding are one matrix."""
    if read_flag(mapping, "tie_word_embeddings"):
        raise UserError("config.json: tie_word_embeddings is true; this family supports only false")


def check_default_rope(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` where rotary positions have an extension."""
    if (kind := read_rope(mapping)["rope_type"]) != "default":
        raise UserError(f"config.json: rope_type {kind}; this family supports only default")


def read_yarn(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the YaRN settings, {} for none. Raises `UserError` for another extension."""
    rope = read_rope(mapping)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise UserError(f"config.json: rope_type {kind}; this family supports default and yarn")
    for key, usual in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, usual) not in (usual, None):
            raise UserError(f"config.json: {key}={rope[key]} with rope_type {kind}; this family does not support it")
    if kind == "default":
        return {}
    # transformers reads folders without one of the two keys in this way.
    length = get_or(rope, "original_max_position_embeddings", mapping.get("max_position_embeddings"))
    rope = {**rope, "original_max_position_embeddings": length}
    if rope.get("factor") is None:
        rope["factor"] = require(mapping, "max_position_embeddings") / require(rope, "original_max_position_embeddings")
    return {
        "factor": rope["factor"],
        "length": require(rope, "original_max_position_embeddings"),
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 0,
        "mscale_all": rope.get("mscale_all_dim") or 0,
    }


def write_rope(base: float, yarn: Yarn) -> dict[str, Any]:
    """Return the rotary settings for a config.json."""
    if yarn.factor == 1:
        return {"rope_type": "default", "rope_theta": base}
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all,
    }


def read_grouped(mapping: Mapping[str, Any], keys: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a family with grouped-query attention and a softmax router.

    `keys` maps our names to the keys of config.json; `defaults` has values for keys that are missing or null. Raises
    `UserError` for settings that these families do not have.
    """
    refuse_tied(mapping)
    check_activation(mapping)
    found = dict(defaults) | {key: value for key, value in mapping.items() if value is not None}
    # transformers reads both names, and its newer versions write the first.
    found["num_experts"] = found.get("num_local_experts", found.get("num_experts"))
    return read_keys(found, keys) | {
        "router": {"gates": "renormalised" if read_flag(mapping, "norm_topk_prob") else "scores"},
        "attention_bias": "all" if read_flag(mapping, "attention_bias") else "none",
        "rope_base": get_or(read_rope(mapping), "rope_theta", 1e4),
    }


def write_grouped(config: Any, keys: Mapping[str, str], model_type: str, architecture: str) -> dict[str, Any]:
    """Return the keys of config.json for `model_type`. Raises `UserError` for a router that transformers lacks."""
    router: Choice = config.router
    # With one group, `group_score` has no effect; `bias_rate` has none without a choice bias.
    if router != Choice(gates=router.gates, bias_rate=router.bias_rate, group_score=router.group_score):
        raise UserError(
            f"model.router has score={router.score}, groups={router.groups}, scale={router.scale}, "
            f"choice_bias={router.choice_bias}; {model_type} in transformers has only softmax, 1, 1.0 and none"
        )
    return write_keys(config, keys) | {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "norm_topk_prob": router.gates == "renormalised",
        "attention_bias": config.attention_bias == "all",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def nothing_unused(left: set[str], expected: set[str]) -> set[str]:
    """`find_unused` of families that use every tensor of their folders."""
    del left, expected
    return set()
