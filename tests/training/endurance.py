"""`python tests/training/endurance.py`: disturb a run by kills, signals and flipped bits; compare it with another."""

import contextlib
import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import moezoo.interrupts as interrupts
from moezoo.cli.command import ConfiguredCommand, execute
from moezoo.config.options import key, take
from moezoo.errors import UserError
from moezoo.training.files import making, writing_to
from moezoo.typed import Count, Size

# A run of few seconds that prints every step, on eight devices, so a checkpoint has parts of several.
_RUN = (
    "mesh=fsdp2_ep4",
    "model.layers=2",
    "model.embed=32",
    "model.expert_mlp=32",
    "data=synthetic",
    "data.documents=200",
    "seq_len=16",
    "eval_every=0",
    "log_every=1",
)
_TRAIN = (sys.executable, "-m", "moezoo", "train")
_STARTING_SECONDS, _STEPS = 6.0, 15  # the latest moment of a kill: seconds after the start, or steps after the first
_WHEN = ("step", "save", "start")
_LEAST_SECONDS = 0.1  # the first moment of a signal after the start, if the command line is imported in half of it
_ENDING_SECONDS, _HANGING_SECONDS = 5.0, 60.0  # after a signal: how long a process may take, and when it is killed


@dataclasses.dataclass(frozen=True)
class Trial:
    """The command's own options: how often a run is disturbed, and where the runs are written."""

    folder: str = key("a new folder for the runs", "FOLDER")
    kills: Count = key("kill -9: in a step, during a save and while starting, in turn", default=20)
    signals: Count = key("SIGTERM and SIGINT alternately, in a step", default=2)
    moments: Count = key(
        "SIGINT and SIGTERM alternately to fresh runs, at moments from the start of the interpreter to the third step",
        default=6,
    )
    flips: Count = key("single bits flipped in the files of a checkpoint", default=10)
    checkpoint_every: Size = key("steps between two saves", default=5)
    seed: int = key("seed of the moments and the bits", default=0)


class _Outcome(NamedTuple):
    """One process: the step that it resumed from, the last step that it printed, its exit code and its errors."""

    first: int | None
    last: int | None
    code: int
    errors: str


def endure(trial: Trial, overrides: Sequence[str], log: Callable[[str], None]) -> bool:
    """Train undisturbed and disturbed, compare the runs, damage a checkpoint; return whether all results are right.

    `overrides` configure the run. `log` receives every line of the table.
    """
    folder = Path(trial.folder).expanduser()
    with contextlib.ExitStack() as held:
        with writing_to("folder", trial.folder):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"folder={trial.folder} is not empty; name a new one")
            held.enter_context(making(folder))
        fine = _endure(trial, overrides, folder, log)
    log("all results are right" if fine else "NOT all results are right: see above")
    return fine


def _endure(trial: Trial, overrides: Sequence[str], folder: Path, log: Callable[[str], None]) -> bool:
    from moezoo.config.run_folders import steps

    rng = random.Random(trial.seed)
    events = [(signal.SIGKILL, _WHEN[i % len(_WHEN)]) for i in range(trial.kills)]
    events += [((signal.SIGTERM, signal.SIGINT)[i % 2], "step") for i in range(trial.signals)]
    rng.shuffle(events)
    total = (len(events) + 1) * (_STEPS + trial.checkpoint_every)
    endless = [*_TRAIN, *_settings(overrides), f"checkpoint_every={trial.checkpoint_every}"]
    command = [*endless, f"steps={total}"]
    log(_line("", "what", "when", "printed", "saved", "lost", "exit", ""))

    whole, torn = folder / "undisturbed", folder / "disturbed"
    began, reached = time.monotonic(), {}
    outcome = _run([*command, f"run_dir={whole}"], lambda _, last: reached.setdefault(last, time.monotonic() - began))
    if outcome.code:
        raise UserError(f"the undisturbed run ended with {outcome.code}: {outcome.errors.strip()}")
    fine, number, saved = True, 0, 0
    start, on = [*command, f"run_dir={torn}"], [*_TRAIN, f"resume={torn}"]

    def proceed(killer: Callable[..., None]) -> _Outcome:
        if not saved:
            shutil.rmtree(torn, ignore_errors=True)
        return _run(on if saved else start, killer)

    for number, (which, when) in enumerate(events, 1):
        outcome = proceed(_make_killer(which, when, torn, rng))
        fine &= outcome.first in (None, saved)
        last = outcome.last or outcome.first or saved
        saved = max([*steps(torn / "checkpoints"), 0])
        fine &= _check_end(number, which, when, outcome, last, saved, trial, log)
    outcome = proceed(lambda *_: None)
    fine &= outcome.code == 0 and outcome.first == (saved or None) and _compare_runs(whole, torn, log)

    for i in range(trial.flips):
        fine &= _try_flipped_bit(number + i + 1, torn, [*on, f"steps={total + 1}"], rng, log)
    number += trial.flips
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import moezoo.__main__"], check=True)
    # Before, a signal has Python's own effect. Twice: on a busy machine the next start may take longer.
    first_moment = max(_LEAST_SECONDS, 2 * (time.monotonic() - began))
    for i in range(trial.moments):
        at = first_moment + (reached[3] - first_moment) * i / max(1, trial.moments - 1)
        which = (signal.SIGINT, signal.SIGTERM)[i % 2]
        fine &= _try_moment(number + i + 1, which, at, [*endless, "steps=1000000"], folder / "moment", log)
    return fine


