"""`moezoo sweep`: train a run for every combination of listed values."""

import contextlib
import dataclasses
import datetime
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import moezoo.interrupts as interrupts
from moezoo.cli.command import ConfiguredCommand
from moezoo.config import overrides
from moezoo.config.options import key, split, take
from moezoo.config.overrides import quote
from moezoo.errors import UserError
from moezoo.tools.sweep.expand import Element, Sweep, expand
from moezoo.typed import Range, types_of

if TYPE_CHECKING:
    from moezoo.tools.sweep.report import Outcome

SOME_FAILED = 4
_READER_GONE = 141


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    sweep_dir: str | None = key(
        "the folder to write, with a run folder for each run; an existing one is continued. Without it, one in sweeps/ "
        "named by date and time",
        "FOLDER",
        default=None,
    )
    only: int | None = key(
        "train only the run with this number of the table, from 0, such as one per task of a scheduler",
        "N",
        default=None,
        valid=Range(at_least=0),
    )


class Ended(NamedTuple):
    """How the process of a run ended: its exit code, and the last line of its stderr."""

    code: int
    line: str


Start = Callable[[Sequence[str]], Ended]


@dataclasses.dataclass(frozen=True)
class SweepCommand(ConfiguredCommand):
    """A command whose overrides may list several values."""

    def check(self, arguments: Sequence[str], prog: str) -> None:
        """Refuse what other commands refuse, in any of the runs."""
        rest, _ = self._split(arguments, prog)
        take(Keys, rest)
        elements = expand(split(Keys, rest)[1]).elements
        for word in dict.fromkeys(word for element in elements for word in element.words):
            overrides.check([word], types_of(Keys))


def main(arguments: Sequence[str]) -> int:
    """Check all runs, and train those that are not finished; return 0, or the exit code that docs/sweeps.md lists."""
    from moezoo.config.compose import folder_path
    from moezoo.tools.sweep.report import check_same
    from moezoo.training.files import making, writing_to

    keys, words = take(Keys, arguments)
    sweep = expand(words)
    chosen = _choose(sweep, keys.only)
    if keys.only is not None and keys.sweep_dir is None:
        raise UserError(f"only={keys.only} is a part of a sweep; name the folder of the whole as sweep_dir=FOLDER")
    last = _check_runs(sweep)
    named = keys.sweep_dir or f"sweeps/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = folder_path(named, "sweep_dir")
    if keys.sweep_dir is not None:
        check_same(folder, sweep)
    with contextlib.ExitStack() as held:
        with writing_to("sweep_dir", folder):
            made = held.enter_context(making(folder, numbered=keys.sweep_dir is None))
        return run_all(sweep, chosen, made, last, start_process)


def run_all(sweep: Sweep, chosen: Sequence[Element], folder: Path, last: Sequence[int | None], start: Start) -> int:
    """Train those of the `chosen` runs that are not finished, one after the other, and print the table.

    Args:
        sweep: All runs, which the table lists.
        chosen: The runs to train.
        folder: The folder of the sweep.
        last: The last step of each run of the sweep, None where its length is in epochs.
        start: Trains a run with these overrides of `moezoo train`.

    Returns:
        The exit code: 0; 4 if one of the `chosen` runs failed; that of a run that a signal ended, which ends the sweep.
    """
    from moezoo.tools.sweep.report import find_outcome, render, write_report

    def look() -> "list[Outcome]":
        return [find_outcome(folder / e.name, e, last[e.number]) for e in sweep.elements]

    write_report(folder, sweep, look())
    code = 0
    for count, element in enumerate(chosen, 1):
        before = find_outcome(folder / element.name, element, last[element.number])
        title = f"run {count}/{len(chosen)}     {element.name}"
        if (words := _plan(folder / element.name, before, title)) is None:
            continue
        code, line = start(words)
        ended = _is_ended(code)
        if code and not ended:
            _note_failure(folder / element.name, line or f"exit code {code}")
        write_report(folder, sweep, look())
        if ended:
            break
    outcomes = look()
    print("\n".join(["", *render(sweep, outcomes), "", f"{'sweep_dir':<12}{folder}"]), flush=True)
    if _is_ended(code):
        print(f"stopped; continue with the same command and sweep_dir={folder}", flush=True)
        return code
    failed = sum(outcomes[element.number].state == "failed" for element in chosen)
    if failed:
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
        assert child.stderr is not None
        for raw in child.stderr:
            line = raw.decode(errors="replace")
            sys.stderr.write(line)
            sys.stderr.flush()
            last = line.strip() or last
        code = child.wait()
    if asked:  # also if the run had just ended
        return Ended(128 + asked[0], last)
    if code < 0:
        memory = ", perhaps because memory ran out" * (code == -signal.SIGKILL)
        return Ended(128 - code, f"ended by {signal.Signals(-code).name}{memory}")
    return Ended(code, last.removeprefix("error: "))


