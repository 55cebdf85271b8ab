"""Where the time of a compiled step goes, by named scope, from a trace of JAX's profiler.

XLA's CPU runtime records what every thread does: the operations of each device's program, the tasks that they hand to
the thread pool, and the waits in collectives. An instant at which `n` threads work gives each of them 1 / n. So parts
add up to the step by construction, also where eight devices share two cores. Instants at which threads only wait in
collectives, and instants at which no operation runs, are parts too.

For a GPU the trace records the kernels on each stream, with the operations that they belong to, as long as XLA runs no
CUDA graphs (`moezoo.host.machine.NO_CUDA_GRAPHS`); a stream counts as a thread. For a TPU it records the operations of
each core by their text; the line "XLA Ops" of a core counts as a thread. This has been read from traces written by
hand, and not from a TPU. What names no operation of the program counts as "no operation".
"""

import contextlib
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moezoo.parallel.traces import phase_of
from moezoo.parallel.traffic import Phase
from moezoo.profiling.hlo import COLLECTIVES, Computation, Instruction, read_computations

# Named scope -> part; the innermost scope of an operation decides.
_PARTS = {
    "attention": "attention",
    "positions": "attention",
    "router": "router",
    "routing": "router",
    "dispatch": "dispatch",
    "experts": "experts",
    "ragged": "experts",  # XLA for TPUs names some of its grouped products and their preparation so, without a scope
    "combine": "combine",
    "shared": "shared experts",
    "feed_forward": "feed-forward, other",
    "embedding": "embedding",
    "head": "loss",
    "loss": "loss",
    "weights": "weights",
    "gradient_sums": "optimizer",
    "gradient_norm": "optimizer",
    "optimizer": "optimizer",
    "rounding": "optimizer",
    "layers": "other",
}
_COLLECTIVES, _WAITING, _COPIES, _IDLE = "collectives", "waiting in collectives", "copies", "no operation"
# All parts, in the order in which they are shown.
ORDER = tuple(dict.fromkeys((*_PARTS.values(), _COLLECTIVES, _WAITING, _COPIES, _IDLE)))
# Operations that contain others, whose time is that of the others.
_CONTAINERS = ("while", "call", "conditional")
# Operations that compute nothing.
_MOVES = {
    *("bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice", "dynamic-update-slice"),
    *("get-tuple-element", "pad", "parameter", "reshape", "slice", "transpose", "tuple"),
}
_STEP = "moezoo step"
# The planes of GPUs, whose events name their operation in a statistic, and of TPUs, which have its text on one line.
_GPU, _TPU, _TPU_LINE = "/device:GPU", "/device:TPU", "XLA Ops"
# Events of XLA's runtime: tasks of its thread pool, and parts of a collective.
_POOL, _RENDEZVOUS = "ThreadpoolListener::", ("Rendezvous", "InvokeRendezvous")
_LONG = 1e15  # nanoseconds, much longer than a trace
_ORDERS = {"StopRegion": -_LONG / 10, "StartRegion": -_LONG / 100, "Record": 0.0}


class Operation(NamedTuple):
    """An operation of a compiled program.

    Attributes:
        part: Its part.
        phase: Its phase.
        moves: Whether it only moves data.
        copied: If its part is `copies`, the type of its result and what it does; copies of equal ones count as one.
    """

    part: str
    phase: Phase
    moves: bool
    copied: str = ""


class Profile(NamedTuple):
    """The milliseconds of a traced step, and of each part of it by operation, on average over the steps."""

    whole: float
    parts: dict[str, dict[Operation, float]]


def profile(step: Callable[[], object], times: int, text: str) -> Profile:
    """Trace `times` calls of `step`.

    Args:
        step: A function that runs a compiled program, and returns when it is done.
        times: The number of calls.
        text: The program, as `compiled.as_text()` gives it.
    """
    with tempfile.TemporaryDirectory() as folder:
        with recording(folder):
            for number in range(times):
                with step_of(number):
                    step()
        return read_trace(Path(folder), operations(text))


