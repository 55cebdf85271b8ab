"""Who receives the rows of a run: its log, a function of the caller, and trackers."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from moezoo.config.compose import folder_path
from moezoo.config.own import name_in
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError, describe_class
from moezoo.parallel import distributed
from moezoo.trackers import MetricsRow, RunStart, Writer
from moezoo.trackers.background import Background
from moezoo.training import report
from moezoo.training.files import check_writable, writing_to

OnRow = Callable[[MetricsRow], object]


class Call(Writer):
    """Calls a function with a copy of each row."""

    def __init__(self, on_row: OnRow):
        self._on_row = on_row

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Call it. What it raises ends the run: it is the caller's own."""
        del load
        self._on_row(dict(row))


def check_writers(cfg: TrainConfig, on_row: OnRow | None) -> None:
    """Raise `UserError` where a tracker lacks its library or cannot write, and for what is no function."""
    if on_row is not None and not callable(on_row):
        raise UserError(f"on_row is {describe_class(on_row)}, expected a function of one row; write on_row=print")
    if not distributed.is_first():
        return
    cfg.tracker.check()
    for name, tracker in cfg.tracker.active().items():
        if tracker.folder is not None:
            key = f"tracker.members.{name}.folder" if name else "tracker.folder"
            with writing_to(key, tracker.folder):
                check_writable(folder_path(tracker.folder, key))


def make_writers(cfg: TrainConfig, on_row: OnRow | None, run: RunStart) -> Iterator[Writer]:
    """Yield what receives rows besides the log and the progress, on the first process."""
    if not distributed.is_first():
        return
    if on_row is not None:
        yield Call(on_row)
    for name, tracker in cfg.tracker.active().items():
        yield Background(tracker, run, functools.partial(_report, name or name_in(cfg.tracker)))


def _report(name: str, line: str) -> None:
    report.print_lines([("tracker", f"{name} {line}")])
