"""Reading and comparing training runs."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import moezoo
from moezoo.training import train as module
from moezoo.training.metrics import MEASURED
from moezoo.training.progress import Progress
from moezoo.training.sample import Sample

Row = dict[str, Any]


def repeatable(rows: list[Row]) -> list[Row]:
    """Return rows without the figures that the clock and the memory decide."""
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl without the figures that the clock and the memory decide."""
    return repeatable([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def train_and_print(*overrides: str, **options: Any) -> tuple[moezoo.Run, list[str]]:
    """Train, and return the run and the lines that it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = moezoo.train(moezoo.compose(*overrides), **options)
    return run, out.getvalue().splitlines()


@contextlib.contextmanager
def steps_only() -> Iterator[None]:
    """Runs end with their last step: what they would then draw and sample takes as long as compiling them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sample", lambda *_: Sample("", ""))
        for picture in ("loss_picture", "routing_picture", "load_picture"):
            patch.setattr(module, picture, lambda *_, **__: None)
        yield


def assert_same_models(one: Any, other: Any) -> None:
    """Every parameter is the same to the bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def train_with_signal(monkeypatch: Any, after: int, number: int, *overrides: str) -> moezoo.Stopped:
    """Train, send this process a signal in the middle of the loop after a step, and return what the run raises."""
    step = Progress.step

    def send(self: Progress, at: int) -> None:
        step(self, at)
        if at == after:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "step", send)
        try:
            moezoo.train(moezoo.compose(*overrides))
        except moezoo.Stopped as stopped:
            return stopped
    raise AssertionError("the run was not stopped")
