"""Find files, and open them, unpacked where they are compressed."""

import bz2
import contextlib
import functools
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import show

_CACHE = re.compile(r"cache-.*\.arrow")  # what `datasets` keeps beside its files
_PACKED = ("", ".gz", ".zst", ".bz2", ".xz")
_ROWS = "read its rows with data=jsonl data.field=COLUMN, with data=chat, or with prepare-data field=COLUMN"
# How files begin that are no text, what they are, and what to do instead.
_OTHERS = (
    (b"PAR1", "a Parquet file", _ROWS),
    (b"ARROW1\0\0", "an Arrow file", _ROWS),
    (b"\xff\xff\xff\xff", "an Arrow stream", _ROWS),
    (b"PK\3\4", "a ZIP archive", "unpack it"),
    (b"%PDF", "a PDF", "give its text"),
    (b"\x93NUMPY", "a NumPy array", "choose data=tokens"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data", "run git lfs pull, or download the file"),
    (b"SQLite format 3\0", "an SQLite database", "export its rows as JSON lines"),
    (b"\x89HDF", "an HDF5 file", "export its rows as JSON lines"),
    (b"ORC", "an ORC file", "convert it to Parquet"),
    (b"Obj\1", "an Avro file", "convert it to Parquet"),
    (b"\xff\xfe", "UTF-16 text", "convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it to UTF-8"),
)


class Found(NamedTuple):
    """Files to read, in the order in which they are read.

    - `shown`: what the user wrote, as messages begin;
    - `root`: the folder that names of files start from;
    - `paths`: the files, sorted by name;
    - `alone`: whether the user named the one file itself, not a folder or a pattern;
    - `part`: which part of the files is read, in words; empty for all.
    """

    shown: str
    root: Path
    paths: list[Path]
    alone: bool
    part: str = ""

    def name(self, path: Path) -> str:
        """Return the name of one of the files: its path from `root`."""
        return path.relative_to(self.root).as_posix()

    def describe(self, path: Path) -> str:
        """Return how messages name one of the files."""
        return self.shown if self.alone else f"{self.shown}: {show(str(path))}"


def find_files(path: str, *, key: str, suffixes: tuple[str, ...] = ()) -> Found:
    """Return the file `path`, all files under the folder `path` except hidden ones, or those that a pattern matches.

    Args:
        path: A file, a folder, or a pattern of `glob` such as `texts/**/*.txt`.
        key: The user's name of the setting.
        suffixes: How names of files in a folder end, before .gz and others of `_PACKED`; empty for any name. Those
            of .json are taken where there are no others.

    Raises:
        UserError: There is none; the folder is one of `datasets` with several splits.
    """
    root, shown = Path(os.path.expanduser(path)), show(f"{key}={path}")
    give = f"give a {suffixes[0] if suffixes else 'text'} file or a folder of them"
    if os.path.isdir(root):
        if suffixes and (saved := next(root.glob("**/dataset_dict.json"), None)):
            splits = ", ".join(sorted(each.name for each in saved.parent.iterdir() if each.is_dir()))
            raise UserError(f"{shown} has several splits, as datasets saves them; give one of the folders: {splits}")
        packed = tuple(f"{suffix}{more}" for suffix in suffixes or ("",) for more in _PACKED)
        paths = files_under(root, packed, skip=lambda name: name.startswith(".") or _CACHE.fullmatch(name) is not None)
        if suffixes:  # beside data, .json files mostly describe them
            json_ = tuple(f".json{more}" for more in _PACKED)
            paths = [path for path in paths if not path.name.lower().endswith(json_)] or paths
        what = f"is a folder without {suffixes[0] + ' ' if suffixes else ''}files"
    elif glob.has_magic(path) and not os.path.lexists(root):
        fixed = re.split(r"[*?\[]", str(root), maxsplit=1)[0]
        paths, root = [Path(match) for match in glob.glob(str(root), recursive=True)], Path(fixed + "x").parent
        paths = _sorted(paths, root)
        what = "matches no file"
    else:
        check_file(root, shown, give)
        return Found(shown, root.parent, [root], alone=True)
    if not paths:
        raise UserError(f"{shown} {what}; {give}")
    return Found(shown, root, paths, alone=False)


def check_begin(first: bytes, shown: str) -> None:
    """Raise `UserError` if a file that begins so is none of text, and name what it is. `shown` begins the message."""
    for begin, what, instead in _OTHERS:
        if first.startswith(begin):
            raise UserError(f"{shown} is {what}; {instead}")
    if first[257:262] == b"ustar":
        raise UserError(f"{shown} is a tar archive; unpack it")
    if first.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise UserError(f"{shown} is a page of HTML, perhaps in place of the data; download the file itself")


@contextlib.contextmanager
def opened(path: Path, shown: str) -> Iterator[BinaryIO]:
    """Open a file, unpacked if it is compressed (gzip, Zstandard, bzip2 or xz), by its content.

    `shown` begins messages. Raises `UserError`, also in the block, if the file cannot be read.
    """
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, DamagedError)
    opener: Any = open
    try:
        with path.open("rb") as file:
            first = file.read(10)
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror or error}); make it readable") from error
    if first.startswith(b"\x1f\x8b"):
        opener = gzip.open
    elif first.startswith(b"\xfd7zXZ\0"):
        opener = functools.partial(_open_members, make=lzma.LZMADecompressor)
    elif first.startswith(b"BZh") and first[4:] == b"1AY&SY":
        opener = functools.partial(_open_members, make=bz2.BZ2Decompressor)
    elif first.startswith(b"\x28\xb5\x2f\xfd"):
        zstd = _zstd(shown)
        opener, damage = zstd.open, (*damage, zstd.ZstdError)
    try:
        with opener(path, "rb") as file:
            yield file
    except damage as error:
        raise UserError(f"{shown} is damaged ({error}); copy or download it again") from error
    except OSError as error:
        raise UserError(f"{shown} cannot be read ({error.strerror or error}); make it readable") from error


