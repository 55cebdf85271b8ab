"""`device`: what is worth knowing of one GPU or TPU that nobody has seen yet, in ten minutes.

This file starts processes and does not start JAX; `benchmarks.device_parts` measures. What is measured is a *unit*.
Units belong to *parts*, in the order of what is most worth knowing, and a process of its own runs each part:

- Every row is in `rows.jsonl`, written through to the disk, as soon as it exists; so are the begin and the end of every
  unit. What libraries print is in `log.txt`.
- A unit that fails, crashes or hangs leaves a row that names it, and the next one follows, if needed in a new process.
- A kernel that part `right` finds to be broken is left out of later parts, by name.
- A part has a limit of seconds, each of its units too, and so has the whole.

One process at a time runs, as a TPU serves only one. The next one has imported everything by then, and waits.
"""

import contextlib
import datetime
import glob
import json
import operator
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import moezoo.interrupts as interrupts
from benchmarks.results import Column, Panel, Report, Row, Table, get, log, points, split
from moezoo.errors import UserError, last_words
from moezoo.host.machine import NO_CUDA_GRAPHS
from moezoo.training.files import replace_text

MARK = "moezoo-bench "  # the start of a line of a part's process that is a message
COMPILE = "compile"  # the unit that compiles all programs of a part at once
ROWS, LOG = "rows.jsonl", "log.txt"
_START = 120.0  # seconds that a process may take to begin its first unit


class Part(NamedTuple):
    """A part: its name in `only=`, what of it is measured, and the most seconds of all its units and of one."""

    name: str
    argument: str
    seconds: float
    unit: float

    @property
    def title(self) -> str:
        """The name and the argument."""
        return f"{self.name} {self.argument}".strip()


PARTS = (
    Part("env", "", 150, 60),
    Part("right", "", 240, 60),
    Part("ceilings", "", 60, 30),
    Part("products", "S2", 120, 60),
    Part("attention", "8192", 90, 60),
    Part("torch", "S2", 60, 30),
    Part("tune", "S2", 300, 280),
    Part("layers", "S2", 120, 60),
    Part("step", "", 150, 120),
    Part("olmoe", "16", 200, 180),
    Part("decode", "32768", 60, 30),
    Part("layers", "L3", 120, 60),
    Part("layers", "P1", 120, 60),
    Part("olmoe", "8", 200, 180),
    Part("layers", "L1", 120, 60),
    Part("layers", "S3", 120, 60),
    Part("products", "L1", 120, 60),
    Part("attention", "16384", 90, 60),
    Part("delta_rule", "", 120, 60),
    Part("models", "", 150, 60),
)
NAMES = tuple(dict.fromkeys(part.name for part in PARTS))


class _Fault(NamedTuple):
    """How a process ended too early: the unit that it ran, or "", the kernel that this is about, and the reason."""

    unit: str
    kernel: str | None
    reason: str
    is_over: bool  # whether the time of the part or of the call is over, which is no fault of the unit


class _Processes:
    """Starts each process while the one before it measures. It imports, which takes seconds, and waits for its job on
    stdin, without a device.
    """

    def __init__(self):
        self._next: tuple[subprocess.Popen[str], IO[bytes]] | None = None

    def take(self) -> tuple[subprocess.Popen[str], IO[bytes]]:
        """Return a process, and the file of what it writes to stderr before it has its job."""
        taken, self._next = self._next or self._start(), None
        self._next = self._start()
        return taken

    def close(self) -> None:
        """End the process that waits."""
        waiting, self._next = self._next, None
        if waiting is not None:
            process, err = waiting
            with err, process:
                kill(process)

    def _start(self) -> tuple[subprocess.Popen[str], IO[bytes]]:
        err = tempfile.TemporaryFile()  # noqa: SIM115  it stays open until the process has ended
        process = subprocess.Popen(
            _command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that what it starts can be ended with it
        )
        return process, err


