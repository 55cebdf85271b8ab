"""TensorBoard: event files, which `tensorboard --logdir runs` shows.

tensorboardX writes them: pure Python over NumPy and protobuf, where `tensorboard` itself brings a server.
"""

# The library is an extra.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
import struct
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from moezoo.trackers.base import MetricsRow, RunStart, Tracker, Writer, numbers_in

# TensorBoard shows figures in groups, by what is before the first slash of their names; those not listed are `run`.
_GROUPS = {
    "loss": ("loss", "val_loss", "val_loss_by_source", "load_balance_loss", "z_loss"),
    "routing": ("mean_entropy", "lowest_entropy", "mean_violation", "max_violation", "experts_in_use"),
    "dropped": ("dropped", "dropped_by_layer"),
    "optimizer": ("grad_norm", "learning_rate", "skipped"),
    "speed": ("tokens_per_second", "seconds_waiting", "seconds_computing", "seconds_saving"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


def tag_of(name: str) -> str:
    """Return the name of a figure in TensorBoard."""
    return f"{_GROUP_OF.get(name.partition('/')[0], 'run')}/{name}"


@dataclasses.dataclass(frozen=True)
class TensorBoard(Tracker):
    """An event file in the folder `tensorboard` of the run, or with `folder` in a folder there with the run's name.

    A run that continues replaces its file by one that begins with the rows so far. TensorBoard has a way to hide
    events, but no way to find out whether a killed run wrote all of them.
    """

    library: ClassVar[str] = "tensorboardX"

    folder: str | None = None

    def start(self, run: RunStart) -> Writer:
        """Remove the events of this run, and write the rows so far."""
        folder = run.folder / "tensorboard" if self.folder is None else Path(self.folder).expanduser() / run.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
        return _Events(folder, run)


class _Events(Writer):
    def __init__(self, folder: Path, run: RunStart):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        self._event, self._summary = Event, Summary  # classes of tensorboardX
        self._file, self._last = EventsWriter(str(folder / "events")), 0
        for name, content in (("summary", run.text), ("config", run.yaml)):
            # Indented text is shown as it is.
            self._add(text(name, "\n".join(f"    {line}" for line in content.splitlines())), 0, None)
        for row in run.history:
            self._scalars(row)
        self._file.flush()

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Write its numbers."""
        del load
        self._scalars(row)
        self._file.flush()

    def picture(self, path: Path) -> None:
        """Write the picture at the last step."""
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])  # the first fields of a PNG file
        image = self._summary.Image(encoded_image_string=content, width=width, height=height, colorspace=4)
        self._add(
            self._summary(value=[self._summary.Value(tag=f"pictures/{path.stem}", image=image)]), self._last, None
        )

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def _scalars(self, row: MetricsRow) -> None:
        values = [
            self._summary.Value(tag=tag_of(name), simple_value=number) for name, number in numbers_in(row).items()
        ]
        self._last = row["step"]
        self._add(self._summary(value=values), row["step"], row.get("time"))

    def _add(self, summary: object, step: int, at: float | None) -> None:
        self._file.write_event(self._event(summary=summary, step=step, wall_time=time.time() if at is None else at))
