"""`moezoo plan`: what will happen on hardware that this machine does not have."""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import moezoo.interrupts as interrupts
from moezoo.cli.command import ConfiguredCommand
from moezoo.config.options import key, take, take_switches
from moezoo.errors import UserError
from moezoo.typed import Size

_LAYOUTS = 800  # what a search looks at, by default
_BEST, _SHOWN = 3, 10  # how many of a search are compiled, and shown
_STRATEGIES = ("dense", "capacity", "gather", "ring", "ragged")


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's own keys."""

    topology: str = key(
        "the devices: v5p:4x4x4 (chips along each torus dimension; also v5e, v6e, tpu7x), h200:8 (GPUs of a node; also "
        "a100, h100, b200), h200:8x8 (nodes x GPUs)",
        "KIND:SIZES",
    )
    folder: str | None = key(
        "instead of model: a Hugging Face folder, of which config.json is read and no weight, or a config.json",
        "FOLDER",
        default=None,
    )
    mesh: str | None = key("one mesh, or several to compare: fsdp64,fsdp8_ep8; all for a search", "A,B", default=None)
    rules: str | None = key("rules, or several to compare; all for each", "A,B", default=None)
    dispatch: str | None = key("a strategy, or several to compare; all for each", "A,B", default=None)
    layouts: Size | None = key(f"the most layouts that a search looks at, {_LAYOUTS} by default", "N", default=None)


@dataclasses.dataclass(frozen=True)
class Switches:
    """The command's options."""

    call: Literal["train", "evaluate", "prefill", "decode"] = key(
        "what runs, as in `moezoo sharding`", "train|evaluate|prefill|decode", default="train"
    )
    estimate: bool = key("compile nothing: by the memory model and the traced program", default=False)
    json: bool = key("print the rows as JSON, alone on stdout", default=False)
    picture: str | None = key("draw bars of memory and time of each row into this PNG file", "FILE", default=None)


def main(arguments: Sequence[str]) -> None:
    """Print the rows of a plan, and what it recommends."""
    switches, words = take_switches(Switches, arguments)
    keys, words = take(Keys, words)
    words = [f"folder={keys.folder}"] * (keys.folder is not None) + words
    for word in words:
        if word.startswith("run_dir="):
            raise UserError(f"{word}: plan writes no run; to plan for a saved one, write resume=FOLDER")
    if switches.picture is not None and not Path(switches.picture).absolute().parent.is_dir():
        raise UserError(f"--picture={switches.picture}: there is no such folder; make it first")
    from moezoo.parallel.mesh import cpu_devices, has_started
    from moezoo.tools.plan.hardware import parse_slice

    where = parse_slice(keys.topology)
    if not has_started():
        cpu_devices(1)  # tracing must not occupy an accelerator
    from moezoo.tools.apart import check_compiler
    from moezoo.tools.described import folder_lines
    from moezoo.tools.plan import text

    searching = _searching(keys, words)
    if keys.layouts is not None and not searching:
        raise UserError(f"layouts={keys.layouts}: of a search, and there is none; leave it out, or write mesh=all")
    if not switches.estimate:
        check_compiler(str(where))
    notes = folder_lines(words)
    found: list[Any] = []
    rows = _compare(keys, words, where, switches)
    if searching:
        rows = _search(keys.layouts or _LAYOUTS, words, where, switches, notes)
    with interrupts.undoing(lambda: _write(text.stopped(found))):
        for row in rows:
            found[:] = row
    if switches.json:
        print(text.as_json(found))
    else:
        print(text.report(found, words, where, switches.call, notes))
    if switches.picture is not None:
        name = text.title(found, words, where, switches.call)
        text.draw(found, Path(switches.picture), name, where.chip.predicted_bytes)
    if not any(row.fits for row in found):
        raise UserError(f"nothing fits topology={where}")


def _write(text: str) -> None:
    if text:
        os.write(sys.stdout.fileno(), text.encode())


def _searching(keys: Keys, words: Sequence[str]) -> bool:
    """Return whether to search for a layout. Raises `UserError` for mesh=all beside the size of an axis."""
    sizes = [word for word in words if word.startswith("mesh.") and not word.startswith("mesh.axis_types")]
    if keys.mesh == "all" and sizes:
        raise UserError(f"mesh=all {sizes[0]}: a search chooses all sizes; leave one of the two out")
    return keys.mesh == "all" or not (sizes or any((keys.rules, keys.dispatch, keys.mesh)))


