"""Reading files that nobody has checked: regular files only, and JSON without surprises; and how JSON is written."""

import json
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from moezoo.errors import UserError
from moezoo.typed import show

LARGEST = 100_000_000  # bytes of JSON; safetensors has this limit for its headers
_DEEPEST, _MOST_DIGITS = 50, 40


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes.

    Raises `UserError` if it cannot be read, or is a folder or a device, which may never end.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no name of a file"
        raise UserError(f"{path} cannot be read ({reason}); download it again") from error
    raise UserError(
        f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}, expected a file; download it again"
    )


def read_bytes(path: Path) -> bytes:
    """Return what a file holds. Raises as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def json_text(table: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON object as it is written."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `open_file` and `parse_json` do."""
    with open_file(path) as file:
        return parse_json(file.read(LARGEST + 1), str(path))


def parse_json(data: bytes, file: str) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Args:
        data: What the file holds.
        file: The name of the file for messages.

    Raises:
        UserError: The data is too long or is not a JSON object in UTF-8, a key is in an object twice, a number is not
            finite or has many digits, or the nesting is deep.
    """

    def refuse(fault: str) -> UserError:
        return UserError(f"{file} {fault}; download it again")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise refuse(f"has the key {show(key)[:80]} twice, so its value is unknown")
        return mapping

    def integer(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise refuse(f"has a whole number of {len(digits)} digits, which no setting needs")
        return int(digits)

    def no_number(name: str) -> None:
        # Folders of some models that moezoo does not have are published so.
        raise UserError(f"{file} has {name}, which is not JSON; load another model, or download it again")

    if len(data) > LARGEST:
        raise refuse(f"has more than {LARGEST} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        kind = "UTF-16 text" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary data"
        raise refuse(f"is {kind}, expected JSON in UTF-8") from error
    try:
        found = json.loads(text, object_pairs_hook=unique, parse_int=integer, parse_constant=no_number)
    except RecursionError as error:
        raise refuse("is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise refuse(f"is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise refuse("is not a JSON object")
    if _depth(found) > _DEEPEST:
        raise refuse("is nested too deeply")
    return found


def _depth(value: Any) -> int:
    """Return how many objects and lists are within each other, up to one more than `_DEEPEST`."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level, depth = [item for items in inner for item in items], depth + 1
    return depth