def _plan(folder: Path, before: "Outcome", title: str) -> list[str] | None:
    """Return the overrides that start or continue a run, and print what happens; None where nothing is left to do."""
    from moezoo.host import locking
    from moezoo.training.files import writing_to

    if before.saved is not None and before.saved == before.last:
        print(f"{title}: {before.state} before", flush=True)
        return None
    if folder.is_dir():
        with writing_to("sweep_dir", folder), contextlib.ExitStack() as held:
            try:
                held.enter_context(locking(folder.resolve(), "busy"))
            except UserError:
                print(f"{title}: another process is training it", flush=True)
                return None
            (folder / _failure()).unlink(missing_ok=True)
            if before.saved is None:  # there is nothing to continue
                shutil.rmtree(folder)
    if before.saved is None:
        print(f"{title}: starts", flush=True)
        return [*before.element.words, quote("run_dir", str(folder))]
    print(f"{title}: continues from step {before.saved}", flush=True)
    # The run has its settings; a class of the user's own has to be named again, and the same name keeps its options.
    asked = overrides.read(before.element.words)
    own = [f"{k}={v}" for k, v in {**asked.choices, **asked.changes}.items() if isinstance(v, str) and _is_plug(k, v)]
    return [*own, quote("resume", str(folder))]


def _is_plug(name: str, value: str) -> bool:
    return name in overrides.PLUGS and overrides.is_own(name, value)


def _failure() -> str:
    from moezoo.tools.sweep.report import FAILURE

    return FAILURE


def _note_failure(folder: Path, line: str) -> None:
    from moezoo.training.files import replace_text, writing_to

    with writing_to("sweep_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / _failure(), f"{line}\n")


def _is_ended(code: int) -> bool:
    """Whether the exit code of a run ends the sweep: a signal that the user sent, or output without a reader."""
    return code in (128 + signal.SIGINT, 128 + signal.SIGTERM, _READER_GONE)


def _check_runs(sweep: Sweep) -> list[int | None]:
    """Compose and lay out every run; return their last steps, None of those in epochs."""
    from moezoo.config.build import build_execution
    from moezoo.config.compose import compose
    from moezoo.parallel.mesh import abstract_mesh, cpu_devices, has_started

    if not has_started():
        cpu_devices(1)  # the devices are for the runs
    steps = []
    for element in sweep.elements:
        try:
            cfg = compose(*element.words)
            build_execution(cfg, abstract_mesh(cfg.mesh))
        except UserError as error:
            raise UserError(f"{error} (run {element.number}, {element.name})") from None
        steps.append(cfg.steps)
    return steps


def _choose(sweep: Sweep, only: int | None) -> list[Element]:
    if only is None:
        return sweep.elements
    if only >= len(sweep.elements):
        raise UserError(
            f"only={only} but the sweep has {len(sweep.elements)} runs; write 0 to {len(sweep.elements) - 1}"
        )
    return [sweep.elements[only]]


def _configure(*arguments: str) -> Any:
    """Return the configuration that `--cfg job` prints: of the run `only`, or of the first."""
    from moezoo.config.compose import compose

    keys, words = take(Keys, arguments)
    return compose(*_choose(expand(words), keys.only or 0)[0].words)


COMMAND = SweepCommand(
    "sweep",
    "train a run for every combination of listed values",
    main,
    keys=Keys,
    description="Train a run for every combination of the values that are listed, such as seed=0,1, one after the "
    "other, and compare them. The same command with the same sweep_dir skips finished runs and continues the others. "
    "Page: docs/sweeps.md of the repository.",
    configure=_configure,
    examples=(
        "optimizer.learning_rate=1e-3,3e-3 seed=0,1 model=mixtral steps=100",
        "dispatch=ring,ragged mesh=ep8 sweep_dir=sweeps/dispatch",
        "'seed=range(0,4)' sweep_dir=sweeps/seeds only=3",
    ),
)
