"""`metrics.jsonl`: one row per logged step, each written by a single call."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moezoo.errors import UserError
from moezoo.remote import is_url
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