def _list(value: str | None, every: Sequence[str]) -> list[str]:
    names = (name.strip() for name in value.split(",")) if value else ()
    return list(every) if value == "all" else list(dict.fromkeys(names))


def _compare(keys: Keys, words: Sequence[str], where: Any, switches: Switches) -> Iterator[list[Any]]:
    """Yield the rows so far, as each is done."""
    from moezoo.config import overrides
    from moezoo.tools.plan import estimate as plan
    from moezoo.tools.plan.candidates import check_mesh, fill, listed

    rules, strategies = _list(keys.rules, overrides.groups()["rules"]), _list(keys.dispatch, _STRATEGIES)
    for word in (*(f"rules={name}" for name in rules), *(f"dispatch={name}" for name in strategies)):
        overrides.read([word])
    candidates = list(listed(words, _list(keys.mesh, ()), rules, strategies))
    if len(candidates) == 1:  # a mistake in the only one ends the command before any progress
        check_mesh(fill(candidates[0], where), where)
    done: list[Any] = []
    for number, candidate in enumerate(candidates, 1):
        _progress(f"{number}/{len(candidates)}: {' '.join(candidate[len(words) :]) or 'as configured'}")
        began = time.monotonic()
        try:
            full = fill(candidate, where)
            check_mesh(full, where)
            row = plan.estimate(full, where, switches.call)
        except UserError as error:
            row = plan.refused(candidate, where, str(error))
        _progress(f"  {_outcome(row)} ({time.monotonic() - began:.0f} s)")
        row = row if row.fits else _helped(row, where, switches.call)
        if not switches.estimate and row.bytes_per_device is not None:
            row = _compiled(row, where, switches.call)
        done.append(row)
        yield plan.sort(done)


def _search(most: int, words: Sequence[str], where: Any, switches: Switches, notes: list[str]) -> Iterator[list[Any]]:
    """Yield the best rows by estimate so far, then the best of all with what the compiler says of them.

    At most the first `most` layouts are looked at, and no time bounds them: what is found is the same on any machine.
    How many they are is appended to `notes`.
    """
    from moezoo.tools.plan import estimate as plan
    from moezoo.tools.plan.candidates import searched

    done, seen, best = [], set(), None
    candidates = list(searched(words, where, switches.call))
    if not candidates:
        raise UserError(f"no mesh of {where.devices} devices splits all sizes evenly; change batch_size or topology")
    looked = f"{min(most, len(candidates)):,} of {len(candidates):,} layouts"
    notes.append(f"The search looked at {looked}.")
    _progress(f"searching {looked}")
    for number, candidate in enumerate(candidates[:most], 1):
        try:
            program = plan.program_of(candidate, where)
        except UserError:
            program = candidate
        if program in seen:  # other rules, the same program
            continue
        seen.add(program)
        done.append(plan.estimate(candidate, where, switches.call, least=True))
        rows = plan.distinct(plan.sort(done))
        if rows[0] is not best:
            best = rows[0]
            _progress(f"{number}: {' '.join(candidate[len(words) :])}: {_outcome(best)}")
        yield rows[:_SHOWN]
    rows = plan.sort([plan.with_memory(row, where, switches.call) for row in plan.distinct(plan.sort(done))[:_SHOWN]])
    if switches.call == "train":
        rows = plan.sort([*_recomputing_less(rows[:_BEST], where), *rows])
    if not rows[0].fits:
        _progress("nothing fits; trying settings that save memory on the smallest")
        rows = plan.distinct(plan.sort([*_saving(rows[:_SHOWN], where, switches.call), *rows]))
    if not rows[0].fits:
        rows = [_helped(rows[0], where, switches.call), *rows[1:]]
    rows = rows[:_SHOWN]
    for number, row in enumerate(rows[:_BEST]):
        if not switches.estimate and row.fits:
            _progress(f"compiling {' '.join(row.words[len(words) :])}")
            rows[number] = _compiled(row, where, switches.call)
            yield plan.sort(rows)
    yield plan.sort(rows)


