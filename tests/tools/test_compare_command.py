"""`moezoo compare`: curves, settings that differ, and what cannot be compared."""

import json
from pathlib import Path

import numpy as np
import pytest

from moezoo.training.pictures import draw_runs
from moezoo.training.reading import ReadRun, figures_of, read_folder, unit_of

BYTES = {"name": "python_stdlib"}
SIZES = {"batch_size": 2, "seq_len": 8, "data.name": "python_stdlib"}


def run(name: str, losses, val_losses=(), *, steps: int | None = None, data=BYTES, seed: int = 0, **sizes: int) -> str:
    """Write a run folder; `val_losses` are those of the last steps."""
    settings = {"batch_size": 2, "seq_len": 8, **sizes, "steps": steps or len(losses), "seed": seed, "data": data}
    rows = [
        {"step": step, "loss": loss, "tokens_per_second": 10.0 * step, "skipped": step // 4}
        for step, loss in enumerate(losses, 1)
    ]
    for row, val_loss in zip(rows[len(rows) - len(val_losses) :], val_losses, strict=True):
        row["val_loss"] = val_loss
    Path(name).mkdir(parents=True)
    Path(name, "config.yaml").write_text(json.dumps(settings))  # which is YAML too
    Path(name, "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


def compare(console, *arguments: str) -> tuple[list[list[str]], list[str]]:
    """Return the cells of the table that is printed, row by row, and the notes."""
    code, out, err = console("compare", *arguments)
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[0] == "|"]
    return cells, [line for line in out.splitlines() if line.startswith("note: ")]


def test_what_differs_and_the_last_figures(console):
    run("runs/a", [5.0, 4.0, 3.0, 2.0, 2.5], [2.75])
    run("runs/b", [5.0, 4.5], [4.25, 4.0], seed=1)
    cells, notes = compare(console, "runs/a", "runs/b", "out=new/both.png")
    del cells[1]  # the line below the header
    assert cells == [
        ["", "a", "b"],
        ["steps", "5", "2"],
        ["seed", "0", "1"],
        ["last logged step", "5", "2"],
        ["validation loss", "2.7500", "4.0000"],
        ["training loss", "2.5000", "4.5000"],
        ["tokens per second", "30", "15"],
        ["skipped steps", "1", "0"],
    ]
    assert notes == []
    assert Path("new/both.png").read_bytes().startswith(b"\x89PNG")
    compare(console, "runs/a", "runs/b")
    assert Path("compare.png").exists()


def test_the_training_loss_is_a_mean_of_the_last_tenth_and_what_is_not_finite_is_left_out():
    rows = [{"step": step, "loss": float(step), "val_loss": None} for step in range(1, 31)]
    assert figures_of(rows).loss == 29.0
    assert figures_of(rows).val_loss is None
    assert figures_of([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 3.0}]).loss == 3.0
    assert figures_of([]) == (None, None, None, None, None)


def test_curves_smooth_training_and_emphasise_the_best():
    rows = [{"step": step, "loss": 3.0 + (-1) ** step, "val_loss": 3.0} for step in range(1, 31)]
    one = {"a": ReadRun(Path("a"), SIZES, rows[:4]), "b": ReadRun(Path("b"), SIZES, rows)}
    raw, _, smooth, val = draw_runs(one, by_tokens=True).axes[0].get_lines()
    np.testing.assert_array_equal(raw.get_ydata(), [2.0, 4.0, 2.0, 4.0])
    assert np.nanmax(np.abs(smooth.get_ydata() - 3)) <= 1 / 3 + 1e-12  # of three values
    assert val.get_xdata()[-1] == 30 * 16
    axes = draw_runs(one, by_tokens=False, best=1).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", "cross-entropy, nats per byte")
    lines = axes.get_lines()
    assert lines[3].get_xdata()[-1] == 30
    assert [line.get_label() for line in lines][1::2] == ["a (3.000)", "best: b (3.000)"]
    assert lines[3].get_linewidth() > lines[1].get_linewidth()
    assert lines[3].get_alpha() > lines[1].get_alpha()


def test_a_run_that_diverges_does_not_hide_the_others():
    rows = {loss: [{"step": 1, "loss": 5.0}, {"step": 2, "loss": loss}] for loss in (4.0, 1e9)}
    runs = {str(loss): ReadRun(Path("a"), {}, history) for loss, history in rows.items()}
    assert draw_runs(runs, by_tokens=False).axes[0].get_ylim()[1] < 6


def test_other_units_data_and_batches_are_noted(console):
    run("a", [3.0], [3.0])
    run("b", [3.0], [3.0], data={"name": "text", "tokenizer": "t.json"}, batch_size=4)
    _, (units, data, tokens) = compare(console, "a", "b")
    assert "nats per byte (a), token (b)" in units
    assert "data.name" in data
    assert "16 (a), 32 (b)" in tokens
    assert "by=tokens" in tokens
    assert len(compare(console, "a", "b", "by=tokens")[1]) == 2


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        (BYTES, "byte"),
        ({"name": "text", "tokenizer": None}, "byte"),
        ({"name": "jsonl", "tokenizer": "t.json"}, "token"),
        ({"name": "synthetic", "vocab": 8}, "token"),
        ({"name": "tokens", "path": "bytes.npy"}, "byte"),
        ({"name": "tokens", "path": "gone.npy"}, "token"),
        ({"name": "mixture", "sources": {"a": {"name": "text", "tokenizer": "t.json", "weight": 1}}}, "token"),
        ({"name": "mixture", "sources": {"a": BYTES}}, "byte"),
    ],
)
def test_units(data, unit):
    Path("bytes.json").write_text('{"unit": "byte"}')
    assert unit_of(read_folder(run("a", [3.0], data=data), "runs").settings) == unit
    assert unit_of({}) is None


def test_unfinished_and_damaged_runs_are_read_as_far_as_they_go(console):
    run("a", [3.0, 2.0], steps=7)
    run("b", [3.0, 2.0], [2.5])
    with Path("b/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "loss": "much", "val_loss": true}\n\xff\xfe\n[1]\n{"step": 4, "lo')
    Path("b/config.yaml").write_text("batch_size: [")
    cells, (unfinished, settings, rows) = compare(console, "a", "b")
    assert "step 2 of 7" in unfinished
    assert "b/config.yaml: broken YAML" in settings
    assert "b/metrics.jsonl: 3 lines" in rows
    assert ["validation loss", "", "2.5000"] in cells
    code, _, err = console("compare", "a", "b", "by=tokens")
    assert (code, "b/config.yaml" in err, "by=steps" in err) == (2, True, True)


def test_runs_of_one_name_have_longer_names(console):
    run("x/a", [3.0])
    run("y/a", [3.0])
    header, *_ = console("compare", "x/a", "y/a/checkpoints/1")[1].splitlines()
    assert header.split() == ["|", "|", "x/a", "|", "y/a", "|"]
