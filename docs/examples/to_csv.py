# In moezoo: moezoo/trackers/to_csv.py
import dataclasses

from moezoo.trackers import RunStart, Tracker, Writer


@dataclasses.dataclass(frozen=True)
class CSV(Tracker):
    """The file `figure.csv` in the folder of the run."""

    figure: str = "loss"

    def start(self, run: RunStart) -> Writer:
        """Begin the file anew with the rows so far."""
        writer = _File(run.folder / "figure.csv", self.figure)
        for row in run.history:
            writer.row(row, None)
        return writer


class _File(Writer):
    def __init__(self, path, figure):
        self._file, self._figure = path.open("w"), figure

    def row(self, row, load):
        """Write a line at once."""
        print(row["step"], row.get(self._figure, ""), sep=",", file=self._file, flush=True)

    def finish(self):
        """Close the file."""
        self._file.close()
