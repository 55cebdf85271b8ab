"""`metrics.jsonl`: one row per logged step, each written by a single call, and what validations in the rows came to."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.config.compose import folder_path
from moezoo.config.run_folders import find, run_folder, steps
from moezoo.errors import UserError
from moezoo.remote import RunPath, is_url
from moezoo.trackers import MetricsRow, Writer
from moezoo.training.files import replace_text

# The figures of a row that a clock and the memory decide: a run that is repeated has others.
MEASURED = ("time", "tokens_per_second", "seconds_waiting", "seconds_computing", "seconds_saving", "peak_bytes")


class MetricsLog(Writer):
    """Appends rows to a file, and keeps them in `history`.

    In an object store, where nothing can be appended, `flush` writes the file: before a save, and at the end.
    """

    def __init__(self, path: Path | None, history: list[MetricsRow]):
        """Replace the file at `path` by the rows of `history`; with `path` None no file is written.

        Raises `UserError`, as `row` does, if the file cannot be written.
        """
        self.history, self._path = list(history), path
        if path is not None:
            self._write()

    def row(self, row: MetricsRow, load: np.ndarray | None = None) -> None:
        """Add a row. Floats are written with all digits, so reading returns the same bits; those not finite as null."""
        del load
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.history.append(row)
        if self._path is None or is_url(self._path):
            return
        line = f"{json.dumps(row)}\n".encode()
        with self._writing():
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)  # an open file would hide that it was removed
            try:
                written = os.write(file, line)
                if written < len(line):  # an almost full disk accepts a part; the next write raises the error
                    os.write(file, line[written:])
            finally:
                os.close(file)

    def flush(self) -> None:
        """Write the rows that the file does not have yet."""
        if self._path is not None and is_url(self._path):
            self._write()

    def finish(self) -> None:
        """Write what is left to write."""
        self.flush()

    def _write(self) -> None:
        assert self._path is not None
        with self._writing():
            replace_text(self._path, "".join(f"{json.dumps(row)}\n" for row in self.history))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            gone = "it was removed while the run went on: start again"
            then = gone if isinstance(error, FileNotFoundError) else "earlier checkpoints are complete"
            raise UserError(f"{self._path}: cannot be written ({error.strerror}); {then}") from None


def read_metrics(path: Path, until: int) -> list[MetricsRow]:
    """Return the rows of the first `until` steps, without lines that are no rows.

    Raises `UserError` if the file cannot be read.
    """
    return [row for line in _read_lines(path) if (row := _read_row(line)) is not None and row["step"] <= until]


def list_damaged(path: Path) -> list[int]:
    """Return the numbers of lines, from 1, that are no rows. An incomplete last one, which a kill leaves, is none."""
    return [n for n, line in enumerate(_read_lines(path), 1) if line.endswith("\n") and _read_row(line) is None]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); make it a file that you may read, or remove it and go on "
            "without its rows"
        ) from None


def _read_row(line: str) -> MetricsRow | None:
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return None


class Validations(NamedTuple):
    """What the validations of a run came to so far. A loss that is equal to the best, or not finite, is no gain.

    Attributes:
        step: The step of the best validation; None before the first finite loss.
        loss: Its loss.
        since: The number of validations after it, or of all where none is the best.
    """

    step: int | None = None
    loss: float = math.inf
    since: int = 0

    def after(self, step: int, loss: float) -> "Validations":
        """Return this with one more validation."""
        return Validations(step, loss) if loss < self.loss else self._replace(since=self.since + 1)

    def exhaust(self, patience: int | None) -> bool:
        """Whether so many came without a gain that the run ends."""
        return patience is not None and self.since >= patience


def count_validations(rows: Iterable[MetricsRow]) -> Validations:
    """Return what rows of metrics.jsonl hold, in which a loss that is not finite is None."""
    found = Validations()
    for row in rows:
        if "val_loss" in row:
            found = found.after(row["step"], math.inf if row["val_loss"] is None else row["val_loss"])
    return found


def last_step(settings: Mapping[str, Any], rows: Iterable[MetricsRow]) -> int | None:
    """Return the step at which the run with these saved settings and rows ends; None where that is not known."""
    rows = list(rows)
    patience = settings.get("eval_patience")
    if isinstance(patience, int) and count_validations(rows).exhaust(patience):
        return rows[-1]["step"]
    return settings.get("steps")


def best_checkpoint(path: str | Path, key: str) -> RunPath:
    """Return the folder of the checkpoint with the lowest validation loss of a run, which the user set `key` to.

    Raises `UserError` where no validation has a loss, or the checkpoint of the best is not there any more.
    """
    named = folder_path(path, key)
    checkpoints, newest = find(named, key)
    if named != run_folder(named):
        raise UserError(f"{key}={path} names a checkpoint and checkpoint=best another; leave one of them out")
    # A run that goes on, or was killed, may have rows of a best checkpoint that is not complete.
    best = count_validations(read_metrics(checkpoints.parent / "metrics.jsonl", until=newest)).step
    if best is None:
        raise UserError(
            f"{key}={path} checkpoint=best: metrics.jsonl there has no validation loss up to step {newest}; leave "
            "checkpoint out for the newest one"
        )
    if best not in (saved := steps(checkpoints)):
        raise UserError(
            f"{key}={path} checkpoint=best: the best validation was that of step {best}, whose checkpoint is not "
            f"there; there are {', '.join(map(str, saved))}, as {key}={path}/checkpoints/STEP"
        )
    return checkpoints / str(best)
