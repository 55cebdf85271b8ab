"""What a run folder keeps of the files that make its tokens, so that the run is read wherever these files are later.

`tokenizers/1` has tokenizer.json, `template.jinja` or `template.json` if `data.template` is set, and what stands beside
them of chat templates. Sources of a mixture with others have theirs in `tokenizers/2`, and so on.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moezoo.data.chat_template import CONFIG, OTHERS, TEMPLATE, TOKENS
from moezoo.host.remote import is_url
from moezoo.typed import get, put

COPIES = "tokenizers"
# The settings that name these files.
COPIED = re.compile(r"data(\.sources\.\w+)?\.(tokenizer|template)")


def list_copies(mapping: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that a run with the configuration `mapping` keeps, by their places in its folder.

    Files that do not exist are left out: where data need them, reading the data refuses that.
    """
    files: dict[Path, Path] = {}
    for file, copy in _copies(mapping).values():
        if copy.parent not in {place.parent for place in files}:  # of the tokenizer, if there is one: it comes first
            others = [path.relative_to(file.parent) for path in sorted((file.parent / OTHERS).glob("*.jinja"))]
            files |= {copy.parent / name: file.parent / name for name in (CONFIG, TOKENS, TEMPLATE, *others)}
        files[copy] = file
    return {str(copy): file for copy, file in files.items() if file.is_file()}


def with_copies(mapping: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the configuration of the run in `run_dir` with its copies in place of the files that it named.

    Runs of older versions have none, and nothing changes. Nor does it for a run in an object store, where no
    tokenizer is opened.
    """
    mapping = dict(mapping)
    for key, (_, copy) in {} if is_url(run_dir) else _copies(mapping).items():
        if (path := run_dir.resolve() / copy).is_file():
            mapping = put(mapping, key, str(path))
    return mapping


def _copies(mapping: Mapping[str, Any]) -> dict[str, tuple[Path, Path]]:
    """Return the files that sources name, by their settings, and where in the folder of a run their copies are."""
    sources, numbers, found = get(mapping, "data.sources"), {}, {}
    for section in [f"data.sources.{name}" for name in sources] if isinstance(sources, Mapping) else ["data"]:
        settings = [(field, get(mapping, f"{section}.{field}")) for field in ("tokenizer", "template")]
        named = [(field, file) for field, file in settings if isinstance(file, str)]
        number = numbers.setdefault(tuple(named), len(numbers) + 1)
        for field, file in named:
            suffix = ".json" if field == "tokenizer" or Path(file).suffix == ".json" else ".jinja"
            copy = Path(COPIES, str(number), f"{field}{suffix}")
            found[f"{section}.{field}"] = Path(os.path.expanduser(file)), copy
    return found
