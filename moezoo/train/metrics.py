"""`metrics.jsonl`: a row a logged step, each written whole by one write."""

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to a file and keeps them in `history`."""

    def __init__(self, path: Path, history: list[Row]):
        """Starts the file with the rows of `history`, replacing what is there."""
        self.history = list(history)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in history))
        os.replace(temporary, path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, row: Row) -> None:
        """Add a row; floats are written in full, so reading gives the same bits."""
        self.history.append(row)
        os.write(self._file, _line(row).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def read_metrics(path: Path, until: int) -> list[Row]:
    """The rows of the first `until` steps; a torn one, which a killed run can leave, is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= until:
            rows.append(row)
    return rows
