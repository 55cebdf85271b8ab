"""What a run folder keeps of the files that make its tokens, so that the run is read wherever these files are later.

`tokenizers/1` has tokenizer.json, `template.jinja` or `template.json` if `data.template` is set, and what stands beside
them of chat templates. Sources of a mixture with others have theirs in `tokenizers/2`, and so on.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.data.chat_template import CONFIG, OTHERS, TEMPLATE, TOKENS
from moezoo.remote import is_url

COPIES = "tokenizers"
# The settings that name these files.
COPIED = re.compile(r"data(\.sources\.\w+)?\.(tokenizer|template)")


class _Named(NamedTuple):
    """The files that a source names."""

    tokenizer: str | None
    template: str | None

    def copies(self, folder: Path) -> dict[str, Path]:
        """Return where in `folder` the copies are, by setting."""
        found = {} if self.tokenizer is None else {"tokenizer": folder / "tokenizer.json"}
        if self.template is not None:
            found["template"] = folder / (
                "template.json" if Path(self.template).suffix == ".json" else "template.jinja"
            )
        return found


def list_copies(mapping: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that a run with the configuration `mapping` keeps, by their places in its folder.

    Files that do not exist are left out: where data need them, reading the data refuses that.
    """
    found = {}
    for number, named in enumerate(dict.fromkeys(_named(section) for section in _sections(mapping)), 1):
        folder = Path(COPIES) / str(number)
        own = {field: Path(os.path.expanduser(getattr(named, field))) for field in named.copies(folder)}
        files = {copy: own[field] for field, copy in named.copies(folder).items()}
        if own:
            beside = next(iter(own.values())).parent  # special tokens are beside the tokenizer, if there is one
            others = [path.relative_to(beside) for path in sorted((beside / OTHERS).glob("*.jinja"))]
            files |= {folder / name: beside / name for name in (CONFIG, TOKENS, TEMPLATE, *others)}
        found |= {str(copy): file for copy, file in files.items() if file.is_file()}
    return found


def with_copies(mapping: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the configuration of the run in `run_dir` with its copies in place of the files that it named.

    Runs of older versions have none, and nothing changes. Nor does it for a run in an object store, where no
    tokenizer is opened.
    """
    if is_url(run_dir):
        return dict(mapping)
    numbers: dict[_Named, int] = {}

    def put(section: Mapping[str, Any]) -> dict[str, Any]:
        named = _named(section)
        copies = named.copies(run_dir.resolve() / COPIES / str(numbers.setdefault(named, len(numbers) + 1)))
        return {**section, **{field: str(copy) for field, copy in copies.items() if copy.is_file()}}

    data = mapping.get("data")
    if not isinstance(data, Mapping):
        return dict(mapping)
    if isinstance(sources := data.get("sources"), Mapping):
        parts = {name: put(part) if isinstance(part, Mapping) else part for name, part in sources.items()}
        return {**mapping, "data": {**data, "sources": parts}}
    return {**mapping, "data": put(data)}


def _sections(mapping: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sections of sources: the data, or those of a mixture, in their order."""
    data = mapping["data"]
    sources = data.get("sources") if isinstance(data, Mapping) else None
    for section in sources.values() if isinstance(sources, Mapping) else [data]:
        if isinstance(section, Mapping):
            yield section


def _named(section: Mapping[str, Any]) -> _Named:
    found = (section.get("tokenizer"), section.get("template"))
    return _Named(*(value if isinstance(value, str) else None for value in found))
