"""Stopping when asked: SIGTERM and Ctrl-C end a run after the step under way, with a checkpoint."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_ASKED = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 1.0


class Stopped(Exception):  # noqa: N818  (it is no error)
    """A run that a signal ended, saved; `code` is what its process should exit with (128 + the signal's number)."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.code = 128 + number


class Signals:
    """Notes the first signal in `number`, 0 before. A second one, a second later, does what it does without us.

    Sooner it is the same one: `timeout`, a terminal or a scheduler may send theirs to a process and to those around it,
    which pass it on. Outside the main thread nothing is noted.
    """

    def __init__(self):
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _ASKED}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _SAME_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
