"""Reading a Hugging Face config.json: what the families' files share."""

from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError


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
