"""What a sweep came to: the state of each of its runs, read from their folders, and the files that show it."""

import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import moezoo.tables as tables
from moezoo.config.overrides import read_yaml
from moezoo.config.run_folders import steps
from moezoo.errors import UserError
from moezoo.tools.compare import draw_losses, show_figures
from moezoo.tools.sweep.expand import Element, Sweep
from moezoo.training.files import replace_text, writing_to
from moezoo.training.metrics import read_metrics
from moezoo.training.reading import Figures, figures_of, read_folder
from moezoo.training.validations import last_step
from moezoo.typed import show

FAILURE = "error.txt"  # in the folder of a run that failed: its line
_TABLE, _TEXT, _PICTURE = "sweep.json", "sweep.md", "loss.png"
_SEED = "seed"


class Outcome(NamedTuple):
    """How far a run of a sweep is."""

    element: Element
    state: Literal["finished", "failed", "begun", "waiting"]  # finished: with a validation loss of its last step
    line: str  # why it failed, or how far it is; empty for the others
    saved: int | None  # the step of its newest checkpoint; None without one
    last: int | None  # the step at which it ends; None where a run with epochs has not begun
    figures: Figures


class OverSeeds(NamedTuple):
    """The validation losses of finished runs that differ in their seed alone."""

    values: dict[str, Any]  # key -> value, of the other keys of the sweep
    count: int  # of runs
    mean: float
    spread: float | None  # the standard deviation, of a sample; None of one run


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
    together: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for each in outcomes:
        if each.state == "finished":
            values = {key: value for key, value in each.element.values.items() if key != _SEED}
            together.setdefault(show(values), (values, []))[1].append(_loss(each))
    found = [
        OverSeeds(values, len(losses), statistics.fmean(losses), statistics.stdev(losses) if losses[1:] else None)
        for values, losses in together.values()
    ]
    return sorted(found, key=lambda each: each.mean)


def render(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of runs, why some failed, and the table over seeds if there are several, as Markdown."""
    rows, failures = [], []
    for place, each in enumerate(rank(outcomes)):
        best = " (best)" * (place == 0 and each.state == "finished")
        about = each.line if each.state == "begun" else f"{each.state}{best}"
        if each.state == "failed":
            failures.append(f"- run {each.element.number}: {each.line}")
        values = map(show, each.element.values.values())
        rows.append([str(each.element.number), *values, about, *show_figures(each.figures)[1:]])
    header = ["run", *sweep.keys, "state", "validation", "training", "tokens/s", "skipped"]
    shown = tables.markdown(header, rows, right=range(len(sweep.keys) + 2, len(header)))
    lines = [*shown, *([""] if failures else []), *failures]
    if _SEED not in sweep.keys or not (averages := average_over_seeds(outcomes)):
        return lines
    rows = [
        [*map(show, values.values()), str(count), f"{mean:.4f}", tables.cell(spread, ".4f")]
        for values, count, mean, spread in averages
    ]
    header = [*averages[0].values, "seeds", "validation, mean", "deviation"]
    return [*lines, "", *tables.markdown(header, rows, right=range(len(header) - 3, len(header)))]


def write_report(folder: Path, sweep: Sweep, last: Sequence[int | None]) -> list[Outcome]:
    """Write the tables, and once a run has logged a loss the picture, into the folder of the sweep.

    Returns what is shown: how far each run is, of which `last` are the last steps, as for `find_outcome`.
    """
    outcomes = [find_outcome(folder / e.name, e, last[e.number]) for e in sweep.elements]
    ranked = rank(outcomes)
    table = {
        "settings": sweep.settings,
        "keys": sweep.keys,
        "runs": [{**e.element._asdict(), "state": e.state, "line": e.line, **e.figures._asdict()} for e in ranked],
        "over_seeds": [each._asdict() for each in average_over_seeds(outcomes)] if _SEED in sweep.keys else None,
    }
    settings = " ".join(f"{key}={value}" for key, value in sweep.settings.items())
    text = [f"# {folder.name}", "", f"All runs: `{settings}`", "", *render(sweep, outcomes)]
    with writing_to("sweep_dir", folder):
        replace_text(folder / _TABLE, json.dumps(table, indent=2))
        if drawn := [each.element.name for each in ranked if each.figures.step is not None]:
            text += ["", f"![Losses of all runs]({_PICTURE})"]
            with contextlib.suppress(UserError):  # another task of the sweep may start one of them again meanwhile
                runs = {name: read_folder(folder / name, "sweep_dir") for name in drawn}
                tokens = {run.tokens_per_step for run in runs.values()}
                best = 0 if ranked[0].state == "finished" else None
                draw_losses(runs, folder / _PICTURE, by_tokens=len(tokens) > 1 and None not in tokens, best=best)
        replace_text(folder / _TEXT, "\n".join([*text, ""]))
    return outcomes


def check_same(folder: Path, sweep: Sweep) -> None:
    """Raise `UserError` unless `folder` is new, or holds a sweep to which this one only adds runs."""
    with writing_to("sweep_dir", folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"sweep_dir={folder} is a file; name a folder")
        if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
            return
    shown, other = f"sweep_dir={folder}", "name another folder"
    try:
        before = json.loads((folder / _TABLE).read_text())
        settings, keys, names = dict(before["settings"]), list(before["keys"]), {r["name"] for r in before["runs"]}
    except OSError:
        raise UserError(f"{shown} holds something else than a sweep (no {_TABLE}); {other}") from None
    except (ValueError, KeyError, TypeError):
        advice = f"{other}, or remove that file if this is the same sweep"
        raise UserError(f"{shown}: {_TABLE} is damaged; {advice}") from None
    held = ""
    if keys != list(sweep.keys):
        held = f"a sweep over {show(keys)}, and this one is over {show(list(sweep.keys))}"
    for key in {**settings, **sweep.settings}:
        had, has = (f"{key}={at[key]}" if key in at else f"no {key}" for at in (settings, sweep.settings))
        if had != has:
            held = held or f"a sweep with {had}, and this one has {has}"
    if held:
        raise UserError(f"{shown} holds {held}; {other}")
    if missing := sorted(names - {element.name for element in sweep.elements}):
        advice = f"list its values too, or {other}"
        raise UserError(f"{shown} has the run {missing[0]}, which is not one of this sweep; {advice}")


def _loss(outcome: Outcome) -> float:
    return float("inf") if outcome.figures.val_loss is None else outcome.figures.val_loss
