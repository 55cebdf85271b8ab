"""Say what a run waits for, so that a slow machine can be told from a hang."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

import jax
from jax.sharding import Mesh

_FIRST, _BETWEEN = 60.0, 5.0  # seconds: of a wait before its first line, and between two looks
_IDLE = 0.1  # processors in use below which no device computes, but something may draw


class _Wait(NamedTuple):
    what: str
    began: float
    time_of_day: str


class Waiting:
    """Writes a line after a minute of a wait, and again each time that the wait has doubled.

    A thread looks every few seconds. A wait itself costs no more than two assignments.
    """

    def __init__(
        self,
        mesh: Mesh,
        write: Callable[[str], object],
        *,
        again: str = "continue from its last checkpoint (resume=FOLDER)",
        clock: Callable[[], float] = time.monotonic,
        processor_time: Callable[[], float] = time.process_time,
    ):
        """Prepare to wait for the devices of `mesh`. `again` is what to do after a hang. The clocks return seconds."""
        self._again = again
        self._write, self._clock, self._processor_time = write, clock, processor_time
        devices, platform = mesh.size, mesh.devices.flat[0].platform
        self._devices = f"{devices} {platform} device{'s' * (devices > 1)}"
        # An accelerator computes, and another process may be what is slow, while this one uses no processor.
        self._knows_idle = platform == "cpu" and jax.process_count() == 1
        self._wait: _Wait | None = None
        self._seen: _Wait | None = None
        self._due = _FIRST
        self._last = clock(), processor_time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> "Waiting":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Wait for `what` in the block."""
        self.begin(what)
        try:
            yield
        finally:
            self._wait = None

    def begin(self, what: str) -> None:
        """Wait for `what` until something else begins, or a block of `on` ends."""
        self._wait = _Wait(what, self._clock(), time.strftime("%H:%M:%S"))

    def look(self) -> None:
        """Write a line if one is due."""
        now, used = self._clock(), self._processor_time()
        (before, used_before), self._last = self._last, (now, used)
        wait = self._wait
        if wait is not self._seen:
            self._seen, self._due = wait, _FIRST
        if wait is None or (waited := now - wait.began) < self._due:
            return
        while self._due <= waited:
            self._due *= 2
        line = f"waiting {waited:.0f} s for {wait.what} on {self._devices}, since {wait.time_of_day}"
        if self._knows_idle and now > before:
            if (busy := (used - used_before) / (now - before)) >= _IDLE:
                line += f"; it computes ({busy:.1f} processors in use), so it is only slow: a smaller batch is faster"
            else:
                line += (
                    "; it computes nothing, so it hangs unless the machine was stopped just now: end it with kill -9 "
                    f"{os.getpid()} and {self._again}"
                )
        self._write(line)

    def _run(self) -> None:
        while not self._stop.wait(_BETWEEN):
            self.look()
