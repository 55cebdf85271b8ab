"""The runs of a sweep: trained one after the other, how far each is, and the files that show what they came to."""

import contextlib
import functools
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import moezoo.interrupts as interrupts
import moezoo.terminal.tables as tables
from moezoo.config import overrides
from moezoo.config.run_folders import AUTO, steps, trainer
from moezoo.errors import UserError, describe_end
from moezoo.tools.compare import show_figures
from moezoo.tools.sweep.expand import Element, Sweep
from moezoo.training.files import replace_text, writing_to
from moezoo.training.pictures import runs_picture
from moezoo.training.reading import ReadRun, read_folder
from moezoo.typed import show

SOME_FAILED = 4
# The exit codes of a run that end the sweep: of a signal that the user sent, and of output without a reader.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 141)
_TABLE, _TEXT, _PICTURE = "sweep.json", "sweep.md", "loss.png"
_FAILURE = "error.txt"  # in the folder of a run that failed: its line
_SEED = "seed"


class Outcome(NamedTuple):
    """How far a run of a sweep is."""

    element: Element
    state: Literal["finished", "failed", "begun", "waiting"]  # finished: with a validation loss of its last step
    line: str  # why it failed, or how far it is; empty for the others
    saved: int | None  # the step of its newest checkpoint; None without one
    is_complete: bool  # whether no step is left
    run: ReadRun  # without settings and rows if it has not begun

    @property
    def loss(self) -> float:
        """The validation loss of a finished run; infinity of another."""
        loss = self.run.figures.val_loss
        return math.inf if loss is None or self.state != "finished" else loss


class OverSeeds(NamedTuple):
    """The validation losses of finished runs that differ in their seed alone."""

    values: dict[str, Any]  # key -> value, of the other keys of the sweep
    count: int  # of runs
    mean: float
    spread: float | None  # the standard deviation, of a sample; None of one run


def find_outcome(folder: Path, element: Element) -> Outcome:
    """Return how far the run in `folder` is."""
    run, saved = ReadRun(folder), max(steps(folder / "checkpoints"), default=None)
    with contextlib.suppress(UserError):  # it has not begun, or another task of the sweep starts it again
        run = read_folder(folder, "sweep_dir")
    state, line = "waiting", ""
    if is_complete := saved is not None and saved == run.last:
        state = "finished"
        if not any("val_loss" in row for row in run.history if row["step"] == saved):
            state, line = "failed", f"it has no finite validation loss; moezoo evaluate run_dir={folder} computes it"
    elif (folder / _FAILURE).is_file():
        state, line = "failed", (folder / _FAILURE).read_text(errors="replace").strip()
    elif saved is not None or run.settings:
        state, line = "begun", f"at step {run.figures.step or 0} of {run.last or '?'}"
    return Outcome(element, state, line, saved, is_complete, run)


def average_over_seeds(outcomes: Sequence[Outcome]) -> list[OverSeeds]:
    """Return the mean and the spread over seeds for each choice of the other keys, the lowest mean first."""
    together: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for each in outcomes:
        if each.state == "finished":
            values = {key: value for key, value in each.element.values.items() if key != _SEED}
            together.setdefault(show(values), (values, []))[1].append(each.loss)
    found = [
        OverSeeds(values, len(losses), statistics.fmean(losses), statistics.stdev(losses) if losses[1:] else None)
        for values, losses in together.values()
    ]
    return sorted(found, key=lambda each: each.mean)


def write_report(folder: Path, sweep: Sweep) -> list[Outcome]:
    """Write the tables, and once a run has logged a loss the picture, into the folder of the sweep.

    Returns how far each run is: finished ones by their validation loss, the lowest first, then the others by number.
    """
    outcomes = [find_outcome(folder / element.name, element) for element in sweep.elements]
    outcomes.sort(key=lambda each: (each.loss, each.element.number))
    averages = [each._asdict() for each in average_over_seeds(outcomes)] if _SEED in sweep.keys else None
    runs = [{**e.element._asdict(), "state": e.state, "line": e.line, **e.run.figures._asdict()} for e in outcomes]
    table = {"settings": sweep.settings, "keys": sweep.keys, "runs": runs, "over_seeds": averages}
    settings = " ".join(f"{key}={value}" for key, value in sweep.settings.items())
    text = [f"# {folder.name}", "", f"All runs: `{settings}`", "", *render(sweep, outcomes)]
    with writing_to("sweep_dir", folder):
        replace_text(folder / _TABLE, json.dumps(table, indent=2))
        if drawn := {each.element.name: each.run for each in outcomes if each.run.history}:
            text += ["", f"![Losses of all runs]({_PICTURE})"]
            best = 0 if outcomes[0].state == "finished" else None
            runs_picture(drawn, folder / _PICTURE, by_tokens=False, best=best)
        replace_text(folder / _TEXT, "\n".join([*text, ""]))
    return outcomes


