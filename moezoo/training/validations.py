"""The validations of a run: which was the best, and how many came after it without a lower loss."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.config.compose import folder_path
from moezoo.config.run_folders import find, run_folder, steps
from moezoo.errors import UserError
from moezoo.remote import RunPath
from moezoo.trackers import MetricsRow
from moezoo.training.metrics import read_metrics


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
