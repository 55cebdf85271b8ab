"""Record some steps of a run with JAX's profiler, and write where their time went."""

import contextlib
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh

import moezoo.terminal.tables as tables
from moezoo.config.settings import ProfileSettings
from moezoo.parallel import distributed
from moezoo.profiling.profile import ORDER, Operation, Profile, operations, read_trace, recording, step_of
from moezoo.training.files import replace_text, writing_to

PAGE, FOLDER = "profile.md", "profile"
# The median of this many steps before the first recorded one is the time of a step without the recording.
_BEFORE = 20
_PHASES = ("forward", "recomputed", "backward")
_TITLES = ("part", "ms", "share", *_PHASES, "moving data")
_EXPLANATION = """\
- At an instant at which n threads work, each gets 1/n of it, so the parts add up to the whole step. A thread is one
  of the CPU, a stream of a GPU, or a core of a TPU.
- A part is the innermost named scope of an operation; "weights" casts and rearranges weights around their gathers, and
  "other" has no scope. "collectives" is the time in which they move or add data, whatever their scope, and "waiting in
  collectives" that in which threads only wait for others. "copies" are moves without a scope. In "no operation" none of
  the step's operations runs.
- "forward", "recomputed" and "backward" are parts of the time of the losses and their gradients; "moving data" is
  the time of operations that compute nothing, whatever their phase.
"""


class Profiler:
    """Records the steps that `settings` name, on the first process, and writes `profile.md` and the trace.

    A failure of the profiler is reported in one line, and the run goes on.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        folder: Path,
        compiled: "jax.stages.Compiled",
        mesh: Mesh,
        report: Callable[[str], object],
    ):
        """Prepare to record steps of the program `compiled` on `mesh` into the run's `folder`."""
        self._settings = settings if distributed.is_first() else ProfileSettings()
        self._folder, self._compiled, self._mesh, self._report = folder, compiled, mesh, report
        self._open = contextlib.ExitStack()
        self._number, self._recording = 0, False
        self._seconds: dict[int, float] = {}  # step -> seconds
        self._between: list[float] = []  # seconds around each recorded step, for data, rows, evaluation and saves

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording:
            self._open.close()
            self._report(f"profile: the run ends before step {self._settings.last}, so there is no {PAGE}")

    def follow(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the numbers of steps; begin the recording before the first one to record, and end it after the last."""
        for number in numbers:
            self._number = number
            if number == self._settings.start:
                self._begin()
            began = time.perf_counter()
            yield number
            if self._recording:
                self._between.append(time.perf_counter() - began - self._seconds[number])
                if number == self._settings.last:
                    self._end()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return the block that runs the step."""
        began = time.perf_counter()
        with step_of(self._number) if self._recording else contextlib.nullcontext():
            yield
        if self._number <= self._settings.last:
            self._seconds[self._number] = time.perf_counter() - began

    def _begin(self) -> None:
        try:
            self._open.enter_context(recording(self._folder / FOLDER))
            self._recording = True
        except RuntimeError as error:  # there is one profiler per process
            self._report(f"profile: nothing is recorded: {error}")

    def _end(self) -> None:
        self._recording = False
        with writing_to("run_dir", self._folder):
            self._open.close()
        try:
            found = read_trace(self._folder / FOLDER, operations(str(self._compiled.as_text())))
        except ValueError as error:
            self._report(f"profile: no {PAGE}: {error}")
            return
        with writing_to("run_dir", self._folder):
            replace_text(self._folder / PAGE, self._render(found))

    def _render(self, found: Profile) -> str:
        """Return the page: where the time of the recorded steps went, and how that compares with other steps."""
        first, last = self._settings.start, self._settings.last
        devices = list(self._mesh.local_devices)
        before = [seconds for step, seconds in self._seconds.items() if step < (first or 0)]
        undisturbed = statistics.median(before[1:][-_BEFORE:]) if len(before) > 1 else None  # the first one warms up
        lines = [
            f"# Steps {first} to {last}",
            "",
            f"jax {jax.__version__}, {devices[0].device_kind} devices of this process: {len(devices)}, "
            f"{datetime.date.today()}",
            "",
            *tables.markdown(_TITLES, _rows(found), right=range(1, len(_TITLES))),
            "",
            f"- The clock: {1e3 * statistics.fmean(self._seconds[n] for n in self._recorded()):.1f} ms per step.",
            f"- Between steps, for data, rows, evaluation and saves: {1e3 * statistics.fmean(self._between):.1f} ms.",
        ]
        if undisturbed is not None:
            lines.append(f"- Without the recording, the median of steps before: {1e3 * undisturbed:.1f} ms.")
        if devices[0].platform == "tpu":
            lines.append("- This reader of TPU traces was tested on examples, never on a device.")
        lines += [*_EXPLANATION.splitlines(), f"- The trace: `pip install xprof && xprof --logdir {FOLDER}`", ""]
        return "\n".join(lines)

    def _recorded(self) -> range:
        assert self._settings.start is not None
        return range(self._settings.start, self._settings.last + 1)


def _rows(found: Profile) -> Iterator[list[str]]:
    """Yield a row for each part, and one for the whole step."""
    columns: list[dict[str, Any]] = [*({"phase": phase} for phase in _PHASES), {"moves": True}]
    whole: list[float] = [0.0] * len(columns)
    for name in (name for name in ORDER if name in found.parts):
        part = found.parts[name]
        ms = sum(part.values())
        times = [_sum(part, **fields) for fields in columns]
        whole = [a + b for a, b in zip(whole, times, strict=True)]
        yield [name, f"{ms:.2f}", f"{ms / found.whole:.1%}", *(_number(value) for value in times)]
    yield ["whole step", f"{found.whole:.2f}", "100.0%", *map(_number, whole)]


def _number(ms: float) -> str:
    return f"{ms:.2f}" if ms >= 0.005 else ""


def _sum(part: dict[Operation, float], **fields: Any) -> float:
    return sum(ms for op, ms in part.items() if all(getattr(op, name) == value for name, value in fields.items()))


@contextlib.contextmanager
def naming_operations(settings: ProfileSettings) -> Iterator[None]:
    """Compile what is recorded with the scopes of this code; a program from a cache may have those of older code."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, before or settings.start is not None)
    try:
        yield
    finally:
        jax.config.update(name, before)
