"""Progress while something runs: a bar on a terminal, and the batches of an evaluation."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import moezoo.interrupts as interrupts

_SIMPLE = ("dumb", "unknown")  # values of TERM: the cursor cannot move
BAR = 10  # columns
_SECONDS = 30.0  # between two lines about an evaluation where there is no terminal

# Receives the number of batches that are computed and the number of all; called before each batch and at the end.
OnBatch = Callable[[int, int], object]


@contextlib.contextmanager
def bar_on(stream: TextIO, below: Any = None) -> Iterator[Any]:
    """Yield a bar whose tasks have a `unit`, while the block runs; None if `stream` is not a terminal, or a simple one.

    `below`, which rich can draw, is shown below the bar, and drawn again four times a second.
    """
    if not stream.isatty() or os.environ.get("TERM") in _SIMPLE:
        yield None
        return
    from rich import console, live, progress, table, text

    class Left(progress.ProgressColumn):
        def render(self, task: progress.Task) -> text.Text:
            done, todo = task.completed - task.fields.get("begun", 0), (task.total or 0) - task.completed
            return text.Text(f"{time_left(task.elapsed or 0.0, done, todo)} left", no_wrap=True)

    terminal = console.Console(file=stream)
    bar = progress.Progress(
        progress.TextColumn("{task.fields[unit]} {task.completed:.0f}/{task.total:.0f}"),
        progress.BarColumn(BAR),
        # The description alone gives way where a terminal is narrow.
        progress.TextColumn("{task.description}", table_column=table.Column(no_wrap=False)),
        Left(table.Column(no_wrap=True)),
        console=terminal,
    )
    shown = bar if below is None else live.Live(console.Group(bar, below), console=terminal)
    # Show the cursor again, which a bar hides; written directly, because the bar may hold its lock.
    with interrupts.undoing(lambda: os.write(stream.fileno(), b"\x1b[?25h")), shown:
        yield bar


def time_left(elapsed: float, done: float, todo: float) -> str:
    """Return how long `todo` takes if it goes on as it did: `done` took `elapsed` seconds, pauses included."""
    if done <= 0:
        return "-:--"
    whole = round(elapsed / done * todo)
    hours, minutes, seconds = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class BatchCounter:
    """Shows how far an evaluation is, as an `OnBatch`: in `bar`, or else as a line for `write` every 30 seconds."""

    def __init__(self, bar: Any, write: Callable[[str], object]):
        self._bar, self._write, self._task, self._noted = bar, write, None, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._noted = now
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=total, unit="evaluation: batch")
            self._bar.update(self._task, completed=done)
            if done == total:
                self._bar.remove_task(self._task)
                self._task = None
        elif now - self._noted >= _SECONDS and done < total:
            self._noted = now
            self._write(f"evaluation: {done} of {total} batches")
