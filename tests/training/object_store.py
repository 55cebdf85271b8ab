"""An object store in a folder: objects are whole or absent, not appended to and not renamed; there are no folders."""

import contextlib
import fnmatch
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from etils.epath import backend, gpath, stat_utils
from orbax.checkpoint._src.path import gcs_utils

from moezoo.host import remote


class _New(io.BytesIO):
    """An object that appears when it is closed."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self.getvalue())
        super().close()


class Store(backend.Backend):
    """The store whose buckets are the folders in `root`."""

    def __init__(self, root: Path):
        self.root = root

    def at(self, path: Any) -> Path:
        return self.root / os.fspath(path).removeprefix("gs://")

    def open(self, path: Any, mode: str) -> Any:
        assert "a" not in mode
        if "w" not in mode:
            return self.at(path).open(mode)
        new = _New(self.at(path))
        return new if "b" in mode else io.TextIOWrapper(new, encoding="utf-8")

    def exists(self, path: Any) -> bool:
        return self.at(path).is_file() or self.isdir(path)

    def isdir(self, path: Any) -> bool:
        return any(each.is_file() for each in self.at(path).rglob("*"))

    def listdir(self, path: Any) -> list[str]:
        return [each.name for each in self.at(path).iterdir() if self.exists(each.relative_to(self.root))]

    def glob(self, path: Any) -> list[str]:
        parent, _, pattern = os.fspath(path).rpartition("/")
        return [f"{parent}/{name}" for name in self.listdir(parent) if fnmatch.fnmatch(name, pattern)]

    def walk(self, top: Any, *, top_down: bool = True, on_error: Any = None) -> Iterator[Any]:
        raise NotImplementedError

    def makedirs(self, path: Any, *, exist_ok: bool = False, mode: int | None = None) -> None:
        self.mkdir(path, exist_ok=exist_ok)

    def mkdir(self, path: Any, *, exist_ok: bool = False, mode: int | None = None) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)

    def rmtree(self, path: Any) -> None:
        shutil.rmtree(self.at(path))

    def remove(self, path: Any) -> None:
        self.at(path).unlink()

    def rename(self, path: Any, dst: Any) -> None:
        raise AssertionError(f"{path} is renamed")

    replace = rename

    def copy(self, path: Any, dst: Any, overwrite: bool) -> None:
        raise NotImplementedError

    def stat(self, path: Any) -> stat_utils.StatResult:
        found = self.at(path).stat()
        return stat_utils.StatResult(self.isdir(path), found.st_size, int(found.st_mtime))

    def kvstore(self, path: str) -> dict[str, Any]:
        """Return where the library that writes arrays finds the path."""
        return {"driver": "file", "path": f"{self.at(path)}{'/' * path.endswith('/')}"}


@contextlib.contextmanager
def object_store(root: Path) -> Iterator[Store]:
    """While the block runs, `gs://` is the store in `root`."""
    store = Store(root)
    with (
        mock.patch.dict(gpath._PREFIX_TO_BACKEND, {"gs": store}),
        mock.patch.object(gcs_utils, "get_kvstore_for_gcs", store.kvstore),
        mock.patch.object(gcs_utils, "is_hierarchical_namespace_enabled", return_value=False),
        mock.patch.object(remote, "_check_library"),
    ):
        yield store
