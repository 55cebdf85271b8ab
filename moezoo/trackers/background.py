"""A tracker on a thread of its own: it may be slow, wait forever or raise, and the run goes on."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moezoo.trackers.base import MetricsRow, RunStart, Tracker, Writer

MOST_ROWS = 1000  # that wait for the tracker


class Background(Writer):
    """Hands what it receives to a tracker, which starts with the first row; one that fails is off from then on."""

    def __init__(self, tracker: Tracker, run: RunStart, report: Callable[[str], object]):
        """`report` receives one line about a tracker that is off, on the thread of the run."""
        self._tracker, self._run, self._report = tracker, run, report
        self._calls: queue.Queue[Callable[[Writer], object] | None] = queue.Queue(MOST_ROWS)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._failure, self._off = "", False

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Queue the row."""
        if self._thread.ident is None:
            self._thread.start()
        self._queue(lambda writer: writer.row(row, load))

    def picture(self, path: Path) -> None:
        """Queue the picture."""
        self._queue(lambda writer: writer.picture(path))

    def finish(self) -> None:
        """Wait until the tracker has written all, at most its `finish_seconds`."""
        if self._thread.ident is None:
            return
        self._queue(None)
        if not self._off:
            self._thread.join(self._tracker.finish_seconds)
        if self._failure:
            self._turn_off(self._failure)
        elif not self._off and self._thread.is_alive():
            self._turn_off(f"it did not finish within {self._tracker.finish_seconds} s")

    def _queue(self, call: Callable[[Writer], object] | None) -> None:
        if self._off or self._thread.ident is None:
            return
        if self._failure:
            self._turn_off(self._failure)
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._turn_off(f"it is more than {MOST_ROWS:,} rows behind")

    def _turn_off(self, why: str) -> None:
        if not self._off:
            self._off = True
            self._report(f"is off: {why}; metrics.jsonl has all rows")

    def _work(self) -> None:
        try:
            writer = self._tracker.start(self._run)
            while (call := self._calls.get()) is not None:
                if self._off:
                    return
                call(writer)
            writer.finish()
        except BaseException as error:  # a library may even raise SystemExit
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
