"""Where the time of a training step on CPU devices goes, by named scope, from a trace.

Measures: the compiled step of a training run, optimiser included, on random tokens.
Against: the whole step; the parts add up to it.
Columns: see `ProfileRow`.

XLA's CPU runtime records what every thread does: the operations of each device's program, the tasks that they hand to
the thread pool, and the waits in collectives. An instant at which `n` threads work gives each of them 1 / n. So parts
add up to the step by construction, also where eight devices share two cores. Instants at which threads only wait in
collectives, and instants at which no operation runs, are parts too.
"""

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.hlo import COLLECTIVES, Computation, Instruction, read_computations
from moezoo.bench.timing import measure
from moezoo.bench.train_step import prepare_step
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.parallel.mesh import start
from moezoo.parallel.traces import phase_of
from moezoo.parallel.traffic import Phase

# Named scope -> part; the innermost scope of an operation decides.
_PARTS = {
    "attention": "attention",
    "positions": "attention",
    "router": "router",
    "routing": "router",
    "dispatch": "dispatch",
    "experts": "experts",
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
    "layers": "other",
}
_COLLECTIVES, _WAITING, _COPIES, _IDLE = "collectives", "waiting in collectives", "copies", "no operation"
# The order of rows.
_ORDER = tuple(dict.fromkeys((*_PARTS.values(), _COLLECTIVES, _WAITING, _COPIES, _IDLE)))
# Operations that contain others, whose time is that of the others.
_CONTAINERS = ("while", "call", "conditional")
# Operations that compute nothing.
_MOVES = {
    *("bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice", "dynamic-update-slice"),
    *("get-tuple-element", "pad", "parameter", "reshape", "slice", "transpose", "tuple"),
}
_STEP = "moezoo step"
# Events of XLA's runtime: tasks of its thread pool, and parts of a collective.
_POOL, _RENDEZVOUS = "ThreadpoolListener::", ("Rendezvous", "InvokeRendezvous")
_LONG = 1e15  # nanoseconds, much longer than a trace
_ORDERS = {"StopRegion": -_LONG / 10, "StartRegion": -_LONG / 100, "Record": 0.0}


class ProfileRow(TypedDict):
    """One part of a step.

    Attributes:
        settings: the overrides.
        name: the part.
        ms: milliseconds per step, on average over the traced steps.
        share: of the traced step.
        forward_ms, recomputed_ms, backward_ms: of `ms`, by phase; the rest is outside of differentiation.
        moving_ms: of `ms`, in operations that only move data: copies, transposes, slices, fills.
        step_ms: the whole traced step.
        untraced_ms: the median step without a trace.
        steps, devices: the number of traced steps, and of devices.
    """

    part: str
    settings: str
    name: str
    ms: float
    share: float
    forward_ms: float
    recomputed_ms: float
    backward_ms: float
    moving_ms: float
    step_ms: float
    untraced_ms: float
    steps: int
    device: str
    devices: int
    dtype: str


class Operation(NamedTuple):
    """An operation of a compiled program: its part, its phase, and whether it only moves data."""

    part: str
    phase: Phase
    moves: bool


def profile_step(
    overrides: Sequence[str], seconds: float, samples: int, log: Callable[[str], None]
) -> list[ProfileRow]:
    """Trace steps of a configuration and return the time of each part.

    Args:
        overrides: as for `moezoo.compose`.
        seconds: trace about as many steps as take this long.
        samples: the most steps to trace.
        log: receives progress lines.

    Raises:
        UserError: the devices are no CPUs; their traces have other events.
    """
    cfg = compose(*overrides)
    devices = start(cfg.mesh.devices)
    if devices[0].platform != "cpu":
        raise UserError(
            f"bench profile reads traces of CPU devices, and these are {devices[0].platform}; set JAX_PLATFORMS=cpu"
        )
    log(f"compiling {' '.join(overrides)}")
    # Otherwise a program from a compilation cache may have the named scopes of older code.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    call, compiled = prepare_step(cfg)
    untraced = measure({"step": call}, seconds=seconds / 2, samples=samples)["step"].ms
    count = int(np.clip(seconds * 1e3 / untraced, 1, samples))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(count):
                with jax.profiler.TraceAnnotation(_STEP):
                    call()
        log(f"reading the trace of {count} step{'s' * (count != 1)}")
        whole, parts = read_trace(Path(folder), operations(str(compiled.as_text())))
    return [
        {
            "part": "profile",
            "settings": " ".join(overrides),
            "name": name,
            "ms": round(sum(parts[name].values()), 4),
            "share": round(sum(parts[name].values()) / whole, 5),
            **{f"{phase}_ms": _sum(parts[name], phase=phase) for phase in ("forward", "recomputed", "backward")},
            "moving_ms": _sum(parts[name], moves=True),
            "step_ms": round(whole, 4),
            "untraced_ms": round(untraced, 4),
            "steps": count,
            "device": devices[0].device_kind,
            "devices": cfg.mesh.devices,
            "dtype": cfg.execution.dtype,
        }
        for name in _ORDER
        if name in parts
    ]  # pyright: ignore[reportReturnType]  (the keys of the phases)


