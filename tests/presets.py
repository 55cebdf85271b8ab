"""The names of released sizes: entries of the group `model` that also set keys of other groups."""

import re

from moezoo.config.overrides import CONF, PACKAGE, groups

_TEXTS = {name: (CONF / "model" / f"{name}.yaml").read_text() for name in groups()["model"]}
PRESETS = [name for name, text in _TEXTS.items() if text.startswith(PACKAGE)]
# The last of each family.
ONE_OF_EACH_FAMILY = list({re.findall(r"^  family: (\w+)", _TEXTS[name], re.M)[0]: name for name in PRESETS}.values())
