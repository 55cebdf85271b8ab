"""Reading what runs have written, as far as they went, and the figures by which runs are compared."""

import json
import math
import statistics
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moezoo.config.overrides import read_yaml
from moezoo.config.run_folders import run_folder
from moezoo.errors import UserError
from moezoo.training.metrics import MetricsRow, last_step, read_metrics
from moezoo.typed import flatten, show

_FIGURES_SHARE = 1 / 10  # the training loss of a run is the mean of this share of its logged steps, the last ones


class Figures(NamedTuple):
    """What a run came to; None for what it has not logged.

    Attributes:
        step: The last logged step.
        val_loss: The newest validation loss.
        loss: The mean training loss of the last tenth of the logged steps.
        tokens_per_second: The median of the logged steps.
        skipped: The number of steps whose update was not applied.
    """

    step: int | None
    val_loss: float | None
    loss: float | None
    tokens_per_second: float | None
    skipped: int | None


class ReadRun(NamedTuple):
    """A run as its folder shows it.

    Attributes:
        folder: The run folder.
        settings: Dotted key -> value; empty if the configuration cannot be read.
        history: The rows of metrics.jsonl, of each the values that are finite numbers.
        notes: What is wrong with the folder, a line each.
        last: The step at which the run ends; None where that is not known.
    """

    folder: Path
    settings: Mapping[str, Any] = types.MappingProxyType({})
    history: Sequence[MetricsRow] = ()
    notes: Sequence[str] = ()
    last: int | None = None

    @property
    def figures(self) -> Figures:
        """What the run came to."""
        return figures_of(self.history)

    @property
    def tokens_per_step(self) -> int | None:
        """The tokens of a step, padding included; None where the configuration does not show it."""
        rows, length = self.settings.get("batch_size"), self.settings.get("seq_len")
        return rows * length if isinstance(rows, int) and isinstance(length, int) else None


def read_folder(named: str | Path, key: str) -> ReadRun:
    """Read a run folder, which the user set `key` to. Damaged files are read as far as they can be, with a note.

    Raises `UserError` if there is no run.
    """
    folder = run_folder(named)
    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    try:
        if not config.is_file() and not metrics.is_file():
            raise UserError(
                f"{key}={show(str(named))}: no run there (neither config.yaml nor metrics.jsonl); name a run's folder"
            )
        history = read_metrics(metrics, until=sys.maxsize)
        lines = len(metrics.read_bytes().decode(errors="replace").splitlines()) if metrics.is_file() else 0
    except OSError as error:
        raise UserError(f"{key}={show(str(named))}: cannot be read ({error.strerror}); name another run") from None
    notes = []
    try:
        settings = flatten(read_yaml(config))
    except UserError as error:
        settings, notes = {}, [f"{error}; its settings are not compared"]
    if lost := lines - len(history):
        notes.append(f"{metrics}: {lost} line{'s' * (lost > 1)} cannot be read")
    planned = last_step(settings, history)
    history = [clean for row in history if "step" in (clean := _numbers(row))]
    last = max((row["step"] for row in history), default=0)
    if isinstance(planned, int) and last < planned:
        notes.append(f"{folder}: not finished, at step {last} of {planned}")
    return ReadRun(folder, settings, history, notes, planned)


def figures_of(history: Sequence[MetricsRow]) -> Figures:
    """Return what the rows of a run come to."""
    rows = [_numbers(row) for row in history]  # a loss that is not finite is not a figure

    def column(key: str) -> list[float]:
        return [row[key] for row in rows if key in row]

    losses, speeds, skipped = column("loss"), column("tokens_per_second"), column("skipped")
    late = losses[-max(1, round(len(losses) * _FIGURES_SHARE)) :]
    return Figures(
        step=rows[-1]["step"] if rows else None,
        val_loss=(column("val_loss") or [None])[-1],
        loss=statistics.fmean(late) if late else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        skipped=int(skipped[-1]) if skipped else None,
    )


def unit_of(settings: Mapping[str, Any]) -> str | None:
    """Return what a token of a run is, "byte" or "token"; None where its settings do not show it."""
    sources = [key.removesuffix("name") for key in settings if key.startswith("data.") and key.endswith(".name")]
    for at in sorted(sources, key=len, reverse=True):  # of a mixture, those in it
        name = settings[f"{at}name"]
        if name == "mixture":
            continue
        if name == "tokens":
            return _unit_of_file(str(settings.get(f"{at}path")))
        of_bytes = name == "python_stdlib" or settings.get(f"{at}tokenizer", "") is None
        return "byte" if of_bytes else "token"
    return None


def describe_unit(settings: Iterable[Mapping[str, Any]]) -> str:
    """Return the unit of losses: that of all runs, or "nats" where they differ."""
    units = {unit_of(each) for each in settings} - {None}
    return f"nats per {units.pop()}" if len(units) == 1 else "nats"


def _numbers(row: MetricsRow) -> MetricsRow:
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _unit_of_file(path: str) -> str:
    """Return the unit that the description beside a file of tokens states."""
    try:
        return (
            "byte"
            if json.loads(Path(path).expanduser().with_suffix(".json").read_text())["unit"] == "byte"
            else "token"
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return "token"
