"""The table `quantization_config` as compressed-tensors writes it, of which several formats are a part."""

from collections.abc import Mapping
from typing import Any

from moezoo.hub.formats.base import CONFIG, refuse
from moezoo.models.config_json import ConfigJson
from moezoo.typed import show

METHOD = "compressed-tensors"


def read_weights(
    config: ConfigJson, kind: str, fixed: Mapping[str, Any], ignored: tuple[str, ...] = ()
) -> list[ConfigJson] | None:
    """Return the table `weights` of each of the `config_groups`; None where the table is of another format.

    Args:
        config: The table.
        kind: Its `format`.
        fixed: The keys of `weights` that the format has, and their values.
        ignored: The keys of a group that change nothing where weights are read.

    Raises:
        UserError: Another scheme.
    """
    if config.get("quant_method") != METHOD or config.read("format", str) != kind:
        return None
    for key in ("quantization_status", "global_compression_ratio"):
        config.get(key)
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise refuse(f".{key}={show(config.get(key))[:80]}")
    groups, found = config.get("config_groups"), list[ConfigJson]()
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        where, weights = f".config_groups.{show(name)[:80]}", group.get("weights") if isinstance(group, Mapping) else 0
        if not isinstance(weights, Mapping):
            raise refuse(f"{where} has no weights")
        for key, value in fixed.items():
            if weights.get(key) != value:
                raise refuse(f"{where}.weights.{key}={show(weights.get(key))[:80]}")
        for key in {"input_activations", "output_activations"}.difference(ignored):
            if group.get(key):
                raise refuse(f"{where}.{key}={show(group[key])[:80]}")
        found.append(ConfigJson(weights, f"{CONFIG}{where}.weights."))
        for key in fixed:
            found[-1].get(key)
    config.refuse_others({})
    return found


def write_table(kind: str, weights: Mapping[str, Any], modules: list[str]) -> dict[str, Any]:
    """Return the table of a format, beside `modules` in numbers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": modules,
    }
