"""What is known of a config.json whose `model_type` moezoo does not read: its keys beside those of the nearest type."""

from collections.abc import Mapping
from typing import Any

from moezoo.hub.other_names import TEXT
from moezoo.models import Family, families
from moezoo.models.config_json import cut
from moezoo.models.hub import Key
from moezoo.typed import show

_ROOM = 120  # characters of each list
_MOST = 24  # of a value
PAGE = "docs/model_types.md of the repository"


def describe_type(mapping: Mapping[str, Any]) -> str | None:
    """Return how a config.json differs from those of the type that has most of its keys.

    It names what is there and not there, and proposes no change: with another `model_type` the same weights would
    compute something else. Of a model around a text model, the keys of this are compared.

    Args:
        mapping: The config.json, or the text model's.

    Returns:
        The end of a message, or None where no key tells anything.
    """
    whose, inner = "its keys", mapping.get(TEXT)
    if isinstance(inner, Mapping) and inner:
        mapping, whose = inner, f"the keys of its {TEXT}"
    if not any(mapping.get(name) is not None for family in families() for name in _of_experts(family)):
        return f"moezoo finds no experts in {whose}, and runs mixtures of experts"
    types = ((family, kind) for family in families() for kind in family.hub.types)
    found = {kind: family.hub.differing(family.config, kind, mapping) for family, kind in types}
    nearest = min(found, key=lambda kind: (len(found[kind].others) + len(found[kind].missing), found[kind].absent))
    others, missing, _ = found[nearest]
    if len(others) + len(missing) >= len(mapping):
        return None
    unknown = [show(key)[:80] for key, _, valid in others if valid is None]
    values = [f"{show(key)[:80]}={show(value)[:_MOST]}" for key, value, valid in others if valid is not None]
    lists = {"but not": unknown, "has no": values, "needs": missing}
    parts = [f"{what} {cut(texts, _ROOM)}" for what, texts in lists.items() if texts]
    if not parts:
        return f"{nearest} knows all of {whose}, which does not make it the same model"
    return f"it is a model of its own: {nearest} knows most of {whose}, {', and '.join(parts)}"


def _of_experts(family: Family) -> set[str]:
    """Return the keys with numbers of experts."""
    entries = (t.settings.get(ours) for t in family.hub.types.values() for ours in ("experts", "experts_per_token"))
    return {name for entry in entries if isinstance(entry, Key) for name in entry.names.split()}
