"""`docs/families.md`, made from the registry of families and from the folder `conf/model`.

`python tests/models/families_page.py` rewrites the file.
"""

import importlib
import textwrap
from collections.abc import Iterable
from pathlib import Path

from moezoo.config.overrides import CONF, PACKAGE, read_yaml
from moezoo.hub.nested import NESTED
from moezoo.models import FAMILIES
from moezoo.models.config_json import WITHOUT_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_HEAD = """
# Which models are there, and how do they differ?

A **family** is a file of `models/`: a configuration, layers, and the names of a Hugging Face folder. `model=NAME` takes
a laptop size, which trains in minutes on eight virtual CPU devices, or a released size. A Hugging Face folder is read
by its `model_type` in `config.json`; some model types have no size under `model=`. The class of a family's
configuration describes its settings, such as `moezoo.models.GroupedConfig`.

Of a model for images ({nested}) the text model is read, which is in `text_config` of its `config.json`. Active
parameters include the whole embedding, of which a token reads one row.
`python tests/models/families_page.py` makes this page.
"""
_LISTED = """
## What is ignored

### Tensors

Tensors that no parameter has are refused by name, except these, which `moezoo.from_pretrained` names in a warning: the
layers of multi-token prediction, which follow the last layer; the index of sparse attention; and in a folder of a model
for images, everything outside the text model. `moezoo.save_pretrained(model, FOLDER, like=SOURCE)` carries them.

### Keys of config.json

A key that moezoo does not know is refused by name, because it may change what the model computes.
These keys are known to change nothing that moezoo computes. Every model type ignores
"""


def render() -> str:
    """Return the page."""
    lines = [_HEAD.strip().format(nested=" and ".join(f"`{kind}`" for kind in sorted(NESTED))), ""]
    for name, family in FAMILIES.items():
        module = family.config.__module__.rpartition(".")[2]
        entries = {path.stem: path for path in sorted((CONF / "model").glob("*.yaml"))}
        mine = {entry: path for entry, path in entries.items() if _family_of(path) == name}
        laptop = [entry for entry, path in mine.items() if not path.read_text().startswith(PACKAGE)]
        lines += [f"## {name}", "", _wrap(f"{_about(family.config.__module__)} File: `models/{module}.py`."), ""]
        lines += ["| `model_type` | what distinguishes it |", "|---|---|"]
        lines += [f"| `{kind}` | {text} |" for kind, text in family.hub.about.items()]
        if family.dense is not None:
            others = "; ".join(f"`{kind}`, {text}" for kind, text in family.dense.about.items())
            lines += [
                "",
                _wrap(f"Dense folders that [upcycling](folders.md#upcycling) makes such models of: {others}."),
            ]
        lines += ["", f"Laptop: {_code(laptop)}. As released:"]
        lines += ["", "| `model=` | size |", "|---|---|"]
        lines += [f"| `{entry}` | {_size(path)} |" for entry, path in mine.items() if entry not in laptop]
        lines.append("")
    lines += [_LISTED.strip(), _wrap(_code(sorted(WITHOUT_EFFECT)) + "."), "", "Besides these:", ""]
    for family in FAMILIES.values():
        dense = {} if family.dense is None else family.dense.types
        for kind, each in (*family.hub.types.items(), *dense.items()):
            keys = each.without_effect.split()
            lines += [_wrap(f"- `{kind}`: {_code(sorted(keys))}.", "  ")] * bool(keys)
    return "\n".join(lines) + "\n"


def _family_of(path: Path) -> str:
    mapping = read_yaml(path)
    return mapping.get("family") or mapping["model"]["family"]


def _size(path: Path) -> str:
    """Return the sentence about sizes in the comment of an entry."""
    return path.read_text().splitlines()[1].removeprefix("# ").removesuffix(".")


def _about(module: str) -> str:
    """Return the first paragraph of a module's docstring."""
    text = importlib.import_module(module).__doc__ or ""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(render())