def kill(process: subprocess.Popen[str]) -> None:
    """End a process, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Session:
    """The rows of a folder, and the time that is left."""

    def __init__(self, keys: Any, folder: Path, processes: _Processes):
        self.keys, self.folder, self.end = keys, folder, time.monotonic() + keys.seconds
        self.processes = processes
        self.date = f"{datetime.date.today()}"
        # What must be the same in all rows.
        self.labels: Row = {"size": f"toy ({keys.rehearse})" if keys.rehearse else "full"}
        earlier = _read(Path(keys.resume) / ROWS) if keys.resume else []
        self.rows = _latest(earlier)
        replace_text(folder / ROWS, "".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: Row, part: Part) -> None:
        """Keep a row of a part; the one that begins a unit replaces what an earlier try left."""
        row = {"part": part.title, **row, **self.labels, "date": self.date}
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows = _latest([*self.rows, row])
        if "event" not in row:
            print(json.dumps(row), flush=True)

    def check_labels(self) -> None:
        """Take the device from the part `env`; raise `UserError` if earlier rows are of another one."""
        described = next((row for row in self.rows if row["part"] == "env" and "driver" in row), None)
        versions = next((row["versions"] for row in self.rows if row["part"] == "env" and "versions" in row), {})
        if described is not None:
            self.labels |= {"device": described["device"], "jax": versions.get("jax")}
        for name, own in self.labels.items():
            if other := [row[name] for row in self.rows if row.get(name, own) != own]:
                raise UserError(f"resume={self.keys.resume} has rows of {name} {other[0]}, and this is {own}; omit it")

    def done(self, title: str) -> list[str]:
        """Return the units of a part that have ended, and found nothing wrong."""
        rows = [row for row in self.rows if row["part"] == title]
        wrong = {row["unit"] for row in rows if "error" in row or "left_out" in row or row.get("agrees") is False}
        return [row["unit"] for row in rows if row.get("event") == "end" and row["unit"] not in wrong]

    def is_whole(self, title: str) -> bool:
        """Return whether a part has ended, and all its units are done."""
        rows, done = [row for row in self.rows if row["part"] == title], self.done(title)
        return any(row.get("event") == "whole" for row in rows) and all(row["unit"] in (*done, "") for row in rows)

    def broken(self, units: Sequence[str] | None = None) -> dict[str, str]:
        """Return each kernel that is not right, and why; if `units` are given, as these have found."""
        wrong = (row for row in self.rows if "error" in row or row.get("agrees") is False)
        by_kernel = (row for row in wrong if row.get("kernel") and (units is None or row["unit"] in units))
        return {row["kernel"]: row.get("error", "its results are wrong") for row in by_kernel}


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Return rows without those of a unit that a later one begins again."""
    begun = {(r["part"], r["unit"]): number for number, r in enumerate(rows) if r.get("event") == "begin"}
    return [row for number, row in enumerate(rows) if number >= begun.get((row["part"], row["unit"]), 0)]


def _read(path: Path) -> list[Row]:
    """Return the rows of an earlier call. A last line that was cut is none. Raises `UserError` for other lines."""
    lines, rows = path.read_text(encoding="utf-8").splitlines(keepends=True), []
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
        if isinstance(row, dict) and {"part", "unit"} <= row.keys():
            rows.append(row)
        elif number < len(lines) or line.endswith("\n"):
            raise UserError(f"{path}, line {number}, is no row that device leaves; name another folder in resume=")
    return rows


def run(keys: Any, folder: Path) -> Report:
    """Measure all parts that `keys` asks for, and return all rows that the folder then has.

    Raises `UserError` if there is no accelerator, and for rows of an earlier call on another device.
    """
    processes = _Processes()
    with interrupts.undoing(processes.close):
        try:
            return _run(_Session(keys, folder, processes))
        finally:
            processes.close()


def _run(session: _Session) -> Report:
    keys, folder = session.keys, session.folder
    # As toys, parts of one name are the same.
    parts = {part.name: part for part in reversed(PARTS)}.values() if keys.rehearse else PARTS
    for part in sorted(parts, key=PARTS.index):
        if part.name != "env" and (part.name not in keys.parts or session.is_whole(part.title)):
            continue
        if session.end - time.monotonic() < 1:
            log(f"{part.title}: left, the {keys.seconds:g} s are over; resume={folder} goes on")
            continue
        log(f"{part.title}, {session.end - time.monotonic():.0f} s are left")
        _measure(session, part)
        if part.name == "env":
            session.check_labels()
        checked = [row for row in session.rows if row["part"] == "right" and "kernel" in row]
        if part.name == "right" and checked and len({row["kernel"] for row in checked}) == len(session.broken()):
            log(f"no kernel is right, so nothing else is measured; resume={folder} goes on")
            break
    return report([row for row in session.rows if "event" not in row])


