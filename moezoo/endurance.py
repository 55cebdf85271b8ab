"""What a run survives, tried out: kills, signals and flipped bytes at random moments, and what is left compared."""

import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moezoo.errors import UserError
from moezoo.train.checkpoint import steps
from moezoo.train.saved import load_run

# A run small enough to be repeated, on data of a known structure; the suite's too.
TINY = (
    "model.vocab=32",
    "model.embed=32",
    "model.layers=2",
    "model.head_dim=8",
    "model.expert_mlp=16",
    "data=synthetic",
    "data.vocab=32",
    "data.documents=200",
    "data.document_length=100",
    "data.eval_sequences=16",
    "seq_len=16",
)
# Eight devices, so that a checkpoint has parts of several; every step is told of.
_RUN = (*TINY, "mesh=fsdp2_ep4", "eval_every=0", "log_every=1")
_STARTING_SECONDS, _STEPS = 6.0, 15  # a kill comes at most so long after the start, or so many steps after the first
_WHEN = ("step", "save", "start")


@dataclasses.dataclass(frozen=True)
class Trial:
    """So many of each, on a run that saves every `checkpoint_every` steps; `folder` must be new or empty."""

    folder: str
    kills: int = 20
    signals: int = 2
    flips: int = 10
    checkpoint_every: int = 5
    seed: int = 0


class _Life(NamedTuple):
    """One process: the step it said it goes on from and the last it told of, if it did; its exit code and errors."""

    first: int | None
    told: int | None
    code: int
    errors: str


def endure(trial: Trial, train: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> bool:
    """Run the script `train` to its end undisturbed and disturbed, and damage what it leaves; whether all was fine.

    `overrides` configure the run. Every line of the table goes to `tell`.
    """
    folder, rng = Path(trial.folder).expanduser(), random.Random(trial.seed)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"folder={trial.folder} is not empty; name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    events = [(signal.SIGKILL, _WHEN[i % len(_WHEN)]) for i in range(trial.kills)]
    events += [((signal.SIGTERM, signal.SIGINT)[i % 2], "step") for i in range(trial.signals)]
    rng.shuffle(events)
    total = (len(events) + 1) * (_STEPS + trial.checkpoint_every)
    command = [sys.executable, str(train), *_RUN, *overrides, f"steps={total}"]
    command += [f"checkpoint_every={trial.checkpoint_every}"]
    tell(_line("", "what", "when", "told of", "saved", "lost", "exit", ""))

    whole, torn = folder / "undisturbed", folder / "disturbed"
    life = _live([*command, f"run_dir={whole}"], lambda *_: None)
    if life.code:
        raise UserError(f"the undisturbed run ended with {life.code}: {life.errors.strip()}")
    fine, number, saved = True, 0, 0
    start, on = [*command, f"run_dir={torn}"], [sys.executable, str(train), f"resume={torn}"]
    for number, (which, when) in enumerate(events, 1):
        if not saved:
            shutil.rmtree(torn, ignore_errors=True)
        life = _live(on if saved else start, _ender(which, when, torn, rng))
        fine &= life.first in (None, saved)
        told = life.told or life.first or saved
        saved = max([*steps(torn / "checkpoints"), 0])
        fine &= _ended(number, which, when, life, told, saved, trial, tell)
    life = _live(on if saved else start, lambda *_: None)
    fine &= life.code == 0 and life.first == (saved or None) and _same(whole, torn, tell)

    for i in range(trial.flips):
        fine &= _flipped(number + i + 1, torn, [*on, f"steps={total + 1}"], rng, tell)
    tell("all as it must be" if fine else "NOT all as it must be: see above")
    return fine


def _live(command: Sequence[str], ender: Callable[..., None]) -> _Life:
    """Run until it ends; `ender(process, told)` is called at the start, with None, and after every step told of."""
    first, told = None, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ender(process, None)
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if found := re.match(r"resume .* from step (\d+)", line):
                first = int(found[1])
            if found := re.match(r"step (\d+)/", line):
                told = int(found[1])
                ender(process, told)
        errors = process.stderr.read()
    return _Life(first, told, process.returncode, errors)


def _ender(which: signal.Signals, when: str, run: Path, rng: random.Random) -> Callable[..., None]:
    """Sends the signal: some time after the start, in the middle of a step, or when a save is seen to be going on."""
    wait, pause, left = rng.uniform(0, _STARTING_SECONDS), rng.uniform(0, 0.05), rng.randrange(1, _STEPS)

    def ender(process: Any, told: int | None) -> None:
        nonlocal left
        if told is None:
            if when == "start":
                time.sleep(wait)
                process.send_signal(which)
            return
        left -= 1
        if when == "save" and left <= 0:
            _saving(process, run)
        if left == 0 or (when == "save" and left < 0):
            time.sleep(pause)
            process.send_signal(which)

    return ender


def _saving(process: Any, run: Path) -> None:
    """Until a save is going on, or the process is over."""
    while process.poll() is None and not any((run / "checkpoints").glob("unfinished.*")):
        time.sleep(0.0005)


def _ended(
    number: int, which: signal.Signals, when: str, life: _Life, told: int, saved: int, trial: Trial, tell: Any
) -> bool:
    lost, killed = told - saved, which is signal.SIGKILL
    fine = 0 <= lost <= (trial.checkpoint_every if killed else 0)
    fine &= life.code == (-which if killed else 128 + which)
    tell(_line(number, which.name, when, told, saved, lost, life.code, _verdict(fine)))
    return fine


def _rows(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def _same(whole: Path, torn: Path, tell: Callable[[str], None]) -> bool:
    """Every row and every parameter, to the bit."""
    rows = _rows(whole) == _rows(torn)
    models = [jax.tree.leaves(load_run(run, "mesh=single")[0]) for run in (whole, torn)]
    arrays = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*models, strict=True))
    tell(_line("", "compared", "end", "", "", "", 0, f"{len(_rows(torn))} rows {_verdict(rows)}"))
    tell(_line("", "compared", "end", "", "", "", 0, f"{len(models[0])} arrays {_verdict(arrays)}"))
    return rows and arrays


def _flipped(number: int, run: Path, command: Sequence[str], rng: random.Random, tell: Any) -> bool:
    """One bit of a checkpoint; the run must not go on from it, say so in one line and name an older step."""
    newest = run / "checkpoints" / str(steps(run / "checkpoints")[-1])
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    whole = path.read_bytes()
    at = rng.randrange(len(whole))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    life = _live(command, lambda *_: None)
    path.write_bytes(whole)
    one_line = life.errors.count("\n") == 1 and "damaged" in life.errors and "is whole" in life.errors
    fine = life.code == 2 and one_line
    tell(_line(number, "bit flipped", path.relative_to(newest).parts[0], "", "", "", life.code, _verdict(fine)))
    return fine


def _verdict(fine: bool) -> str:
    return "fine" if fine else "WRONG"


def _line(*cells: Any) -> str:
    widths: Iterator[int] = iter((3, 11, 18, 8, 5, 5, 5, 0))
    return "  ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
