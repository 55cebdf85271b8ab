"""How far loading is: a bar on a terminal, elsewhere one line at the end. A load of few bytes shows neither."""

import contextlib
import sys
import time
from collections.abc import Sequence
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
        sizes: The bytes of each tensor that is read, perhaps in part.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]):
        self._folder, self._tensors, self._done, self._seen = folder, len(sizes), 0, set[str]()
        self._total = sum(sizes)
        self._shows, self._held = self._total >= _LEAST and distributed.is_first(), contextlib.ExitStack()
        self._bar: Any = None

    def __enter__(self) -> "LoadingProgress":
        self._began = time.monotonic()
        if self._shows and (bar := self._held.enter_context(bar_on(sys.stderr))):
            self._bar, self._task = bar, bar.add_task("", total=self._tensors, unit="tensor")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
        if self._shows and self._bar is None and error is None:
            seconds = time.monotonic() - self._began
            print(
                f"loaded {self._folder}: {len(self._seen)} tensors, {self._speed()}, {seconds:.1f} s", file=sys.stderr
            )

    def add(self, name: str, size: int) -> None:
        """Show that `size` bytes of a tensor are read."""
        self._done += size
        self._seen.add(name)
        if self._bar is not None:
            self._bar.update(self._task, completed=len(self._seen), description=self._speed())

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        return f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {self._done / 1e6 / seconds:,.0f} MB/s"