def _settings(overrides: Sequence[str]) -> list[str]:
    """Return the settings of a run: a key of `overrides` replaces ours, as two choices of a group are refused."""
    keys = {text.partition("=")[0] for text in overrides}
    return [*(text for text in _RUN if text.partition("=")[0] not in keys), *overrides]


def _run(command: Sequence[str], killer: Callable[..., None]) -> _Outcome:
    """Run a process to its end; call `killer(process, last)` at the start, with None, and after each printed step."""
    first, last = None, None
    # A child would inherit that SIGINT is ignored, as a shell sets it for jobs in the background, but no handler.
    if ignored := signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.undoing(process.kill), process:
        killer(process, None)
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if found := re.match(r"resume .* from step (\d+)", line):
                first = int(found[1])
            if found := re.match(r"step (\d+)/", line):
                last = int(found[1])
                killer(process, last)
        errors = process.stderr.read()
    return _Outcome(first, last, process.returncode, errors)


def _make_killer(which: signal.Signals, when: str, run_dir: Path, rng: random.Random) -> Callable[..., None]:
    """Return a function that sends the signal: a while after the start, in the middle of a step, or during a save."""
    wait, pause, left = rng.uniform(0, _STARTING_SECONDS), rng.uniform(0, 0.05), rng.randrange(1, _STEPS)

    def killer(process: Any, last: int | None) -> None:
        nonlocal left
        if last is None:
            if when == "start":
                time.sleep(wait)
                process.send_signal(which)
            return
        left -= 1
        if when == "save" and left <= 0:
            _wait_for_save(process, run_dir)
        if left == 0 or (when == "save" and left < 0):
            time.sleep(pause)
            process.send_signal(which)

    return killer


def _wait_for_save(process: Any, run_dir: Path) -> None:
    """Wait until a save is going on, or the process has ended."""
    while process.poll() is None and not any((run_dir / "checkpoints").glob("unfinished.*")):
        time.sleep(0.0005)


def _check_end(
    number: int, which: signal.Signals, when: str, outcome: _Outcome, last: int, saved: int, trial: Trial, log: Any
) -> bool:
    lost, killed = last - saved, which is signal.SIGKILL
    fine = 0 <= lost <= (trial.checkpoint_every if killed else 0)
    fine &= outcome.code == (-which if killed else 128 + which)
    log(_line(number, which.name, when, last, saved, lost, outcome.code, _verdict(fine)))
    return fine


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    from moezoo.training.metrics import MEASURED  # imports NumPy, which a mistyped word does not wait for

    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


def _compare_runs(whole: Path, torn: Path, log: Callable[[str], None]) -> bool:
    """Compare every row and every bit of every parameter; return whether all are equal."""
    import jax
    import numpy as np

    from moezoo.training.saved import load_run

    rows = _rows(whole) == _rows(torn)
    models = [jax.tree.leaves(load_run(run_dir, "mesh=single")[0]) for run_dir in (whole, torn)]
    arrays = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*models, strict=True))
    log(_line("", "compared", "end", "", "", "", 0, f"{len(_rows(torn))} rows {_verdict(rows)}"))
    log(_line("", "compared", "end", "", "", "", 0, f"{len(models[0])} arrays {_verdict(arrays)}"))
    return rows and arrays