def _recomputing_less(rows: Sequence[Any], where: Any) -> Iterator[Any]:
    """Yield rows that keep more for the backward pass, where that fits: fewer FLOPs are executed."""
    from moezoo.tools.plan import estimate as plan

    for row in (row for row in rows if row.fits):
        for remat in ("none", "dots"):
            kept = plan.estimate((*row.words, f"execution.remat={remat}"), where, "train", least=True)
            if kept.fits:
                yield kept
                break


def _saving(rows: Sequence[Any], where: Any, call: Any) -> Iterator[Any]:
    """Yield rows that do not fit with settings with which they do."""
    from moezoo.tools.plan import estimate as plan

    for row in rows:
        for settings in plan.settings_that_help(row.words, where, call) if row.bytes_per_device else ():
            found = plan.estimate((*row.words, *settings.split()), where, call)
            _progress(f"{' '.join(found.words[-8:])}: {_outcome(found)}")
            yield found


def _helped(row: Any, where: Any, call: Any) -> Any:
    """Return a row that does not fit with what would make it fit."""
    from moezoo.tools.plan.estimate import remedies

    if row.bytes_per_device is None:
        return row
    _progress("  trying what would make it fit")
    found = "; or ".join(remedies(row.words, where, call))
    return row._replace(reason=f"{row.reason}; " + (f"fits with {found}" if found else "nothing that was tried helps"))


def _compiled(row: Any, where: Any, call: Any) -> Any:
    from moezoo.tools.apart import compile_apart
    from moezoo.tools.plan.units import show_bytes

    try:
        found = compile_apart(row.words, str(where), call)
    except UserError as error:
        # Only this says that the program does not fit; anything else leaves what was predicted.
        too_large = "RESOURCE_EXHAUSTED" in str(error)
        return row._replace(fits=row.fits and not too_large, reason=f"not compiled: {error}")
    fits, peak = found.peak <= row.usable_bytes, show_bytes(found.peak)
    reason = "" if fits else row.reason or f"the compiler needs {peak} of {show_bytes(row.usable_bytes)}"
    took = f"{found.seconds:.0f} s, {show_bytes(found.host_bytes)} of this machine"
    _progress(f"  compiled ({'remembered' if found.remembered else took}): {peak} per device")
    return row._replace(compiled_bytes=found.peak, fits=fits, reason=reason)


def _outcome(row: Any) -> str:
    from moezoo.tools.plan.units import show_bytes, show_seconds

    if row.step_seconds is None:
        return row.reason
    memory = show_bytes(row.bytes_per_device) + ", does not fit" * (not row.fits)
    return f"{memory}; at least {show_seconds(row.step_seconds)}, bound by {row.bound_by}"


def _progress(text: str) -> None:
    from moezoo.tools.plan.text import wrap

    print(*wrap(text.lstrip(), " " * (len(text) - len(text.lstrip()))), sep="\n", file=sys.stderr, flush=True)


COMMAND = ConfiguredCommand(
    "plan",
    "say what will fit and how fast it can be, on absent hardware",
    main,
    keys=Keys,
    description="Say whether a configuration fits on a slice of TPUs or nodes of GPUs that this machine does not have, "
    "how long a step takes at least, and what binds it. Each row is compiled as it would run, for these devices "
    "(pip install 'moezoo[plan]'), or with --estimate only traced. Without a mesh, it searches for the best layout. "
    "The answer comes first, then all rows: a table in 120 columns or more, records in fewer. The columns are COLUMNS, "
    "or the terminal's; without a terminal they are 80. The exit code is 2 if nothing fits. Page: docs/planning.md of "
    "the repository.",
    switches=Switches,
    examples=(
        "model=mixtral_8x7b topology=v5p:4x4x4 batch_size=768 seq_len=4096",
        "model=qwen3_30b_a3b topology=h200:8 mesh=ep8 dispatch=all batch_size=64 seq_len=4096 --estimate",
        "model=deepseek_v3 topology=v5p:8x8x8 mesh=fsdp64_ep8,fsdp512 rules=all batch_size=512 seq_len=4096 --estimate",
        "folder=FOLDER topology=h200:8 batch_size=64 seq_len=4096 execution.dtype=bfloat16 --estimate",
        "model=gpt_oss_120b topology=h200:8 rules=serve mesh=ep8 batch_size=64 seq_len=4096 --call=decode",
    ),
    groups=("model",),
)
