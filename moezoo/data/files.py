"""Find files, and read those that are text."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from moezoo.errors import UserError


def find_documents(path: str, *, key: str) -> list[Path]:
    """Return the file `path`, or all files under the folder `path` except hidden ones, sorted by path.

    Raises `UserError`, naming `key`, if there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"{key}={path} does not exist; give a text file or a folder of them")
    found = [
        file for file in files_under(root) if not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    if not found:
        raise UserError(f"{key}={path} is a folder without files; give a text file or a folder of them")
    return found


def read_documents(paths: Sequence[Path], path: str, *, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the text of each of `paths`, all files of the folder `path`, or `path` itself.

    A name is the path inside the folder. In a folder, files that are not UTF-8 are skipped.

    Raises:
        UserError: a file cannot be read; the single file `path` is not UTF-8; there is no text. It names `key`.
    """
    root = Path(path).expanduser()
    alone = root.is_file()
    empty = True
    for file in paths:
        try:
            content = file.read_bytes()
            content.decode()
        except OSError as error:
            raise UserError(f"{key}={path}: {file} cannot be read ({error.strerror}); make it readable") from error
        except UnicodeDecodeError as error:
            if alone:
                raise UserError(
                    f"{key}={path} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}; "
                    "convert it to UTF-8"
                ) from error
            continue
        if alone or b"\0" not in content:  # some binary files, such as files of zeros, decode as UTF-8
            empty &= not content
            yield root.name if alone else file.relative_to(root).as_posix(), content
    if empty:
        what = "is an empty file" if alone else f"holds no UTF-8 text (files read: {len(paths)})"
        raise UserError(f"{key}={path} {what}; give a text file or a folder of them")


def files_under(root: Path, suffix: str = "") -> list[Path]:
    """Return all regular files under `root`, sorted by path: the order must not depend on the file system."""
    found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(suffix)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())
