"""What a folder that is given away says of other folders: a name on the Hub or a last name, never a path."""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from moezoo.errors import UserError
from moezoo.host.files import INFINITY, json_text, parse_json, read_bytes, read_json
from moezoo.hub.plan import Plan

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The folder of one version of a model in the Hub's cache.
_CACHED = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")
_HOMES = (Path("/home"), Path("/Users"))
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
# Keys that libraries fill with the folder or the file that they have read, on the machine where they did.
_PLACES = re.compile(r"\w*(name_or_path|_file|_dir|_path)")


class Named(NamedTuple):
    """A name that anybody may read: that on the Hub, or the last one of a folder, empty where that is a person's."""

    name: str
    is_hub: bool = False


def name_of_model(folder: str | Path) -> Named:
    """Return the name of the model in a folder, which may be gone.

    Its name on the Hub is known where the folder is one of the Hub's cache, or by `_name_or_path` of its config.json.
    Otherwise the name is the folder's last one, for a checkpoint that of its run.
    """
    path = Path(folder)
    if name := _cached_name(path):
        return Named(name, is_hub=True)
    try:
        stated = read_json(path / "config.json", constants=INFINITY).get("_name_or_path")
    except UserError:
        stated = None
    if isinstance(stated, str) and _is_hub_name(stated):
        return Named(stated, is_hub=True)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        path = path.parent.parent
    return Named(last_name(path))


def last_name(path: str | Path) -> str:
    """Return the last name of a path; empty for a home folder, whose name is a person's, and for one without names."""
    text = str(path)
    full = Path(os.path.expanduser(text))
    is_home = full == Path.home() or full in _HOMES or full.parent in _HOMES or re.fullmatch(r"~[^/]*/?", text)
    return "" if is_home else PureWindowsPath(text).name


def without_paths(plan: Plan) -> Plan:
    """Return a plan in which no configuration names a folder or a file by its path, as libraries record them.

    A name on the Hub stays; of a path the last name does. Other keys, and files without such a key, stay to the byte.
    Raises `UserError` where a file that has such a key is damaged.
    """
    texts = {}
    for name in [name for name in _CONFIGS if name in plan.others]:
        file = plan.others[name]
        before = file if isinstance(file, bytes) else read_bytes(file)
        if any(end in before for end in (b'_path"', b'_file"', b'_dir"')):
            mapping = parse_json(before, name if isinstance(file, bytes) else str(file), constants=INFINITY)
            if (public := _public(mapping)) != mapping:
                texts[name] = json_text(public)
    return plan.with_files(texts)


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _public(inner, name) for name, inner in value.items()}
    if isinstance(value, str) and _PLACES.fullmatch(key) and not (key.endswith("_path") and _is_hub_name(value)):
        return _cached_name(Path(value)) or last_name(value)
    return value


def _cached_name(path: Path) -> str:
    found = _CACHED.search(path.as_posix())
    return found[1].replace("--", "/") if found else ""


def _is_hub_name(text: str) -> bool:
    """Whether a text has the form of a Hub's name, and no folder here has it."""
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).exists()
