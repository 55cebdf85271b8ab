"""Who receives what a run reports, and the contract of the configuration group `tracker`."""

import abc
import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import yaml

from moezoo.errors import UserError
from moezoo.typed import Size, check_fields

MetricsRow = dict[str, Any]  # of metrics.jsonl; docs/numbers.md defines its keys


class Writer(abc.ABC):
    """Receives what a run reports, on the first process: rows in the order of their steps, then pictures, then the end.

    Of a run that continues, the rows are those after its checkpoint; `RunStart` has the rows before.
    """

    @abc.abstractmethod
    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Receive a logged row, which is not to be changed.

        Args:
            row: Its losses, the figures of routing, the seconds per step and the memory; that of step 0, before the
                first step, has a validation loss alone.
            load: The assignments of the row's step per [MoE layer, expert]; None with the row of step 0.
        """

    def picture(self, path: Path) -> None:
        """Receive a picture of the run, a PNG file in its folder."""
        del path

    def flush(self) -> None:  # noqa: B027  (nothing to do by default)
        """Write the rows so far: a checkpoint after them follows."""

    def finish(self) -> None:  # noqa: B027  (nothing to do by default)
        """Write what is left; nothing follows. It is called also after an error or a signal."""


class RunStart(NamedTuple):
    """What is known of a run when it writes its first row.

    Attributes:
        folder: The folder of the run.
        config: The resolved configuration, as in config.yaml.
        summary: The title and text of each line that is printed before step 1.
        history: The rows up to the step from which the run continues; empty for a new run.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Sequence[tuple[str, str]]
    history: Sequence[MetricsRow]

    @property
    def text(self) -> str:
        """The lines of the summary."""
        return "\n".join(f"{title:<12}{line}" for title, line in self.summary)

    @property
    def yaml(self) -> str:
        """The configuration as YAML."""
        return yaml.safe_dump(dict(self.config), sort_keys=False)


class Tracker(abc.ABC):
    """Where rows go besides the folder of the run; each entry of the group `tracker` is a frozen dataclass.

    A tracker works on a thread of its own: one that is slow, waits forever or raises ends or delays no run. An entry
    that lets users set `folder` or `finish_seconds` declares it as a field.

    Attributes:
        library: What must be installed, which is also the name of moezoo's extra; None for nothing.
        folder: Where it writes; None for the folder of the run.
        finish_seconds: How long the end of the run waits for it.
    """

    library: ClassVar[str | None] = None
    folder: str | None = None
    finish_seconds: Size = 30

    def __post_init__(self):
        check_fields("tracker", self)

    def check(self) -> None:
        """Raise `UserError` where this tracker cannot work here. It is called before anything else runs."""
        extra = type(self).__name__.lower()
        if self.library is not None and importlib.util.find_spec(self.library) is None:
            raise UserError(f"tracker={extra} needs {self.library}; pip install 'moezoo[{extra}]', or leave it out")

    @abc.abstractmethod
    def start(self, run: RunStart) -> Writer:
        """Begin, or go on after the rows of `run.history`, and return what receives the later ones.

        Rows after those may be there already, of a run that was killed. In the end each step must be there once.
        """

    def active(self) -> Mapping[str, "Tracker"]:
        """Return the trackers that this one stands for, by name; {"": self} for itself."""
        return {"": self}


@dataclasses.dataclass(frozen=True)
class NoTracker(Tracker):
    """None: only the folder of the run has the rows."""

    def start(self, run: RunStart) -> Writer:
        """Raise: nothing starts."""
        raise NotImplementedError

    def active(self) -> Mapping[str, Tracker]:
        """Return none."""
        return {}


def numbers_in(row: MetricsRow) -> dict[str, float]:
    """Return the finite numbers of a row by name, except its step and time; those inside others as NAME/INNER."""
    found = {}
    for key, value in row.items():
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for name, number in {key: value, **{f"{key}/{name}": each for name, each in inner}}.items():
            if isinstance(number, int | float) and math.isfinite(number) and key not in ("step", "time"):
                found[name] = float(number)
    return found
