"""The progress of a run: a bar on a terminal, with curves if they are asked for, or a line per row."""

import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from moezoo.parallel import distributed
from moezoo.terminal.progress import BAR, BatchCounter, bar_on, time_left
from moezoo.trackers import MetricsRow, Writer
from moezoo.training.watch import LiveView, wrap

_LEAST = 20  # columns of figures beside the bar


class Progress(Writer):
    """A bar with loss, tokens per second and time left on a terminal; elsewhere one plain line per logged step.

    `batches` shows the batches of an evaluation. Of several processes only the first prints.
    """

    def __init__(self, first: int, steps: int, *, bound: str | None, layers: Sequence[int], watch: bool = False):
        """Prepare for the steps after `first`.

        `bound` is the name of the strategy's option that may drop assignments, if it has one; `layers` are the numbers
        of the layers with experts. With `watch`, curves and figures are drawn below the bar.
        """
        self._steps, self._bound, self._warned = steps, bound, False
        self._view = LiveView(layers) if watch else None
        self._first, self._bar, self._task = first, None, None
        self._held = contextlib.ExitStack()
        self._quiet = not distributed.is_first()

    def __enter__(self) -> "Progress":
        if not self._quiet:
            self._bar = self._held.enter_context(bar_on(sys.stdout, self._view))
        if self._bar is not None:
            self._task = self._bar.add_task(
                "", total=self._steps, completed=self._first, unit="step", begun=self._first
            )
        self._began = time.monotonic()
        self.batches = BatchCounter(self._bar, self.print)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _warn(self, row: MetricsRow, assignments: int) -> None:
        self._warned = True
        layers = " ".join(map(str, row["dropped_by_layer"]))
        self.print(
            f"warning: step {row['step']} dropped {row['dropped']:,} of {assignments:,} assignments "
            f"(per layer {layers}); raise dispatch.{self._bound}, or set it to null to drop none"
        )

    def report_skipped(self, step: int, loss: float, norm: float) -> None:
        """Warn that a step was skipped."""
        self.print(f"warning: step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g}; it changed nothing")

    def step(self, step: int) -> None:
        """Show that a step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, row: MetricsRow, load: np.ndarray | None) -> None:
        """Print a logged row; warn the first time that some of the assignments of its step are dropped."""
        if "loss" not in row:  # of the evaluation before the first step
            text, self._began = f"validation {row['val_loss']:.4f}", time.monotonic()
            if self._bar is not None:
                self._bar.reset(self._task, description=text)  # its clock, too, is that of steps
            else:
                self.print(f"step {row['step']}/{self._steps}  {text}")
            return
        assignments = 0 if load is None else int(load.sum())
        parts = [f"loss {row['loss']:.4f}"]
        if row["dropped"]:
            parts.append(f"dropped {row['dropped'] / assignments:.1%}")
            if not self._warned:
                self._warn(row, assignments)
        if "val_loss" in row:
            parts.append(f"validation {row['val_loss']:.4f}")
        parts += [*_routing(row), f"{row['tokens_per_second']:,.0f} tokens/s"]
        if self._view is not None:
            self._view.row(row, load)
        if self._bar is not None and self._view is not None:
            self._bar.update(self._task, completed=row["step"])
        elif self._bar is not None:
            # Beside the count of steps, the bar and the time left, with a space behind each.
            others = len(f"step {self._steps}/{self._steps}") + BAR + len("00:00:00 left") + 3
            lines = wrap(parts, max(self._bar.console.width - others, _LEAST))
            self._bar.update(self._task, completed=row["step"], description="\n".join(lines))
        else:
            step, elapsed = row["step"], time.monotonic() - self._began
            left = time_left(elapsed, step - self._first, self._steps - step)
            self.print("  ".join([f"step {step}/{self._steps}", *parts, f"{left} left"]))

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line)
        elif not self._quiet:
            print(line, flush=True)


def _routing(row: MetricsRow) -> list[str]:
    """Return how evenly experts are used: means over layers, each before the layer that is farthest from balance."""
    return [
        f"entropy {row['mean_entropy']:.2f}/{row['lowest_entropy']:.2f}",
        f"violation {row['mean_violation']:.2f}/{row['max_violation']:.2f}",
        f"used {int(100 * row['experts_in_use'])}%",
    ]
