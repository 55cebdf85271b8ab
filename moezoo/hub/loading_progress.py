"""How far loading is: a bar on a terminal, elsewhere one line at the end. A load of few bytes shows neither."""

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from moezoo.parallel import distributed
from moezoo.progress import bar_on

_LEAST = 2**28  # bytes


class LoadingProgress:
    """Shows tensors, bytes per second and the time left, on stderr. Of several processes only the first prints.

    Args:
        folder: The folder that is loaded.
        size: The bytes of all tensors.
        read: The bytes that this process reads of each tensor of which it reads something, by name.
    """

    def __init__(self, folder: Path, size: int, read: Mapping[str, int]):
        self._folder, self._size, self._read = folder, size, read
        self._done, self._seen = 0, set[str]()
        self._shows, self._held = size >= _LEAST and distributed.is_first(), contextlib.ExitStack()
        self._bar: Any = None

    def __enter__(self) -> "LoadingProgress":
        self._began = time.monotonic()
        if self._shows and (bar := self._held.enter_context(bar_on(sys.stderr))):
            # In bytes, because tensors differ in size, and the time left follows from what is done.
            total = sum(self._read.values())
            self._bar, self._task = bar, bar.add_task("", total=total / 1e6, unit="MB")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        if self._shows and self._bar is None and error is None:
            seconds = time.monotonic() - self._began
            read = f"{self._done / 1e9:.2f} of {self._size / 1e9:.2f} GB"
            print(
                f"loaded {self._folder}: {len(self._seen)} tensors, {read}, {self._speed()}, {seconds:.1f} s",
                file=sys.stderr,
            )

    def add(self, name: str, size: int) -> None:
        """Show that `size` bytes of a tensor are read."""
        self._done += size
        self._seen.add(name)
        if self._bar is not None:
            text = f"{len(self._seen)} of {len(self._read)} tensors, {self._speed()}"
            self._bar.update(self._task, completed=self._done / 1e6, description=text)

    def _speed(self) -> str:
        return f"{self._done / 1e6 / max(time.monotonic() - self._began, 1e-3):,.0f} MB/s"