def _try_flipped_bit(number: int, run_dir: Path, command: Sequence[str], rng: random.Random, log: Any) -> bool:
    """Flip one bit of a checkpoint; return whether the run refuses it in one line that names an older step."""
    from moezoo.config.run_folders import steps

    newest = run_dir / "checkpoints" / str(steps(run_dir / "checkpoints")[-1])
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    whole = path.read_bytes()
    at = rng.randrange(len(whole))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    outcome = _run(command, lambda *_: None)
    path.write_bytes(whole)
    one_line = outcome.errors.count("\n") == 1 and "damaged" in outcome.errors and "is complete" in outcome.errors
    fine = outcome.code == 2 and one_line
    log(_line(number, "bit flipped", path.relative_to(newest).parts[0], "", "", "", outcome.code, _verdict(fine)))
    return fine


def _try_moment(
    number: int, which: signal.Signals, at: float, command: Sequence[str], run_dir: Path, log: Callable[[str], None]
) -> bool:
    """Send a fresh run a signal after `at` seconds; return whether it ends soon, in at most a line, and leaves nothing.

    A run that has done steps leaves the checkpoint of the last one.
    """
    from moezoo.config.run_folders import steps
    from moezoo.training.checkpoint import read_about

    sent, late = 0.0, None

    def send(process: Any, last: int | None) -> None:
        nonlocal sent, late
        if last is None:
            time.sleep(at)
            late = threading.Timer(_HANGING_SECONDS, process.kill)
            late.start()
            sent = time.monotonic()
            process.send_signal(which)

    outcome = _run([*command, f"run_dir={run_dir}"], send)
    seconds = time.monotonic() - sent
    assert late is not None
    late.cancel()
    last, saved = outcome.last or 0, max([*steps(run_dir / "checkpoints"), 0])
    if saved:
        read_about(run_dir / "checkpoints", saved)
    left = run_dir.exists() and not saved
    fine = outcome.code == 128 + which and seconds <= _ENDING_SECONDS and last == saved and not left
    fine &= outcome.errors.count("\n") <= 1
    what = f"{_verdict(fine)}, {seconds:.2f} s to its end" + ", a folder is left" * left
    what += "" if fine else f": {outcome.errors.strip().splitlines()[-1:]}"
    log(_line(number, which.name, f"at {at:.2f} s", last, saved, last - saved, outcome.code, what))
    shutil.rmtree(run_dir, ignore_errors=True)
    return fine


def _verdict(fine: bool) -> str:
    return "fine" if fine else "WRONG"


def _line(*cells: Any) -> str:
    widths: Iterator[int] = iter((3, 11, 18, 8, 5, 5, 5, 0))
    return "  ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def configure(*arguments: str) -> Any:
    """Return the configuration of the runs."""
    from moezoo.config.compose import compose

    return compose(*_settings(take(Trial, arguments).rest))


def main(arguments: Sequence[str]) -> int:
    """Print each line of the table when it is known; return 1 where a result is wrong."""
    configure(*arguments)  # a mistake is reported before anything runs
    trial, overrides = take(Trial, arguments)
    return 0 if endure(trial, overrides, lambda line: print(line, flush=True)) else 1


COMMAND = ConfiguredCommand(
    "endurance",
    "kill, stop and damage a run, and compare what it leaves",
    main,
    description="Train a tiny model twice: undisturbed, and killed, stopped and continued many times. Compare every\n"
    "row of metrics.jsonl and every bit of every parameter. Then flip bits in a checkpoint.\n"
    "Exit codes: 0 when all results are right, 1 when one is wrong, 2 after a mistake.",
    keys=Trial,
    configure=configure,
    examples=("folder=/tmp/endurance", "folder=/tmp/endurance kills=3 flips=1 mesh=ep8 dispatch=ragged"),
)

if __name__ == "__main__":
    with interrupts.ending():
        execute(COMMAND, sys.argv[1:], f"python {sys.argv[0]}")
