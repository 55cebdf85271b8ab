"""The names of released sizes: entries of the group `model` that also set keys of other groups."""

from moezoo.config.overrides import CONF, PACKAGE, groups

PRESETS = [n for n in groups()["model"] if (CONF / "model" / f"{n}.yaml").read_text().startswith(PACKAGE)]
