"""Reading files that nobody has checked: regular files only, and JSON without surprises; and how JSON is written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import show

LARGEST = 100_000_000  # bytes of JSON; safetensors has this limit for its headers
_DEEPEST = 50
_AGAIN = "download it again"


def open_file(path: Path, shown: str = "", advice: str = _AGAIN) -> BinaryIO:
    """Open a file for reading bytes.

    Raises `UserError`, with `shown`, by default the path, at its start and `advice` at its end, if it cannot be read,
    or is a folder or a device, which may never end.
    """
    shown = shown or str(path)
    check_file(path, shown, advice)
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror}); {advice}") from error


def read_bytes(path: Path) -> bytes:
    """Return what a file holds. Raises as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def json_text(table: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON object as it is written."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(path: Path, shown: str = "", advice: str = _AGAIN) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `open_file` and `parse_json` do."""
    with open_file(path, shown, advice) as file:
        return parse_json(file.read(LARGEST + 1), shown or str(path), advice)


def parse_json(data: bytes, shown: str, advice: str = _AGAIN) -> dict[str, Any]:
    """Return the JSON object in `data`; `shown` and `advice` are for messages, as in `open_file`.

    Raises `UserError` where the data is too long, is not a JSON object in UTF-8 that `load_json` reads, or is deep.
    """

    def refuse(fault: str) -> UserError:
        return UserError(f"{shown} {fault}; {advice}")

    if len(data) > LARGEST:
        raise refuse(f"has more than {LARGEST} bytes")
    try:
        found = load_json(data.decode())
    except UnicodeDecodeError as error:
        kind = "UTF-16 text" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary data"
        raise refuse(f"is {kind}, expected JSON in UTF-8") from error
    except RecursionError as error:
        raise refuse("is nested too deeply") from error
    except ValueError as error:
        raise refuse(f"is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise refuse("is not a JSON object")
    if _depth(found) > _DEEPEST:
        raise refuse("is nested too deeply")
    return found


def load_json(text: str) -> Any:
    """Return what JSON text holds. Raises `ValueError` for any other text, and for what readers take differently.

    That is a key that an object has twice, of which Python takes the last one, and NaN and infinities, which Python
    reads although they are not JSON.
    """
    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {show(max(names, key=names.count))[:80]} twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _depth(value: Any) -> int:
    """Return how many objects and lists are within each other, up to one more than `_DEEPEST`."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level, depth = [item for items in inner for item in items], depth + 1
    return depth
