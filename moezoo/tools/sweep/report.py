"""What a sweep came to: the state of each of its runs, read from their folders, and the files that show it."""

import contextlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import moezoo.tables as tables
from moezoo.config.overrides import read_yaml
from moezoo.config.run_folders import steps
from moezoo.errors import UserError
from moezoo.tools.sweep.expand import Element, Sweep
from moezoo.training.files import replace_text, writing_to
from moezoo.training.metrics import read_metrics
from moezoo.training.pictures import Curve, runs_picture
from moezoo.training.reading import Figures, describe_unit, figures_of, read_folder
from moezoo.training.validations import last_step
from moezoo.typed import show

FAILURE = "error.txt"  # in the folder of a run that failed: its line
_TABLE, _TEXT, _PICTURE = "sweep.json", "sweep.md", "loss.png"
_SEED = "seed"
State = Literal["finished", "failed", "begun", "waiting"]


class Outcome(NamedTuple):
    """How far a run of a sweep is.

    Attributes:
        element: The run.
        state: "finished" with a validation loss of its last step; "failed"; "begun" and not finished; or "waiting".
        line: Why it failed, or how far it is; empty for the others.
        saved: The step of its newest checkpoint; None without one.
        last: The step at which it ends; None where a run with epochs has not begun.
        figures: What it came to.
    """

    element: Element
    state: State
    line: str
    saved: int | None
    last: int | None
    figures: Figures


class OverSeeds(NamedTuple):
    """The validation losses of runs that differ in their seed alone.

    Attributes:
        values: Key -> value, of the other keys of the sweep.
        count: The number of finished runs.
        mean: The mean of their validation losses.
        spread: Their standard deviation, of a sample; None of one run.
    """

    values: dict[str, Any]
    count: int
    mean: float
    spread: float | None


def find_outcome(folder: Path, element: Element, last: int | None) -> Outcome:
    """Return how far the run in `folder` is; `last` is the last step that it asks for, None where it is in epochs."""
    history = read_metrics(folder / "metrics.jsonl", until=sys.maxsize)
    saved = max(steps(folder / "checkpoints"), default=None)
    figures, failure = figures_of(history), folder / FAILURE
    with contextlib.suppress(UserError):  # of a run that has not begun, or a damaged file
        last = last_step(read_yaml(folder / "config.yaml"), history) or last
    final = next((row for row in history if row["step"] == last), {})
    state, line = "waiting", ""
    if saved is not None and saved == last:
        state = "finished"
        if "val_loss" not in final:
            evaluate = f"moezoo evaluate run_dir={folder} computes it"
            state, line = "failed", f"a signal ended its last evaluation, so it has no validation loss; {evaluate}"
        elif final["val_loss"] is None:
            state, line = "failed", "its validation loss is not finite"
    elif failure.is_file():
        state, line = "failed", failure.read_text(errors="replace").strip()
    elif saved is not None or (folder / "config.yaml").exists():
        state, line = "begun", f"at step {figures.step or 0} of {'?' if last is None else last}"
    return Outcome(element, state, line, saved, last, figures)