def _sum(part: dict[Operation, float], **fields: Any) -> float:
    chosen = (ms for op, ms in part.items() if all(getattr(op, name) == value for name, value in fields.items()))
    return round(sum(chosen, 0.0), 4)


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
        part = _COPIES
    return Operation(part, phase_of(path), moves)


def _only_moves(instruction: Instruction, found: dict[str, Computation]) -> bool:
    if instruction.op == "fusion":
        return all(_only_moves(inner, found) for called in instruction.called for inner in found[called].values())
    scalar = re.match(r"\w+\[\]", instruction.type)  # the arithmetic of a place to read or write
    return instruction.op in _MOVES or scalar is not None


class Event(NamedTuple):
    """An event of a trace.

    Attributes:
        time: in nanoseconds.
        order: decides among events at the same time: ends precede beginnings, and the longer frame is the outer one.
        thread: the thread that it happened on.
        what: a frame begins or ends, a task of the thread pool is recorded, starts or stops.
        name: the name of the frame, or the number of the task.
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


def read_trace(folder: Path, named: dict[str, Operation]) -> tuple[float, dict[str, dict[Operation, float]]]:
    """Return the milliseconds of a traced step, and of each part of it by operation, on average over the steps.

    Args:
        folder: where `jax.profiler.trace` wrote; every step has the annotation `_STEP`.
        named: the operations of the program.
    """
    steps: list[tuple[float, float]] = []
    events: list[Event] = []
    with warnings.catch_warnings():
        # On CPython 3.12, jaxlib's type of statistics has no `__module__`.
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(next(folder.glob("plugins/profile/*/*.xplane.pb"))))
        for thread, line in enumerate(line for plane in data.planes for line in plane.lines):
            for event in line.events:
                name, start_, length = event.name, event.start_ns, event.duration_ns
                if name == _STEP:
                    steps.append((start_, event.end_ns))
                elif name.startswith(_POOL):
                    number = dict(event.stats)
                    what: Any = name.removeprefix(_POOL)
                    events.append(Event(start_, _ORDERS[what], thread, what, number.get("_p", number.get("_c"))))
                elif length and (name in named or name in _RENDEZVOUS):
                    events.append(Event(start_, -length, thread, "begin", name))
                    events.append(Event(event.end_ns, length - _LONG, thread, "end", name))
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


def divide(
    intervals: Sequence[tuple[float, float]], events: Sequence[Event], named: dict[str, Operation]
) -> tuple[float, dict[str, dict[Operation, float]]]:
    """Divide each instant of the steps equally among the threads that run an operation then.

    Args:
        intervals: the start and end of each step, in nanoseconds.
        events: what happened, in any order.
        named: the operations of the program.

    Returns:
        The milliseconds of a step, and of each part of it by operation, on average over the steps.
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
    return whole, parts


def print_table(rows: Sequence[ProfileRow], console: Console) -> None:
    """Print the parts of a step."""
    first = rows[0]
    devices = f"{first['devices']} {first['device']} device{'s' * (first['devices'] != 1)}"
    table = Table(
        *("part", "ms", "share", "forward", "recomputed", "backward", "moving data"),
        title=f"{first['settings']}: {first['steps']} steps of {first['step_ms']:.1f} ms "
        f"({first['untraced_ms']:.1f} ms without the trace), {devices}, {first['dtype']}",
        box=box.SIMPLE,
    )
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    times = ("forward_ms", "recomputed_ms", "backward_ms", "moving_ms")
    for row in rows:
        cells = (f"{row[key]:.1f}" if row[key] >= 0.05 else "" for key in times)
        table.add_row(row["name"], f"{row['ms']:.1f}", f"{row['share']:.1%}", *cells)
    totals = (f"{sum(row[key] for row in rows):.1f}" for key in times)
    table.add_row("whole step", f"{first['step_ms']:.1f}", f"{sum(row['share'] for row in rows):.1%}", *totals)
    console.print(table)


def picture(rows: Sequence[ProfileRow], path: Path) -> None:
    """Draw the milliseconds of each part as a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([row["name"] for row in rows][::-1], [row["ms"] for row in rows][::-1])
    axes.set_xlabel("ms per step")
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(rows[0]["settings"], fontsize=8, wrap=True)
    figure.savefig(path, dpi=120)
