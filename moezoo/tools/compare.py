"""`moezoo compare`: the losses and settings of several runs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import moezoo.tables as tables
from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read, take_switches
from moezoo.errors import UserError
from moezoo.typed import show

if TYPE_CHECKING:
    from moezoo.training.reading import ReadRun


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    runs: tuple[str, ...] = key("the folders of runs, each as an argument", "FOLDER")
    by: Literal["steps", "tokens"] = key("the horizontal axis of the picture", "steps|tokens", default="steps")
    out: str = key("the picture to write or to replace", "FILE.png", default="compare.png")


@dataclasses.dataclass(frozen=True)
class Switches:
    """The command's options with dashes."""

    json: bool = key("print the table as JSON, with all digits", default=False)


def main(arguments: Sequence[str]) -> None:
    """Draw the picture, and print what differs."""
    from moezoo.training.files import writing_to
    from moezoo.training.pictures import Curve, runs_picture
    from moezoo.training.reading import describe_unit, figures_of, read_folder

    switches, words = take_switches(Switches, arguments)
    keys = read(Keys, words)
    if len(keys.runs) < 2:
        raise UserError(f"{show(' '.join(keys.runs))} is one run; name two or more")
    if not keys.out.lower().endswith(".png"):
        raise UserError(f"out={show(keys.out)}: expected the name of a picture; write FILE.png")
    runs = [read_folder(Path(named).expanduser(), "runs") for named in keys.runs]
    names = name_runs([run.folder for run in runs])
    notes = [note for run in runs for note in run.notes] + compare_data(dict(zip(names, runs, strict=True)), keys.by)
    scales = [_scale(run, keys.by) for run in runs]
    curves = [Curve(name, run.history, scale) for name, run, scale in zip(names, runs, scales, strict=True)]
    across = "training step" if keys.by == "steps" else "tokens read"
    with writing_to("out", keys.out):
        Path(keys.out).parent.mkdir(parents=True, exist_ok=True)
        runs_picture(curves, Path(keys.out), across=across, unit=describe_unit(run.settings for run in runs))
    differing, figures = differing_settings(runs), [figures_of(run.history) for run in runs]
    if switches.json:
        found = [
            {"folder": str(run.folder), "settings": {k: run.settings.get(k) for k in differing}, **each._asdict()}
            for run, each in zip(runs, figures, strict=True)
        ]
        print(json.dumps({"runs": found, "notes": notes, "picture": keys.out}, indent=2))
        return
    rows = [[name, *(show(run.settings[name]) if name in run.settings else "" for run in runs)] for name in differing]
    forms = {"step": ",", "val_loss": ".4f", "loss": ".4f", "tokens_per_second": ",.0f", "skipped": ""}
    for field, form in forms.items():
        values = [getattr(each, field) for each in figures]
        rows.append([_FIGURES[field], *(tables.cell(value, form) for value in values)])
    shown = tables.markdown(["", *names], rows, right=range(1, len(names) + 1))
    print("\n".join([*shown, *(f"note: {note}" for note in notes)]))
    print(f"{'picture':<12}{keys.out}")


_FIGURES = {
    "step": "last logged step",
    "val_loss": "validation loss",
    "loss": "training loss",
    "tokens_per_second": "tokens per second",
    "skipped": "skipped steps",
}


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return for each folder its last parts, as many as tell them apart.

    Raises `UserError` for a folder that is given twice.
    """
    whole = [path.resolve() for path in folders]
    if twice := next((path for path in whole if whole.count(path) > 1), None):
        raise UserError(f"runs={twice} is given twice; leave one out")
    for count in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-count:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in whole]


def differing_settings(runs: "Sequence[ReadRun]") -> list[str]:
    """Return the settings in which those of the runs differ whose configuration can be read."""
    known = [run.settings for run in runs if run.settings]
    every = dict.fromkeys(name for settings in known for name in settings)
    missing = object()
    return [name for name in every if any(each.get(name, missing) != known[0].get(name, missing) for each in known)]


def compare_data(runs: "dict[str, ReadRun]", by: str) -> list[str]:
    """Return a line for each reason why losses of these runs, by name, cannot be compared as they are."""
    from moezoo.training.reading import unit_of

    def listed(values: dict[str, Any]) -> str:
        return ", ".join(f"{value} ({name})" for name, value in values.items())

    notes = []
    units = {name: unit for name, run in runs.items() if (unit := unit_of(run.settings)) is not None}
    if len(set(units.values())) > 1:
        notes.append(f"losses are in nats per {listed(units)}: they cannot be compared")
    data = [name for name in differing_settings([*runs.values()]) if name.startswith("data.")]
    if data:
        notes.append(f"the runs read or evaluate different data ({', '.join(data)}): losses are of different texts")
    tokens = {name: each for name, run in runs.items() if (each := run.tokens_per_step) is not None}
    if len(set(tokens.values())) > 1 and by == "steps":
        notes.append(f"tokens per step: {listed(tokens)}; by=tokens draws the losses over them")
    return notes


def _scale(run: "ReadRun", by: str) -> float:
    if by == "steps":
        return 1.0
    if run.tokens_per_step is None:
        raise UserError(f"by=tokens: {run.folder}/config.yaml does not show the tokens of a step; write by=steps")
    return float(run.tokens_per_step)


COMMAND = KeysCommand(
    "compare",
    "draw the losses of several runs, and list what differs",
    main,
    description="Draw the training and validation losses of several runs in one picture, and print a table of the "
    "settings in which they differ and of their last figures. Page: docs/sweeps.md of the repository.",
    keys=Keys,
    switches=Switches,
    examples=("runs/A runs/B", "sweeps/NAME/*/ by=tokens out=losses.png", "runs/A runs/B --json"),
    positions=("runs...",),
)