def rank(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return finished runs by their validation loss, the lowest first, and then the others by their number."""
    return sorted(outcomes, key=lambda each: (each.state != "finished", _loss(each), each.element.number))


def average_over_seeds(outcomes: Sequence[Outcome]) -> list[OverSeeds]:
    """Return the mean and the spread over seeds for each choice of the other keys, the lowest mean first."""
    together: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if each.state == "finished":
            together.setdefault(show(_without_seed(each.element.values)), []).append(each)
    found = []
    for runs in together.values():
        losses = [_loss(run) for run in runs]
        spread = statistics.stdev(losses) if len(losses) > 1 else None
        found.append(OverSeeds(_without_seed(runs[0].element.values), len(runs), statistics.fmean(losses), spread))
    return sorted(found, key=lambda each: each.mean)


def render(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of runs, why some failed, and the table over seeds if there are several, as Markdown."""
    rows, failures = [], []
    for place, each in enumerate(rank(outcomes)):
        best = " (best)" * (place == 0 and each.state == "finished")
        about = f"{each.state}{best}" if each.state != "begun" else each.line
        if each.state == "failed":
            failures.append(f"- run {each.element.number}: {each.line}")
        values = map(show, each.element.values.values())
        rows.append([str(each.element.number), *values, about, *_cells(each.figures)])
    header = ["run", *sweep.keys, "state", "validation", "training", "tokens/s", "skipped"]
    shown = tables.markdown(header, rows, right=range(len(sweep.keys) + 2, len(header)))
    lines = [*shown, *([""] if failures else []), *failures]
    if _SEED not in sweep.keys or not (averages := average_over_seeds(outcomes)):
        return lines
    keys = [key for key in sweep.keys if key != _SEED]
    rows = [
        [
            *(show(each.values[key]) for key in keys),
            str(each.count),
            f"{each.mean:.4f}",
            tables.cell(each.spread, ".4f"),
        ]
        for each in averages
    ]
    header = [*keys, "seeds", "validation, mean", "deviation"]
    return [*lines, "", *tables.markdown(header, rows, right=range(len(keys), len(header)))]


def write_report(folder: Path, sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Write the tables, and once a run has logged a loss the picture, into the folder of the sweep."""
    ranked = rank(outcomes)
    table = {
        "settings": sweep.settings,
        "keys": list(sweep.keys),
        "runs": [
            {**each.element._asdict(), "state": each.state, "line": each.line, **each.figures._asdict()}
            for each in ranked
        ],
        "over_seeds": [each._asdict() for each in average_over_seeds(outcomes)] if _SEED in sweep.keys else None,
    }
    settings = " ".join(f"{key}={value}" for key, value in sweep.settings.items())
    text = [f"# {folder.name}", "", f"All runs: `{settings}`", "", *render(sweep, outcomes)]
    drawn = [each for each in ranked if each.figures.step is not None]
    with writing_to("sweep_dir", folder):
        replace_text(folder / _TABLE, json.dumps(table, indent=2))
        if drawn:
            text += ["", f"![Losses of all runs]({_PICTURE})"]
            with contextlib.suppress(UserError):  # another task of the sweep may start one of them again meanwhile
                _draw(folder, drawn)
        replace_text(folder / _TEXT, "\n".join([*text, ""]))


def check_same(folder: Path, sweep: Sweep) -> None:
    """Raise `UserError` unless `folder` is new, or holds a sweep to which this one only adds runs."""
    with writing_to("sweep_dir", folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"sweep_dir={folder} is a file; name a folder")
        held = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
        if not held:
            return
    shown, other = f"sweep_dir={folder}", "name another folder"
    try:
        before = json.loads((folder / _TABLE).read_text())
        settings, keys, names = dict(before["settings"]), list(before["keys"]), [r["name"] for r in before["runs"]]
    except OSError:
        raise UserError(f"{shown} holds something else than a sweep (no {_TABLE}); {other}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{shown}: {_TABLE} is damaged; {other}, or remove that file if this is the same sweep"
        ) from None
    if keys != list(sweep.keys):
        raise UserError(
            f"{shown} holds a sweep over {show(keys)}, and this one is over {show(list(sweep.keys))}; {other}"
        )
    for key in {**settings, **sweep.settings}:
        old, new = settings.get(key), sweep.settings.get(key)
        if old != new:
            had, has = (f"no {key}" if value is None else f"{key}={value}" for value in (old, new))
            raise UserError(f"{shown} holds a sweep with {had}, and this one has {has}; {other}")
    if missing := sorted(set(names) - {element.name for element in sweep.elements}):
        raise UserError(
            f"{shown} has the run {missing[0]}, which is not one of this sweep; list its values too, or {other}"
        )


def _draw(folder: Path, ranked: Sequence[Outcome]) -> None:
    runs = [read_folder(folder / each.element.name, "sweep_dir") for each in ranked]
    tokens = [run.tokens_per_step for run in runs]
    same = len(set(tokens)) == 1 or None in tokens
    scales = [1.0 if same else float(each or 1) for each in tokens]
    curves = [Curve(each.element.name, run.history, n) for each, run, n in zip(ranked, runs, scales, strict=True)]
    best = 0 if ranked[0].state == "finished" else None
    unit = describe_unit(run.settings for run in runs)
    runs_picture(curves, folder / _PICTURE, across="training step" if same else "tokens read", unit=unit, best=best)


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != _SEED}


def _loss(outcome: Outcome) -> float:
    return float("inf") if outcome.figures.val_loss is None else outcome.figures.val_loss


def _cells(figures: Figures) -> list[str]:
    """Return figures as the table of a sweep has them."""
    speed, skipped = figures.tokens_per_second, figures.skipped
    return [
        tables.cell(figures.val_loss, ".4f"),
        tables.cell(figures.loss, ".4f"),
        tables.cell(speed, ",.0f"),
        tables.cell(skipped),
    ]