class DamagedError(Exception):
    """A compressed file ends early, or is not what it should be."""


class _Members(io.RawIOBase):
    """Reads a file of one or more compressed parts, all of which must be whole.

    The readers of bz2 and lzma take a damaged part that is not the first one for the end of the file.
    """

    def __init__(self, file: Any, make: Callable[[], Any]):
        self._file, self._make = file, make
        self._unpacker, self._rest = make(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._unpacker.eof:
                self._rest = self._unpacker.unused_data or self._file.read(2**16)
                if not self._rest:
                    return 0
                self._unpacker = self._make()
            elif self._unpacker.needs_input:
                if not (self._rest or (more := self._file.read(2**16))):
                    raise DamagedError("Compressed file ended before the end-of-stream marker was reached")
                self._rest = self._rest or more
            try:
                found = self._unpacker.decompress(self._rest, len(buffer))
            except (OSError, lzma.LZMAError) as error:
                raise DamagedError(str(error)) from error
            self._rest = b""
            if found:
                buffer[: len(found)] = found
                return len(found)


@contextlib.contextmanager
def _open_members(path: Path, mode: str, *, make: Callable[[], Any]) -> Iterator[BinaryIO]:
    with path.open(mode) as file:
        yield io.BufferedReader(_Members(file, make), 2**16)  # pyright: ignore[reportReturnType]


def _zstd(shown: str) -> Any:
    """Return Python's own module for Zstandard, or the package that brings it to Python below 3.14."""
    try:
        from compression import zstd  # pyright: ignore[reportMissingImports]
    except ImportError:
        try:
            from backports import zstd  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        except ImportError:
            raise UserError(
                f"{shown} needs a library that unpacks Zstandard; pip install 'moezoo[zstd]', or unpack the file"
            ) from None
    return zstd


def files_under(root: Path, suffixes: tuple[str, ...], skip: Callable[[str], bool]) -> list[Path]:
    """Return all regular files under `root` whose name ends with one of `suffixes`, sorted by path.

    Files and folders whose name `skip` is true for are left out, without looking into these folders.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in names if name.lower().endswith(suffixes) and not skip(name)]
    return _sorted(found, root)


def _sorted(paths: list[Path], root: Path) -> list[Path]:
    """Return those of `paths` that are regular files, in an order that does not depend on the file system."""
    # Unlike Path.is_file, this counts a file that may not be looked at as none.
    return sorted(filter(os.path.isfile, paths), key=lambda path: path.relative_to(root).as_posix())
