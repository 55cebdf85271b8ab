"""The names of released sizes: entries of the group `model` that also set keys of other groups."""

from moezoo.config.overrides import CONF, PACKAGE, groups

_TEXTS = {name: (CONF / "model" / f"{name}.yaml").read_text() for name in groups()["model"]}
PRESETS = [name for name, text in _TEXTS.items() if text.startswith(PACKAGE)]
