"""Training the runs of a sweep, each in a process of its own, one after the other."""

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import moezoo.interrupts as interrupts
from moezoo.config import overrides
from moezoo.errors import UserError
from moezoo.host import locking
from moezoo.tools.sweep.expand import Element, Sweep
from moezoo.tools.sweep.report import FAILURE, Outcome, find_outcome, render, write_report
from moezoo.training.files import replace_text, writing_to

SOME_FAILED = 4
# The exit codes of a run that end the sweep: of a signal that the user sent, and of output without a reader.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 141)


class Ended(NamedTuple):
    """How the process of a run ended: its exit code, and the last line of its stderr."""

    code: int
    line: str


Start = Callable[[Sequence[str]], Ended]


def run_all(sweep: Sweep, chosen: Sequence[Element], folder: Path, last: Sequence[int | None], start: Start) -> int:
    """Train those of the `chosen` runs of a sweep in `folder` that are not finished, and print the table of all.

    `last` are the last steps of all runs, None where a length is in epochs; `start` trains with overrides. Returns 0,
    4 if one of the `chosen` runs failed, or the exit code of a run that a signal ended, which ends the sweep.
    """
    outcomes, code = write_report(folder, sweep, last), 0
    for count, element in enumerate(chosen, 1):
        before = find_outcome(run_dir := folder / element.name, element, last[element.number])
        words, what = _plan(run_dir, before)
        print(f"run {count}/{len(chosen)}     {element.name}: {what}", flush=True)
        if words is None:
            continue
        code, line = start(words)
        if code and code not in _STOPPED:
            with writing_to("sweep_dir", run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                replace_text(run_dir / FAILURE, f"{line or f'exit code {code}'}\n")
        outcomes = write_report(folder, sweep, last)
        if code in _STOPPED:
            break
    print("\n".join(["", *render(sweep, outcomes), "", f"{'sweep_dir':<12}{folder}"]), flush=True)
    if code in _STOPPED:
        print(f"stopped; continue with the same command and sweep_dir={folder}", flush=True)
        return code
    if failed := sum(outcomes[element.number].state == "failed" for element in chosen):
        print(f"{failed} of {len(chosen)} runs failed", file=sys.stderr)
    return SOME_FAILED if failed else 0


def start_process(words: Sequence[str]) -> Ended:
    """Train in a process of its own, which gets the signals of this one; its output is printed as it comes."""
    # A process per run, and not a loop in this one: a crash, or memory that ran out, ends one run and not the sweep;
    # all memory of a device is free for the next run; each run may have its own number of virtual devices, which a
    # process fixes when JAX starts. It costs some seconds per run, and no program that a loop would have shared: the
    # learning rate is a constant of a step, and runs that differ in their seed alone find their step in `cache_dir`.
    with interrupts.blocked():
        child = subprocess.Popen([sys.executable, "-P", "-m", "moezoo", "train", *words], stderr=subprocess.PIPE)
    asked, last = [], ""

    def receive(number: int) -> None:
        asked.append(number)
        child.send_signal(number)

    with interrupts.receiving(receive), child:
        for raw in child.stderr or ():
            line = raw.decode(errors="replace")
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
        code = child.wait()
    if asked:  # also if the run had just ended
        return Ended(128 + asked[0], last)
    if code < 0:
        memory = ", perhaps because memory ran out" * (code == -signal.SIGKILL)
        return Ended(128 - code, f"ended by {signal.Signals(-code).name}{memory}")
    return Ended(code, last.removeprefix("error: "))


def _plan(folder: Path, before: Outcome) -> tuple[list[str] | None, str]:
    """Return the overrides that start or continue a run, None where nothing is left to do; and what happens."""
    if before.saved is not None and before.saved == before.last:
        return None, f"{before.state} before"
    if folder.is_dir():
        with writing_to("sweep_dir", folder), contextlib.ExitStack() as held:
            try:
                held.enter_context(locking(folder.resolve(), "busy"))
            except UserError:
                return None, "another process is training it"
            (folder / FAILURE).unlink(missing_ok=True)
            if before.saved is None:  # there is nothing to continue
                shutil.rmtree(folder)
    if before.saved is None:
        return [*before.element.words, overrides.quote("run_dir", str(folder))], "starts"
    # The run has its settings; a class of the user's own has to be named again, and the same name keeps its options.
    asked = overrides.read(before.element.words)
    given = {**asked.choices, **asked.changes}.items()
    own = [f"{k}={v}" for k, v in given if k in overrides.PLUGS and overrides.is_own(k, str(v))]
    return [*own, overrides.quote("resume", str(folder))], f"continues from step {before.saved}"
