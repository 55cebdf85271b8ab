"""Trackers of tests: one that keeps what it receives, one that waits forever, and one that raises."""

import dataclasses
import threading
from typing import Any, ClassVar

from moezoo.trackers import RunStart, Tracker, Writer

forever = threading.Event()  # never set, except to end a thread of a test


class Kept(Writer):
    """What a run reported, in order."""

    def __init__(self, run: RunStart):
        self.run, self.calls = run, []
        self.rows = list(run.history)

    def row(self, row: Any, load: Any) -> None:
        self.rows.append(row)
        self.calls.append(("row", None if load is None else load.shape))

    def picture(self, path: Any) -> None:
        self.calls.append(("picture", path.name))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@dataclasses.dataclass(frozen=True)
class Recorder(Tracker):
    """Its last writer is `Recorder.kept[-1]`."""

    kept: ClassVar[list[Kept]] = []

    def start(self, run: RunStart) -> Writer:
        self.kept.append(Kept(run))
        return self.kept[-1]


@dataclasses.dataclass(frozen=True)
class Sleeper(Tracker):
    """Waits forever with the first row."""

    finish_seconds: int = 1

    def start(self, run: RunStart) -> Writer:
        forever.wait(600)
        return Kept(run)


@dataclasses.dataclass(frozen=True)
class Raiser(Tracker):
    """Raises when it starts, at the second row, or at the end."""

    when: str = "start"

    def start(self, run: RunStart) -> Writer:
        writer = Kept(run)

        def row(row: Any, load: Any) -> None:
            Kept.row(writer, row, load)
            if len(writer.calls) == 2 and self.when == "row":
                raise RuntimeError("the server\nhas gone")

        def finish() -> None:
            raise SystemExit("no place left")

        if self.when == "start":
            raise ValueError("no such project")
        writer.row = row
        if self.when == "finish":
            writer.finish = finish
        return writer