@contextlib.contextmanager
def recording(folder: Path | str) -> Iterator[None]:
    """Record what happens in the block into `folder`, in the form that `read_trace` and xprof read.

    Raises:
        RuntimeError: Another recording goes on in this process.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of Python would be an event
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def step_of(number: int) -> contextlib.AbstractContextManager[Any]:
    """Return a block that is step `number` of a recording."""
    return jax.profiler.StepTraceAnnotation(_STEP, step_num=number)


def operations(text: str) -> dict[str, Operation]:
    """Return the operations of a program, as `compiled.as_text()` gives it, by the names that a trace has."""
    _, found = read_computations(text)
    return {
        name: _operation(instruction, found)
        for body in found.values()
        for name, instruction in body.items()
        if name != "ROOT" and instruction.op not in _CONTAINERS
    }


def _operation(instruction: Instruction, found: dict[str, Computation]) -> Operation:
    named = re.search(r'op_name="([^"]*)"', instruction.text)
    path = re.sub(r"\bjit\([^()]*\)", "", named[1] if named else "")
    part = next((_PARTS[word] for word in reversed(re.findall(r"\w+", path)) if word in _PARTS), "other")
    moves = _only_moves(instruction, found)
    if instruction.op.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        part = _COLLECTIVES
    elif moves and part == "other":
        kind = re.sub(r"\{[^}]*\}", "", instruction.type)
        return Operation(_COPIES, phase_of(path), moves, f"{kind} {path.rpartition('/')[2] or instruction.op}")
    return Operation(part, phase_of(path), moves)


def _only_moves(instruction: Instruction, found: dict[str, Computation]) -> bool:
    if instruction.op == "fusion":
        return all(_only_moves(inner, found) for called in instruction.called for inner in found[called].values())
    scalar = re.match(r"\w+\[\]", instruction.type)  # the arithmetic of a place to read or write
    return instruction.op in _MOVES or scalar is not None


class Event(NamedTuple):
    """An event of a trace.

    Attributes:
        time: The time, in nanoseconds.
        order: What decides among events at the same time: ends precede beginnings; the longer frame is the outer one.
        thread: The thread that it happened on.
        what: A frame begins or ends, a task of the thread pool is recorded, starts or stops.
        name: The name of the frame, or the number of the task.
    """

    time: float
    order: float
    thread: int
    what: Literal["begin", "end", "Record", "StartRegion", "StopRegion"]
    name: Any


class _Busy(NamedTuple):
    """What a thread did between two events, in nanoseconds: the name of an operation, or `_WAITING`."""

    start: float
    end: float
    name: str


def read_trace(folder: Path, named: dict[str, Operation]) -> Profile:
    """Return where the time of the steps of the newest recording in `folder` went.

    Args:
        folder: The folder of `recording`.
        named: The operations of the program that the steps run.

    Raises:
        ValueError: It has no step, or no operation of the program.
    """
    steps: list[tuple[float, float]] = []
    events: list[Event] = []
    with warnings.catch_warnings():
        # On CPython 3.12, jaxlib's type of statistics has no `__module__`.
        warnings.simplefilter("ignore", DeprecationWarning)
        newest = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        data = jax.profiler.ProfileData.from_file(str(newest))
        for thread, (plane, line) in enumerate((at, line) for at in data.planes for line in at.lines):
            on_gpu, on_tpu = plane.name.startswith(_GPU), plane.name.startswith(_TPU)
            if on_tpu and line.name != _TPU_LINE:
                continue  # its other lines show the same time by module, step and scope
            for event in line.events:
                start_, length = event.start_ns, event.duration_ns
                name = dict(event.stats).get("hlo_op", "") if on_gpu else event.name
                name = name.removeprefix("%").split(" = ")[0] if on_tpu else name
                if name == _STEP:
                    steps.append((start_, event.end_ns))
                elif name.startswith(_POOL):
                    number = dict(event.stats)
                    what: Any = name.removeprefix(_POOL)
                    events.append(Event(start_, _ORDERS[what], thread, what, number.get("_p", number.get("_c"))))
                elif length and (name in named or name in _RENDEZVOUS):
                    events.append(Event(start_, -length, thread, "begin", name))
                    events.append(Event(event.end_ns, length - _LONG, thread, "end", name))
    if not steps or not any(event.what == "begin" for event in events):
        raise ValueError(f"{newest} has {len(steps)} steps, and no operation of the program")
    return divide(steps, events, named)


def _busy(events: Sequence[Event]) -> Iterator[_Busy]:
    """Yield what each thread does.

    A thread does what the innermost open frame on it names. A frame is an operation, the wait or the work for others in
    a collective, or a task of the thread pool, which works for the operation that recorded it.
    """
    frames: dict[int, list[str | None]] = defaultdict(list)
    since: dict[int, float] = {}
    recorded: dict[int, str | None] = {}
    for time, _, thread, what, name in sorted(events, key=lambda event: event[:2]):
        stack = frames[thread]
        if what == "Record":
            recorded[name] = stack[-1] if stack else None
            continue
        if stack and (top := stack[-1]) is not None and time > since[thread]:
            yield _Busy(since[thread], time, top)
        since[thread] = time
        if what == "begin":
            working = next((frame for frame in reversed(stack) if frame not in (None, _WAITING)), None)
            stack.append({"Rendezvous": _WAITING, "InvokeRendezvous": working}.get(name, name))
        elif what == "StartRegion":
            stack.append(recorded.get(name))
        elif stack:
            stack.pop()


def divide(intervals: Sequence[tuple[float, float]], events: Sequence[Event], named: dict[str, Operation]) -> Profile:
    """Divide each instant of the steps equally among the threads that run an operation then.

    Args:
        intervals: The start and end of each step, in nanoseconds.
        events: What happened, in any order.
        named: The operations of the program.
    """
    steps, busy = np.asarray(sorted(intervals)), list(_busy(events))
    starts, ends = np.asarray([span[:2] for span in busy]).T
    step = np.clip(np.searchsorted(steps[:, 0], starts, side="right") - 1, 0, None)
    starts, ends = np.clip(starts, *steps[step].T), np.clip(ends, *steps[step].T)
    works = np.asarray([span.name != _WAITING for span in busy])
    order = np.argsort(np.concatenate([starts, ends]), kind="stable")
    lengths = np.diff(np.concatenate([starts, ends])[order]) / 1e6 / len(steps)  # in ms per step
    working, waiting = (np.cumsum(np.concatenate([kind, -1 * kind])[order])[:-1] for kind in (1 * works, 1 - works))
    # The milliseconds that one working thread has got until each time.
    got = np.empty(2 * len(busy))
    got[order] = np.concatenate([[0], np.cumsum(np.where(working > 0, lengths / np.maximum(working, 1), 0))])
    parts: dict[str, dict[Operation, float]] = defaultdict(lambda: defaultdict(float))
    for span, share in zip(busy, got[len(busy) :] - got[: len(busy)], strict=True):
        if span.name != _WAITING:
            parts[named[span.name].part][named[span.name]] += float(share)
    nothing = Operation("", "outside", moves=False)
    if waiting.any():
        parts[_WAITING][nothing] = float(lengths[(working == 0) & (waiting > 0)].sum())
    whole = float((steps[:, 1] - steps[:, 0]).mean()) / 1e6
    parts[_IDLE][nothing] = whole - sum(sum(part.values()) for part in parts.values())
    return Profile(whole, parts)