def check(rows: Sequence[Row], folder: Path) -> None:
    """Raise `UserError` if something failed or disagrees."""
    failed, apart = sum("error" in row for row in rows), sum(row.get("agrees") is False for row in rows)
    if failed or apart:
        raise UserError(f"device: {failed} measurements failed and {apart} results disagree; see {folder / ROWS}")


def _measure(session: _Session, part: Part) -> None:
    """Run the units of a part that are not done; where a process ends too early, a new one runs those that are left."""
    end, tried = min(session.end, time.monotonic() + part.seconds), []
    while True:
        before = len(tried)
        fault = _run_process(session, part, end, tried)
        if fault is None:
            session.add({"unit": "", "event": "whole"}, part)
            return
        if part.name == "env" and not fault.unit:
            if not session.rows:  # nothing is left of such a call
                for name in (ROWS, LOG):
                    (session.folder / name).unlink(missing_ok=True)
            raise UserError(fault.reason)
        log(f"{part.title} {fault.unit}: {fault.reason}")
        row: Row = {"unit": fault.unit, "implementation": ""}
        row |= {"kernel": fault.kernel} if fault.kernel and not fault.is_over else {}
        # A process may also end between two units: after an error on a GPU it can compute nothing more.
        is_stuck = not fault.unit and len(tried) == before
        if fault.is_over or fault.unit or is_stuck:
            session.add(row | {"left_out" if fault.is_over else "error": fault.reason}, part)
        if fault.is_over or is_stuck:
            return
        tried += [fault.unit] * bool(fault.unit)


def _run_process(session: _Session, part: Part, end: float, tried: list[str]) -> _Fault | None:
    """Run units in a process until it ends; `tried` are those that it leaves out, and gets those that end."""
    unit, kernel, limit, reason, is_over = "", None, _START, None, False
    until = time.monotonic() + limit

    def wait() -> float:
        return min(until, end) - time.monotonic()

    process, early = session.processes.take()
    with (session.folder / LOG).open("a+b") as err, early:
        at = err.seek(0, os.SEEK_END)
        with process, interrupts.undoing(lambda: kill(process)):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended on importing
                process.stdin.write(json.dumps(_job(session, part, tried)) + "\n")
                process.stdin.close()
            for message in messages(process, MARK, wait):
                if message is None:
                    is_over = until > end
                    whose = "part" if end < session.end else "call"
                    reason = f"the {whose} is out of time" if is_over else f"it did not end in {limit:g} s"
                    kill(process)
                    break
                session.add(message, part)
                event = message.get("event")
                if event == "end":
                    tried.append(unit)
                if event is not None:
                    unit, kernel = (message["unit"], message["kernel"]) if event == "begin" else ("", None)
                    limit = {"": _START, COMPILE: part.seconds}.get(unit, part.unit)
                    until = time.monotonic() + limit
            ended = process.wait()
        early.seek(0)
        err.write(early.read())
        err.seek(at)
        said = last_words(err.read().decode(errors="replace"))
    if reason is None and ended == 0:
        return None
    if reason is None and part.name == "env" and ended > 0 and not unit:
        reason = said.removeprefix("error: ")
    if reason is None:
        how = f"ended by {signal.Signals(-ended).name}" if ended < 0 else f"ended with code {ended}"
        reason = f"its process {how}{': ' * bool(said)}{said}"
    return _Fault(unit, kernel, reason, is_over)


def _job(session: _Session, part: Part, tried: Sequence[str]) -> dict[str, Any]:
    """Return what the process of a part is told."""
    keys = session.keys
    return {
        "environment": _environment(part, keys.rehearse),
        "log": str((session.folder / LOG).resolve()),
        "part": part.name,
        "argument": part.argument,
        "done": [*tried, *(session.done(part.title) if part.name != "env" else ())],
        # On resuming, what was broken is tried again, as it may have been mended.
        "broken": session.broken(tried if part.name == "right" else None),
        "alone": bool(tried),
        "folder": str(session.folder.resolve()),
        "rehearse": keys.rehearse,
        "kernels": list(keys.kernels),
        "seconds": keys.each,
        "samples": keys.samples,
    }


