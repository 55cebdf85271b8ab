"""SIGTERM and Ctrl-C end a run after the current step, with a checkpoint."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import moezoo.interrupts as interrupts

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
    its parents, which forward it.

    A command stores signals only inside `awaiting`; elsewhere they end it (`moezoo.interrupts`). Without a command, as
    in a notebook, they are stored from the start, but not outside the main thread.
    """

    def __init__(self):
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if not interrupts.is_ending() and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _ASKED}
        return self

    @contextlib.contextmanager
    def awaiting(self) -> Iterator[None]:
        """Store the signals that a command receives while the block runs: there are steps to finish and to save."""
        with interrupts.receiving(self._note):
            yield
        if self.number and interrupts.is_ending():  # it came too late for the block to act on it
            interrupts.end(self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.number:
            with contextlib.suppress(RuntimeError):  # the signal may come while something is printed
                print("stopping before the next step; a second signal ends it immediately", flush=True)
        self._note(number)

    def _note(self, number: int) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since <= _SAME_SECONDS:
            return
        elif interrupts.is_ending():
            interrupts.end(number)
        else:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def __exit__(self, *raised: object) -> None:
        self._restore()
