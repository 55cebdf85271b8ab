"""`moezoo compare`: the losses and settings of several runs."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import moezoo.terminal.tables as tables
from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read
from moezoo.errors import UserError
from moezoo.typed import show

if TYPE_CHECKING:
    from moezoo.training.reading import Figures, ReadRun

# For each of `Figures`, its name in the table of `compare`, and how every table prints it.
_FIGURES = (
    ("last logged step", ","),
    ("validation loss", ".4f"),
    ("training loss", ".4f"),
    ("tokens per second", ",.0f"),
    ("skipped steps", ""),
)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    runs: tuple[str, ...] = key("the folders of runs, each as an argument", "FOLDER")
    by: Literal["steps", "tokens"] = key("the horizontal axis of the picture", "steps|tokens", default="steps")
    out: str = key("the picture to write or to replace", "FILE.png", default="compare.png")


def main(arguments: Sequence[str]) -> None:
    """Draw the picture, and print what differs."""
    from moezoo.training.files import writing_to
    from moezoo.training.pictures import runs_picture
    from moezoo.training.reading import read_folder

    keys = read(Keys, arguments)
    if len(keys.runs) < 2:
        raise UserError(f"{show(' '.join(keys.runs))} is one run; name two or more")
    if not keys.out.lower().endswith(".png"):
        raise UserError(f"out={show(keys.out)}: expected the name of a picture; write FILE.png")
    each = [read_folder(Path(named).expanduser(), "runs") for named in keys.runs]
    runs = dict(zip(_name_runs([run.folder.resolve() for run in each]), each, strict=True))
    notes = [note for run in each for note in run.notes] + _compare_data(runs, keys.by)
    if keys.by == "tokens" and (other := next((run for run in each if run.tokens_per_step is None), None)):
        raise UserError(f"by=tokens: {other.folder}/config.yaml does not show the tokens of a step; write by=steps")
    with writing_to("out", keys.out):
        Path(keys.out).parent.mkdir(parents=True, exist_ok=True)
        runs_picture(runs, Path(keys.out), by_tokens=keys.by == "tokens")
    differing = _differing_settings(each)
    rows = [[name, *(show(run.settings[name]) if name in run.settings else "" for run in each)] for name in differing]
    shown = zip(*(show_figures(run.figures) for run in each), strict=True)
    rows += [[name, *cells] for (name, _), cells in zip(_FIGURES, shown, strict=True)]
    lines = tables.markdown(["", *runs], rows, right=range(1, len(runs) + 1))
    print("\n".join([*lines, *(f"note: {note}" for note in notes), f"{'picture':<12}{keys.out}"]))


def show_figures(figures: "Figures") -> list[str]:
    """Return the cells of figures in a table."""
    return [tables.cell(value, form) for value, (_, form) in zip(figures, _FIGURES, strict=True)]


def _name_runs(folders: Sequence[Path]) -> list[str]:
    """Return for each folder its last parts, as many as tell them apart. `UserError` for one that is given twice."""
    if twice := next((path for path in folders if folders.count(path) > 1), None):
        raise UserError(f"runs={twice} is given twice; leave one out")
    every = (["/".join(path.parts[-count:]) for path in folders] for count in itertools.count(1))
    return next(names for names in every if len(set(names)) == len(names))


def _differing_settings(runs: "Sequence[ReadRun]") -> list[str]:
    """Return the settings in which those of the runs differ whose configuration can be read."""
    known = [run.settings for run in runs if run.settings]
    every, missing = dict.fromkeys(itertools.chain(*known)), object()
    return [name for name in every if any(each.get(name, missing) != known[0].get(name, missing) for each in known)]


def _compare_data(runs: "Mapping[str, ReadRun]", by: str) -> list[str]:
    """Return a line for each reason why losses of these runs, by name, cannot be compared as they are."""
    from moezoo.training.reading import unit_of

    def varied(values: dict[str, Any]) -> str:
        known = {name: value for name, value in values.items() if value is not None}
        return ", ".join(f"{value} ({name})" for name, value in known.items()) if len(set(known.values())) > 1 else ""

    notes = []
    if units := varied({name: unit_of(run.settings) for name, run in runs.items()}):
        notes.append(f"losses are in nats per {units}: they cannot be compared")
    if data := [name for name in _differing_settings([*runs.values()]) if name.startswith("data.")]:
        notes.append(f"the runs read or evaluate different data ({', '.join(data)}): losses are of different texts")
    if by == "steps" and (tokens := varied({name: run.tokens_per_step for name, run in runs.items()})):
        notes.append(f"tokens per step: {tokens}; by=tokens draws the losses over them")
    return notes


COMMAND = KeysCommand(
    "compare",
    "draw the losses of several runs, and list what differs",
    main,
    description="Draw the training and validation losses of several runs in one picture, and print a table of the "
    "settings in which they differ and of their last figures. Page: docs/sweeps.md of the repository.",
    keys=Keys,
    examples=("runs/A runs/B", "sweeps/NAME/*/ by=tokens out=losses.png"),
    positions=("runs...",),
)