def _command() -> list[str]:
    """Return the command of a process. Only the clone that this file is in has to be there."""
    root = str(Path(__file__).resolve().parents[1])
    # The path is removed again, because libraries look for packages `kernels` and `models`.
    lines = ["import sys", f"sys.path.insert(0, {root!r})", "import benchmarks, moezoo", "del sys.path[0]"]
    lines += ["from benchmarks.device_parts import child", "child(sys.stdin.readline())"]
    return [sys.executable, "-P", "-c", "; ".join(lines)]


def _environment(part: Part, rehearse: str | None) -> Mapping[str, str]:
    """Return variables of a part's process, which JAX reads when it starts; what the user has set stays."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    own = {name: os.environ.get(name, "0.92")}
    if part.name == "torch":  # it shares the memory of a GPU with JAX
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    flags, wanted = os.environ.get("XLA_FLAGS", ""), []
    if rehearse:
        wanted = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    elif glob.glob("/dev/nvidia[0-9]*"):
        # XLA would try many kernels of its own for every other product, which takes minutes; now it takes cuBLAS.
        wanted = ["--xla_gpu_enable_triton_gemm=false"]
        if part.name == "right":  # not timed, so that cuBLAS need not be either
            wanted.append("--xla_gpu_autotune_level=0")
        if part.name in ("step", "olmoe"):  # for their time by scope
            wanted.append(NO_CUDA_GRAPHS)
    own["XLA_FLAGS"] = " ".join([flags, *(flag for flag in wanted if flag.partition("=")[0] not in flags)]).strip()
    return own


# What tables show, in this order, where any row of a part has it.
_COLUMNS = (
    *(
        Column(key, operator.methodcaller("get", key))
        for key in ("unit", "implementation", "pass", "result", "dtype", "scope")
    ),
    *(
        Column(title, operator.methodcaller("get", key), form, scale)
        for title, key, form, scale in (
            ("roundings", "roundings", ".2f", 1),
            ("bound", "bound", ".0f", 1),
            ("differing", "differing", "d", 1),
            ("ms", "ms", ".4g", 1),
            ("spread", "ms_spread", ".2g", 1),
            ("published ms", "published_ms", ".2f", 1),
            ("share", "share", ".1%", 1),
            ("TFLOP/s", "tflops", ".3f", 1),
            ("of matmul", "share_of_matmul", ".0%", 1),
            ("of peak", "utilisation", ".1%", 1),
            ("GB/s", "gigabytes_per_second", ".1f", 1),
            ("tokens/s", "tokens_per_second", ",.0f", 1),
            ("peak GB", "peak_bytes", ".2f", 1e9),
            ("allocated GB", "device_peak_bytes", ".2f", 1e9),
            ("predicted GB", "predicted_bytes", ".2f", 1e9),
        )
    ),
    Column("apart", lambda row: ", ".join(f"{name} {x:+.1%}" for name, x in row.get("apart", {}).items()) or None),
    Column("agrees", lambda row: {True: "yes", False: "NO"}.get(row.get("agrees"))),
)


def report(rows: Sequence[Row]) -> Report:
    """Return a table per part; the picture has TFLOP/s of products, attention and layers, and the time of scopes."""
    measured = [row for row in rows if not {"error", "left_out"} & row.keys()]
    tables = []
    for part, some in split(measured, "part").items():
        columns = [column for column in _COLUMNS if any(get(row, column.value) is not None for row in some)]
        tables.append(Table(part, columns, some))
    others = [row for row in rows if row not in measured]
    for title, key in (("left out", "left_out"), ("failed", "error")):
        some = [row for row in others if key in row]
        columns = [Column("part", "part"), Column("unit", "unit"), Column("why", key)]
        tables += [Table(title, columns, some)] if some else []
    panels = [
        Panel(f"{part}, TFLOP/s", points(some, "unit", "implementation", "tflops"))
        for part, some in split([row for row in measured if row.get("tflops")], "part").items()
    ]
    for part, some in split([row for row in measured if "scope" in row], "part").items():
        panels.append(Panel(f"{part}, ms", {row["scope"]: {"": row["ms"]} for row in some}))
    kind = next((row["device"] for row in rows if row.get("device")), "")
    return Report(rows, tables, [[panel] for panel in panels], f"device: {kind}, bfloat16")


def messages(process: subprocess.Popen[str], mark: str, wait: Callable[[], float]) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON of the lines that a process prints with `mark` at their start.

    If none comes for the seconds that `wait` returns before each, it yields None, and nothing after it.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def receive() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, wait()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        if line.startswith(mark):
            yield json.loads(line.removeprefix(mark))
