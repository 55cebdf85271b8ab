"""Run folders in an object store, `gs://BUCKET/NAME`. Only this module knows the library that reads and writes there.

A path there has the methods of `pathlib.Path` that runs use. There are no folders, only names of objects; an object is
written whole or not at all, and neither appended to nor renamed.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from moezoo.errors import UserError

# A path on a disk or in an object store, where calls are checked against their annotations: the latter is no `Path`.
if TYPE_CHECKING:
    RunPath = Path
else:
    RunPath = PurePath
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # also what is nearly one, which would be a folder of that name


def is_url(path: Any) -> bool:
    """Return whether the text or the path begins with a scheme, such as `gs://`, or with what is meant as one."""
    return _SCHEME.match(str(path)) is not None


def as_path(path: Any) -> Path:
    """Return a path on a disk, or one in an object store, which behaves alike; `file://` is a disk.

    Raises `UserError` for another scheme, and where the library for a store is missing.
    """
    if not is_url(path) or not isinstance(path, str):
        return path if is_url(path) else Path(path)
    scheme, _, rest = path.partition("://")
    if scheme == "file" and rest.startswith("/"):
        return Path(rest)
    if scheme != "gs" or not rest.strip("/"):
        raise UserError(
            f"{path}: moezoo writes to gs://BUCKET/NAME, file:///FOLDER and folders; mount another store, or name one"
        )
    _check_library(path)
    from etils import epath  # slow to import

    found: Any = epath.Path(path.rstrip("/"))
    return found


def _check_library(path: str) -> None:
    try:
        import gcsfs as gcsfs  # type: ignore[import-not-found]
        from fsspec.config import conf
    except ImportError:
        raise UserError(f'{path} needs gcsfs; run pip install "moezoo[gcs]"') from None
    # Other processes, and the library that writes arrays, make objects that a listing in memory would not have.
    conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def absolute(path: Path) -> Path:
    """Return the path from the root of its disk or store."""
    return path if is_url(path) else path.absolute()


def is_same(one: Path, other: Path) -> bool:
    """Return whether two paths are the same folder."""
    return str(one) == str(other) if is_url(one) or is_url(other) else one.resolve() == other.resolve()


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and in those inside it, in the order of their names."""
    if not is_url(folder):
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
        return
    for path in sorted(folder.iterdir()):
        if path != folder:  # a marker of the folder itself
            yield from list_files(path) if path.is_dir() else [path]


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it, as far as that is possible."""
    if not is_url(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.is_dir():
        there: Any = folder
        there.rmtree(missing_ok=True)
