"""A tracker works on a thread of its own: the run waits for it only at its end, and only for a time."""

import time

import numpy as np
import pytest
from recorders import Raiser, Recorder, Sleeper, forever

from moezoo.trackers import RunStart, numbers_in
from moezoo.trackers.background import MOST_ROWS, Background

LOAD = np.ones((2, 4), int)
WAITED = 30  # seconds that a run takes only if it waits for a tracker


@pytest.fixture(autouse=True)
def _threads_end():
    forever.clear()
    yield
    forever.set()


@pytest.fixture
def run(tmp_path):
    return RunStart(tmp_path, {"steps": 3}, [("model", "small")], [{"step": 1, "loss": 4.0}])


def test_everything_arrives_in_order(run, tmp_path):
    lines = []
    writer = Background(Recorder(), run, lines.append)
    before = len(Recorder.kept)
    for step in (2, 3):
        writer.row({"step": step}, LOAD)
    writer.picture(tmp_path / "loss.png")
    writer.finish()
    (kept,) = Recorder.kept[before:]
    assert kept.run == run
    assert [row["step"] for row in kept.rows] == [1, 2, 3]
    assert kept.calls == [("row", (2, 4)), ("row", (2, 4)), ("picture", "loss.png"), ("finish", None)]
    assert lines == []


def test_a_run_that_ends_before_its_first_row_starts_no_tracker(run):
    before = len(Recorder.kept)
    Background(Recorder(), run, print).finish()
    assert len(Recorder.kept) == before


def test_a_tracker_that_waits_forever_is_off_at_the_end(run):
    lines, began = [], time.monotonic()
    writer = Background(Sleeper(), run, lines.append)
    for step in range(50):
        writer.row({"step": step}, LOAD)
    writer.finish()
    assert time.monotonic() - began < WAITED
    assert lines == ["is off: it did not finish within 1 s; metrics.jsonl has all rows"]


def test_a_tracker_that_falls_behind_is_off(run):
    lines, began = [], time.monotonic()
    writer = Background(Sleeper(finish_seconds=2 * WAITED), run, lines.append)
    for step in range(MOST_ROWS + 3):
        writer.row({"step": step}, LOAD)
    writer.finish()
    assert time.monotonic() - began < WAITED
    assert [line.partition(";")[0] for line in lines] == ["is off: it is more than 1,000 rows behind"]


@pytest.mark.parametrize(
    ("when", "why"),
    [
        ("start", "ValueError: no such project"),
        ("row", "RuntimeError: the server has gone"),
        ("finish", "SystemExit: no place left"),
    ],
)
def test_a_tracker_that_raises_is_off(run, when, why):
    lines = []
    writer = Background(Raiser(when), run, lines.append)
    for step in range(2, 8):
        writer.row({"step": step}, LOAD)
        time.sleep(0.01)
    writer.finish()
    assert [line.partition(";")[0] for line in lines] == [f"is off: {why}"]


def test_numbers_of_a_row():
    row = {"step": 3, "time": 9.0, "loss": None, "grad_norm": float("nan"), "skipped": 0, "by": {"a": 1, "b": None}}
    assert numbers_in(row | {"layers": [2, 0]}) == {"skipped": 0, "by/a": 1, "layers/0": 2, "layers/1": 0}
