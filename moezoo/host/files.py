"""Files that nobody has checked: regular files only, and JSON without surprises; and locks of folders."""

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from moezoo.errors import UserError
from moezoo.host.remote import is_url
from moezoo.typed import show

_MOST_TEXT = 10**8  # bytes of a text that is read whole
_TRIES = 4  # to lock a folder
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}

LARGEST = 100_000_000  # bytes of JSON; safetensors has this limit for its headers
_DEEPEST = 50
_AGAIN = "download it again"
# Numbers that are not JSON, by the names that Python writes and reads for them.
_NONE: Mapping[str, float] = MappingProxyType({})
INFINITY: Mapping[str, float] = MappingProxyType({"Infinity": math.inf})


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


def read_json(
    path: Path, shown: str = "", advice: str = _AGAIN, constants: Mapping[str, float] = _NONE
) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `open_file` and `parse_json` do."""
    with open_file(path, shown, advice) as file:
        return parse_json(file.read(LARGEST + 1), shown or str(path), advice, constants)


def parse_json(data: bytes, shown: str, advice: str = _AGAIN, constants: Mapping[str, float] = _NONE) -> dict[str, Any]:
    """Return the JSON object in `data`; `shown` and `advice` are for messages, as in `open_file`.

    `constants`: as for `load_json`.

    Raises `UserError` where the data is too long, is not a JSON object in UTF-8 that `load_json` reads, or is deep.
    """

    def refuse(fault: str) -> UserError:
        return UserError(f"{shown} {fault}; {advice}")

    if len(data) > LARGEST:
        raise refuse(f"has more than {LARGEST} bytes")
    try:
        found = load_json(data.decode(), constants)
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


def load_json(text: str, constants: Mapping[str, float] = _NONE) -> Any:
    """Return what JSON text holds. Raises `ValueError` for any other text, and for what readers take differently.

    That is a key that an object has twice, of which Python takes the last one, and NaN and infinities, which Python
    reads although they are not JSON. Those in `constants`, by their names, are numbers: released config.json files have
    them.
    """

    def constant(name: str) -> float:
        if name not in constants:
            raise ValueError(f"{name} is no number of JSON")
        return constants[name]

    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=constant)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {show(max(names, key=names.count))[:80]} twice")
    return found


def _depth(value: Any) -> int:
    """Return how many objects and lists are within each other, up to one more than `_DEEPEST`."""
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level, depth = [item for items in inner for item in items], depth + 1
    return depth


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether two files have the same bytes; not where one is missing or cannot be read."""
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def check_name(path: Path, shown: str) -> Path:
    """Return `path`; raise `UserError` with `shown` at its start if no file can have this name."""
    try:
        path.lstat()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = getattr(error, "strerror", error)
            raise UserError(f"{shown}: no folder can have this name ({reason}); write another") from None
    return path


def check_file(path: Path, shown: str, advice: str) -> int:
    """Return the size in bytes of the regular file `path`; any other could block or never end when it is read.

    Raises `UserError` with `shown` at its start and `advice` at its end if it is none.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{shown} does not exist; {advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{shown} cannot be read ({getattr(error, 'strerror', error)}); {advice}") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{shown} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}, not a file; {advice}")
    return found.st_size


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def is_locked(folder: Path) -> bool:
    """Return whether another process, or another part of this one, has locked a folder with `locking`.

    It is locked itself meanwhile, so that others may ask too.
    """
    handle = _open_folder(folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def read_text(path: Path, shown: str, advice: str, *, most: int = _MOST_TEXT) -> str:
    """Return the UTF-8 text of the regular file `path`, or of the object of this name in a store.

    Raises `UserError` with `shown` at its start and `advice` at its end if it is none, or has more than `most` bytes.
    """
    if not is_url(path) and check_file(path, shown, advice) > most:
        raise UserError(f"{shown} has more than {most} bytes; {advice}")
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror}); {advice}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{shown} is not UTF-8 text (byte {error.start}); {advice}") from error


@contextlib.contextmanager
def locking(folder: Path, refusal: str) -> Iterator[None]:
    """Lock a folder against other processes while the block runs; the end of this process unlocks it too.

    A link in its place is not followed. Raises `UserError` with `refusal` if another process has locked the folder, or
    has renamed or removed it meanwhile.
    """
    handle = _open_folder(folder)
    try:
        # A file system without locks raises another error.
        with contextlib.suppress(OSError):
            for tries_left in reversed(range(_TRIES)):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # perhaps somebody only asks (`is_locked`)
                    if not tries_left:
                        raise UserError(refusal) from None
                    time.sleep(0.05)
        if not (folder.exists() and os.path.samestat(os.fstat(handle), os.lstat(folder))):
            raise UserError(refusal)
        yield
    finally:
        os.close(handle)
