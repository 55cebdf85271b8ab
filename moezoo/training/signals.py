"""SIGTERM and Ctrl-C end a run after the current step, with a checkpoint."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_ASKED = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 1.0


class Stopped(Exception):  # noqa: N818  (it is not an error)
    """A signal ended the run, which is saved; `code` is the exit code for the process: 128 + the signal's number."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.code = 128 + number


class Signals:
    """Stores the first signal in `number`, which is 0 before; a second signal has its usual effect.

    Signals within one second count as one: `timeout`, a terminal or a scheduler may send a signal to a process and to
    its parents, which forward it. Outside the main thread no signal is stored.
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
