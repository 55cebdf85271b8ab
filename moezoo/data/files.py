"""Find files, and read those that are text."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moezoo.errors import UserError
from moezoo.host import check_file, check_host
from moezoo.typed import show

_GIVE = "give a text file or a folder of them"


def find_documents(path: str, *, key: str) -> list[Path]:
    """Return the file `path`, or all files under the folder `path` except hidden ones, sorted by path.

    Raises `UserError`, naming `key`, if there is none.
    """
    root, shown = Path(os.path.expanduser(path)), show(f"{key}={path}")
    if not os.path.isdir(root):
        check_file(root, shown, _GIVE)
        return [root]
    found = files_under(root, skip=lambda name: name.startswith("."))
    if not found:
        raise UserError(f"{shown} is a folder without files; {_GIVE}")
    return found


def read_documents(paths: Sequence[Path], path: str, *, key: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the text of each of `paths`, all files of the folder `path`, or `path` itself.

    A name is the path inside the folder. In a folder, files that are not UTF-8 are skipped.

    Raises:
        UserError: A file cannot be read, or memory cannot hold it; the single file `path` is not UTF-8; there is no
            text. It names `key`.
    """
    root, shown = Path(os.path.expanduser(path)), show(f"{key}={path}")
    alone = root.is_file()
    empty = True
    for file in paths:
        check_size([file], f"{shown}: {show(str(file))}", "split it into smaller files")
        try:
            content = file.read_bytes()
            content.decode()
        except OSError as error:
            name = show(str(file))
            raise UserError(f"{shown}: {name} cannot be read ({error.strerror}); make it readable") from error
        except UnicodeDecodeError as error:
            if alone:
                byte = f"byte {error.start} is 0x{content[error.start]:02x}"
                raise UserError(f"{shown} is not UTF-8 text: {byte}; convert it to UTF-8") from error
            continue
        if alone or b"\0" not in content:  # some binary files, such as files of zeros, decode as UTF-8
            empty &= not content
            yield root.name if alone else file.relative_to(root).as_posix(), content
    if empty:
        what = "is an empty file" if alone else f"holds no UTF-8 text (files read: {len(paths)})"
        raise UserError(f"{shown} {what}; {_GIVE}")


def check_size(paths: Sequence[Path], what: str, advice: str) -> None:
    """Raise `UserError` if memory cannot hold `paths` together; `what` begins the message, `advice` ends it."""
    size = 0
    for file in paths:
        with contextlib.suppress(OSError):  # it has just been removed
            size += os.path.getsize(file)
    check_host(what, size, advice)


def describe_skipped(count: int) -> str:
    """Return what is printed about files that `read_documents` has skipped."""
    return f"{count} file{'s that are' if count > 1 else ' that is'} not UTF-8 text"


def files_under(root: Path, suffix: str = "", skip: Callable[[str], bool] = lambda name: False) -> list[Path]:
    """Return all regular files under `root`, sorted by path: the order must not depend on the file system.

    Files and folders whose name `skip` is true for are left out, without looking into these folders.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not skip(name)]
    # Unlike Path.is_file, this counts a file that may not be looked at as none.
    return sorted(filter(os.path.isfile, found), key=lambda path: path.relative_to(root).as_posix())