def render(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of runs, why some failed, and the table over seeds if there are several, as Markdown."""
    rows, failures = [], []
    for place, each in enumerate(outcomes):
        best = " (best)" * (place == 0 and each.state == "finished")
        about = each.line if each.state == "begun" else f"{each.state}{best}"
        if each.state == "failed":
            failures.append(f"- run {each.element.number}: {each.line}")
        values = map(show, each.element.values.values())
        rows.append([str(each.element.number), *values, about, *show_figures(each.run.figures)[1:]])
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


def check_same(folder: Path, sweep: Sweep) -> None:
    """Raise `UserError` unless `folder` is new, or holds a sweep to which this one only adds runs."""
    with writing_to("sweep_dir", folder):
        if not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir()):
            return
    shown, other = f"sweep_dir={folder}", "name another folder"
    try:
        before = json.loads((folder / _TABLE).read_text())
        held, names = {"keys": show(before["keys"]), **before["settings"]}, {run["name"] for run in before["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{shown} is not empty, and its {_TABLE} is missing or damaged; {other}") from None
    asked = {"keys": show(list(sweep.keys)), **sweep.settings}
    for key in {**held, **asked}:
        had, has = (f"{key}={at[key]}" if key in at else f"no {key}" for at in (held, asked))
        if had != has:
            raise UserError(f"{shown} holds a sweep with {had}, and this one has {has}; {other}")
    if missing := sorted(names - {element.name for element in sweep.elements}):
        advice = f"list its values too, or {other}"
        raise UserError(f"{shown} has the run {missing[0]}, which is not one of this sweep; {advice}")


def run_all(sweep: Sweep, folder: Path, start: Callable[[Sequence[str]], interrupts.Ended]) -> int:
    """Train the chosen runs of a sweep in `folder` that are not finished, and print the table of all.

    `start` trains with overrides. Returns 0, 4 if one of the chosen runs failed, or the exit code of a run that a
    signal ended, which ends the sweep.
    """
    outcomes, code = write_report(folder, sweep), 0
    for count, element in enumerate(sweep.chosen, 1):
        before = find_outcome(run_dir := folder / element.name, element)
        what = "starts" if before.saved is None else f"continues from step {before.saved}"
        left_out = f"{before.state} before" if before.is_complete else trainer(run_dir)
        print(f"run {count}/{len(sweep.chosen)}     {element.name}: {left_out or what}", flush=True)
        if left_out:
            continue
        code, line, _ = start([*element.words, overrides.quote("run_dir", str(run_dir)), f"resume={AUTO}"])
        with writing_to("sweep_dir", run_dir):
            (run_dir / _FAILURE).unlink(missing_ok=True)
            if code and code not in _STOPPED:
                run_dir.mkdir(parents=True, exist_ok=True)
                replace_text(run_dir / _FAILURE, f"{line or f'exit code {code}'}\n")
        outcomes = write_report(folder, sweep)
        if code in _STOPPED:
            break
    print("\n".join(["", *render(sweep, outcomes), "", f"{'sweep_dir':<12}{folder}"]), flush=True)
    if code in _STOPPED:
        print(f"stopped; continue with the same command and sweep_dir={folder}", flush=True)
        return code
    if failed := sum(each.state == "failed" and each.element in sweep.chosen for each in outcomes):
        print(f"{failed} of {len(sweep.chosen)} runs failed", file=sys.stderr)
    return SOME_FAILED if failed else 0


def start_process(words: Sequence[str]) -> interrupts.Ended:
    """Train in a process of its own, which gets the signals of this one; its output is printed as it comes."""
    # A process per run, and not a loop in this one: a crash, or memory that ran out, ends one run and not the sweep;
    # all memory of a device is free for the next run; each run may have its own number of virtual devices, which a
    # process fixes when JAX starts.
    forward = functools.partial(print, end="", file=sys.stderr, flush=True)
    ended = interrupts.run_child([sys.executable, "-P", "-m", "moezoo", "train", *words], forward)
    if ended.signal:  # also if the run had just ended
        return ended._replace(code=128 + ended.signal)
    if ended.code < 0:
        return ended._replace(code=128 - ended.code, line=describe_end(ended.code))
    return ended._replace(line=ended.line.removeprefix("error: "))
