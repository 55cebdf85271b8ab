"""What `watch=true` draws, at any width, with and without colours and Unicode."""

import io
import sys

import numpy as np
import pytest
from rich.console import Console

from moezoo.training.progress import Progress
from moezoo.training.watch import LiveView, curve, load_lines, wrap

LOAD = np.array([[8, 0, 0, 0], [3, 3, 3, 3]])


def row_of(step, **more):
    seconds = {"seconds_waiting": 0.0, "seconds_computing": 0.3, "seconds_saving": 0.1}
    routing = dict.fromkeys(("mean_entropy", "lowest_entropy", "mean_violation", "max_violation"), 0.5)
    loss = {"loss": 4.0 / step, "tokens_per_second": 1234.0, "peak_bytes": 2**30, "experts_in_use": 1.0, "dropped": 0}
    return {"step": step, **loss, **seconds, **routing, **more}


def test_a_curve_falls_from_the_first_step_to_the_last():
    lines = curve([(1, 3.0), (11, 1.0)], 30, plain=True)
    assert lines[0].startswith("3.000 |*")
    assert lines[7].startswith("1.000 | ")
    assert lines[8] == f"{'':7}step 1{'11':>17}"
    columns = [[line[7 + x] for line in lines[:8]].index("*") for x in range(23)]
    assert columns == sorted(columns)
    assert "".join(lines[:8]).count("*") == 23
    fine = curve([(step, -float(step)) for step in range(100)], 30, plain=False)
    assert ord(fine[0][-21]) & 1  # its first dot
    assert ord(fine[7][-1]) & 128  # its last
    assert all(len(line) == 30 for line in fine)


def test_steps_that_share_a_column_are_averaged():
    lines = curve([(1, 3.0), (2, 1.0), (1000, 2.0)], 10, plain=True)
    empty = "      |   "
    assert lines[:8] == ["3.000 |   ", *[empty] * 3, "      |***", *[empty] * 2, "1.000 |   "]


def test_loads_are_relative_to_their_layer():
    assert load_lines(LOAD, (1, 3), 40, plain=True) == [
        "load of 4 experts (= mean)",
        "layer 1 @@@@            ",
        f"layer 3 {'=' * 16}",
    ]
    many = np.ones((20, 64), int)
    many[13, 5] = 500
    lines = load_lines(many, range(20), 40, plain=False)
    assert lines[0] == "load of 64 experts (▄ mean), 8 of 20 layers"
    assert max(map(len, lines[1:])) <= 40
    assert [line for line in lines if line.startswith("layer 13") and "█" in line]


def test_parts_are_not_broken():
    assert wrap(["aaa", "bb", "cccc"], 7) == ["aaa  bb", "cccc"]


@pytest.mark.parametrize(("width", "encoding"), [(100, "utf-8"), (40, "utf-8"), (40, "cp1252")])
def test_the_view_fits_the_terminal(width, encoding):
    """Also with a loss that is not finite, and with fewer characters."""
    view = LiveView((0, 1))
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(view)
    for row in (row_of(1), row_of(5, loss=float("nan")), row_of(9, val_loss=0.5)):
        view.row(row, LOAD)
        Console(file=file, width=width).print(view)
    file.flush()
    text = file.buffer.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= width
    for part in ("loss 0.4444", "validation 0.5000 at step 9", "1,234 tokens/s", "memory 1.0 GiB", "saving 25%"):
        assert part in text
    assert any(0x2800 < ord(character) < 0x2900 for character in text) == (encoding == "utf-8")


def show(monkeypatch, term, *, terminal=True, encoding="utf-8"):
    """Return what two rows of a run with `watch=true` print."""
    for name, value in {"TERM": term, "COLUMNS": "40", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", stream)
    with Progress(0, 9, bound=None, layers=(1, 3), watch=True) as progress:
        for step in (1, 9):
            progress.row(row_of(step), LOAD)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_a_terminal_shows_the_view_and_no_lines(monkeypatch):
    for encoding in ("utf-8", "cp1252"):
        text = show(monkeypatch, "xterm", encoding=encoding)
        assert "step 9/9" in text
        assert "layer 3" in text
        assert "entropy" not in text
        assert "\x1b[3" not in text  # no colour


@pytest.mark.parametrize(("term", "terminal"), [("xterm", False), ("dumb", True)])
def test_elsewhere_it_is_a_line_per_row(monkeypatch, term, terminal):
    lines = show(monkeypatch, term, terminal=terminal).splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["step 1/9", "loss 4.0000"], ["step 9/9", "loss 0.4444"]]
    assert lines[0].endswith("0:00 left")
