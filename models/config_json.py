"""Reading a Hugging Face config.json: what the families' files share."""

import typing
from collections.abc import Mapping
from typing import Any

from moezoo.convert import convert
from moezoo.errors import UserError
from moezoo.moe.router import Choice
from moezoo.nn.yarn import Yarn


def require(mapping: Mapping[str, Any], key: str) -> Any:
    """A key of a config.json that must be there. Raises `UserError` when it is not."""
    if mapping.get(key) is None:
        raise UserError(f"config.json: {key} is missing or null; the folder is another kind of model's, or damaged")
    return mapping[key]


def get_or(mapping: Mapping[str, Any], key: str, default: Any) -> Any:
    """A key of a config.json; one that is missing, or null, means `default`."""
    return default if mapping.get(key) is None else mapping[key]


def check_activation(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` unless the MLPs are SwiGLU, as these families' are."""
    if mapping.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"config.json: hidden_act is {mapping['hidden_act']}; this family has silu alone")


def read_rope(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config.json, under the newer key or the two older ones, which count where both are there."""
    rope = dict(mapping.get("rope_scaling") or mapping.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    for key in ("rope_theta", "original_max_position_embeddings"):
        if mapping.get(key) is not None and (key != "rope_theta" or key not in rope):
            rope[key] = mapping[key]
    return rope


def read_keys(mapping: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """By our names, the numbers of a config.json that must be there; `keys` maps our names to its keys."""
    return {ours: require(mapping, theirs) for ours, theirs in keys.items()}


def write_keys(config: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The other way round; a number that may have a fraction is written with one, as transformers refuses 1 for 1.0."""
    kinds = typing.get_type_hints(type(config))
    return {theirs: kinds[ours](getattr(config, ours)) for ours, theirs in keys.items()}


def read_flag(mapping: Mapping[str, Any], key: str) -> bool:
    """A key of a config.json that is true or false; missing or null is false. Raises `UserError` for anything else."""
    return convert(bool, get_or(mapping, key, False), f"config.json: {key}")


def refuse_tied(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` where embedding and unembedding are one."""
    if read_flag(mapping, "tie_word_embeddings"):
        raise UserError("config.json: tie_word_embeddings is true; this family's embeddings are untied")


def check_default_rope(mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` where rotary positions are extended."""
    if (kind := read_rope(mapping)["rope_type"]) != "default":
        raise UserError(f"config.json: rope_type {kind}; this family has the default alone")


def read_yarn(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The YaRN settings of a config.json, {} for none. Raises `UserError` for another extension."""
    rope = read_rope(mapping)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise UserError(f"config.json: rope_type {kind}; this family has default and yarn")
    for key, usual in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, usual) not in (usual, None):
            raise UserError(f"config.json: {key}={rope[key]} with rope_type {kind}; this family does not have it")
    if kind == "default":
        return {}
    # As transformers reads a folder that leaves one of the two out.
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
    """Rotary settings for a config.json."""
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
    """Settings of a family with grouped attention and a softmax router: numbers by `keys`, router, base of positions.

    `defaults` stand for keys that are missing or null. Raises `UserError` for what such families do not have.
    """
    refuse_tied(mapping)
    check_activation(mapping)
    said = dict(defaults) | {key: value for key, value in mapping.items() if value is not None}
    # transformers takes this name for the other one, and writes it in its newer versions.
    said["num_experts"] = said.get("num_local_experts", said.get("num_experts"))
    return read_keys(said, keys) | {
        "router": {"gates": "renormalised" if read_flag(mapping, "norm_topk_prob") else "scores"},
        "attention_bias": "all" if read_flag(mapping, "attention_bias") else "none",
        "rope_base": get_or(read_rope(mapping), "rope_theta", 1e4),
    }


def write_grouped(config: Any, keys: Mapping[str, str], model_type: str, architecture: str) -> dict[str, Any]:
    """The other way round, for `model_type`. Raises `UserError` for a router that transformers does not have there."""
    router: Choice = config.router
    # Of one group, how it is scored does not matter.
    if router != Choice(gates=router.gates, bias_rate=router.bias_rate, group_score=router.group_score):
        raise UserError(
            f"model.router has score={router.score}, groups={router.groups}, scale={router.scale}, "
            f"choice_bias={router.choice_bias}; {model_type} in transformers has softmax, 1, 1.0 and none alone"
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
    """`find_unused` of families whose folders hold nothing that a model leaves alone."""
    del left, expected
    return set()
