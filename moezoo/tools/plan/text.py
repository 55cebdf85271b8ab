"""The output of `moezoo plan`: the answer, the rows as a table or as records, JSON, and a picture."""

import contextlib
import json
import math
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from moezoo.config.compose import compose_described
from moezoo.errors import UserError
from moezoo.models import name_of
from moezoo.parallel.traffic import CallName
from moezoo.terminal.tables import cell, plain
from moezoo.tools.described import to_train
from moezoo.tools.plan.candidates import mesh_name
from moezoo.tools.plan.estimate import PlanRow, as_mapping
from moezoo.tools.plan.hardware import LEAST_RATIO, Slice
from moezoo.tools.plan.units import BYTES, SECONDS, show_bytes, show_seconds, suiting
from moezoo.training.pictures import Bars, draw_bars

# With so many columns rows are a table, with fewer records; with so many it has more space between its columns.
_LEAST_OF_A_TABLE, _LEAST_OF_A_WIDE_TABLE = 120, 150
_FAR = 4  # a picture has no line for a limit that is so many times the longest bar


def width() -> int:
    """Return the columns of the output: COLUMNS, those of the terminal, or 80 if stdout is none."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def wrap(text: str, indent: str = "") -> list[str]:
    """Return the lines of a text in the columns of the output, all after the first indented by two more."""
    lines = textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return lines or [""]


def as_json(rows: Sequence[PlanRow]) -> str:
    """Return the rows as JSON."""
    return json.dumps([as_mapping(row) for row in rows], indent=1)


def report(rows: Sequence[PlanRow], words: Sequence[str], where: Slice, call: CallName, notes: Sequence[str]) -> str:
    """Return the answer, then all rows and what the first one holds; `notes` are sentences on the rows."""
    details = [*wrap(title(rows, words, where, call)), *_render(rows), *_compared(rows)]
    details += [line for note in notes for line in wrap(note)]
    return "\n".join([*_answer(rows, where, call), "", *details, *_shares(rows[0])])


def stopped(rows: Sequence[PlanRow]) -> str:
    """Return the rows that were done when the command was stopped."""
    return "\n".join(["stopped; what was done:", *_render(rows), ""]) if rows else ""


def title(rows: Sequence[PlanRow], words: Sequence[str], where: Slice, call: CallName) -> str:
    """Return what was planned, and for which devices."""
    chip, about = where.chip, call
    with contextlib.suppress(UserError):  # a strategy that has an option of the words may be in the rows only
        cfg = compose_described(*(rows[0].words if rows else words))
        about = f"{call} {name_of(cfg.model)}: batch_size={cfg.batch_size} seq_len={cfg.seq_len}"
    memory = f"{show_bytes(chip.hbm_bytes)} at {chip.hbm_speed / 1e12:.2f} TB/s"
    return f"{about} on {where}: {where.devices:,} x {chip.flops / 1e12:,.0f} TFLOP/s and {memory}"


def _answer(rows: Sequence[PlanRow], where: Slice, call: CallName) -> Iterator[str]:
    """Yield whether it fits, the memory and the time of the best row, and the command that runs it."""
    best, chip = rows[0], where.chip
    fitting = sum(row.fits for row in rows)
    others = f" ({fitting} of these {len(rows)} layouts fit)" * (len(rows) > 1)
    yield from wrap(
        f"fits {where}: " + (f"yes, {'best ' * bool(others)}with {_layout(best)}" if fitting else "no") + others
    )
    usable, room = show_bytes(best.usable_bytes), show_bytes(chip.predicted_bytes)
    if best.compiled_bytes is not None:
        yield from wrap(f"memory per device: {show_bytes(best.compiled_bytes)} of {usable} that JAX may take")
    elif best.bytes_per_device is not None:
        predicted = f"{show_bytes(best.bytes_per_device)} of {room}"
        yield from wrap(f"memory per device, predicted: {predicted}, {LEAST_RATIO} of what JAX may take")
    if best.step_seconds is not None:
        yield from wrap(f"step: at least {show_seconds(best.step_seconds)}, bound by {best.bound_by}")
    if not fitting:
        yield from wrap(f"why: {best.reason}")
    elif best.caution:
        yield from wrap(f"caution: {best.caution}")
    if fitting and call == "train":
        yield "train with:"
        yield _command([*chip.setting.split(), "moezoo", "train", *map(to_train, _last(best.words))])
    elif fitting and chip.setting:
        yield f"set: {chip.setting}"


def _last(words: Sequence[str]) -> list[str]:
    """Return the overrides that count, without mesh axes of one device."""
    ones = [word for word in words if word.startswith("mesh.") and word.endswith("=1")]
    return list({word.partition("=")[0]: word for word in words if word not in ones}.values())


def _command(words: Sequence[str]) -> str:
    """Return a command in lines that a shell joins. A word that is longer than a line is in pieces, each quoted."""
    lines, room = [""], width() - 2
    for word in words:
        quoted = shlex.quote(word)
        if len(quoted) + 2 > room:
            size = (room - 4) // (5 if "'" in word else 1)
            pieces = [shlex.quote(word[at : at + size]) for at in range(0, len(word), size)]
            lines += ["\\\n".join(pieces)]
        elif lines[-1] and "\n" not in lines[-1] and len(lines[-1]) + len(quoted) + 3 <= room:
            lines[-1] += f" {quoted}"
        else:
            lines.append(f"  {quoted}")
    return " \\\n".join(lines[1:])


def _layout(row: PlanRow) -> str:
    """Return the mesh, the rules, the strategy and settings of memory, by the ends of their keys."""
    last = {word.partition("=")[0]: word for word in row.words if word.startswith(_MEMORY)}
    settings = (f"{key.partition('.')[2]}={word.partition('=')[2]}" for key, word in last.items())
    return " ".join(filter(None, [mesh_name(row.mesh), row.rules, row.dispatch, *settings]))


_MEMORY = ("execution.remat=", "execution.microbatches=", "execution.pipeline.", "execution.reduce_dtype=", "dispatch.")
_COLUMNS: dict[str, Callable[[PlanRow], str]] = {
    "layout": _layout,
    "fits": lambda row: "yes" if row.fits else "NO",
    "memory": lambda row: cell(row.bytes_per_device, show_bytes),
    "compiled": lambda row: cell(row.compiled_bytes, show_bytes),
    "step >=": lambda row: cell(row.step_seconds, show_seconds),
    "bound by": lambda row: row.bound_by or "",
    "bubble": lambda row: cell(row.bubble, ".1%"),
    "compute": lambda row: cell((row.seconds or {}).get("compute"), show_seconds),
    "HBM": lambda row: cell((row.seconds or {}).get("HBM"), show_seconds),
    "links": lambda row: cell(max(_links(row).values(), default=None), show_seconds),
    "no overlap": lambda row: cell(row.unoverlapped_seconds, show_seconds),
    "tokens/s/device <=": lambda row: cell(row.tokens_per_second_per_device, ",.0f"),
    "utilisation <=": lambda row: cell(row.utilisation, ".1%"),
}
_NOTES: dict[str, Callable[[PlanRow], str]] = {"reason": lambda row: row.reason, "caution": lambda row: row.caution}
_LEFT = ("layout", "fits", "bound by")
_HEADERS = {
    "no overlap": "no\noverlap",
    "tokens/s/device <=": "tokens/s\n/device <=",
    "utilisation <=": "utilisation\n<=",
}


def _render(rows: Sequence[PlanRow]) -> list[str]:
    """Return the rows: a table with why rows do not fit under it, or in few columns a record for each row."""
    shown = {name: get for name, get in _COLUMNS.items() if any(get(row) for row in rows)}
    header = [_HEADERS.get(name, name) for name in shown]
    cells = [[get(row) for get in shown.values()] for row in rows]
    right = [number for number, name in enumerate(shown) if name not in _LEFT]
    gap = " " if width() < _LEAST_OF_A_WIDE_TABLE else "  "
    lines = plain(header, cells, right, width=width() - 1, gap=gap)  # its rule is longer by one
    if width() < _LEAST_OF_A_TABLE or max(map(len, lines)) > width():
        named = [(name, get(row)) for row in rows for name, get in (_COLUMNS | _NOTES).items()]
        records = ((wrap(f"{name}: {text}", "  " * (name != "layout")), name) for name, text in named if text)
        return [line for lines, name in records for line in [""] * (name == "layout") + lines]
    whys = [(_layout(row), get(row)) for row in rows for get in _NOTES.values()]
    return lines + [line for layout, why in whys if why for line in wrap(f"{layout}: {why}")]


def _compared(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield the next layout after the best, how many rows are as fast, and what the columns of time are."""
    best, *others = [row for row in rows if row.fits and row.step_seconds is not None] or [rows[0]]
    yield ""
    layout = lambda row: (tuple(row.mesh.items()), row.rules, row.dispatch)  # noqa: E731
    if other := next((row for row in others if layout(row) != layout(best)), None):
        yield from wrap(f"next: {_layout(other)}, at least {show_seconds(other.step_seconds or 0)}, {other.bound_by}")
    if equal := sum(row.step_seconds == best.step_seconds for row in others):
        less = "the first one has less time without overlap, in two digits, or less memory"
        yield from wrap(f"{equal + 1} of these rows have the same bound; {less}")
    least = "Times are the least that peak rates allow; tokens/s and utilisation are bounds from above."
    yield from wrap(least)


def _links(row: PlanRow) -> dict[str, float]:
    return {name: each for name, each in (row.seconds or {}).items() if name not in ("compute", "HBM")}


def _large(held: Mapping[str, int]) -> dict[str, int]:
    """Return the parts of the memory at the peak that are more than 0.5% of it, the largest first."""
    least = 0.005 * sum(held.values())
    return {name: size for name, size in sorted(held.items(), key=lambda item: -item[1]) if size > least}


def _shares(row: PlanRow) -> Iterator[str]:
    """Yield lines about a row: what is held at the peak, FLOPs, and collectives by operation and axis."""
    if not row.memory:
        return
    yield ""
    yield from wrap(f"memory of {_layout(row)} at its peak, in the {row.moment}; parts of more than 0.5%:")
    for name, size in _large(row.memory).items():
        yield from wrap(f"{name}: {show_bytes(size)}", "  ")
    if row.flops_per_device is not None and row.model_flops is not None:
        flops = (row.model_flops, row.flops_per_device, row.recomputed_flops or 0.0)
        model, executed, again = (f"{each / 1e12:,.4g}" for each in flops)
        yield from wrap(f"TFLOP per device: model {model}, executed {executed}, of which recomputed {again}")
    by: dict[tuple[str, str], int] = {}
    for each in row.collectives or ():
        place = each.op, " ".join(each.mesh_axes)
        by[place] = by.get(place, 0) + each.bytes
    named = (f"{op} over {axes} {size / 1e9:,.4g}" for (op, axes), size in sorted(by.items(), key=lambda x: -x[1]))
    if by:
        yield from wrap("GB received per device: " + ", ".join(named))
    if links := ", ".join(f"{name} {show_seconds(value)}" for name, value in _links(row).items()):
        yield from wrap(f"time that links are busy, by where they are cut: {links}")


def draw(rows: Sequence[PlanRow], path: Path, name: str, room: int) -> None:
    """Draw for each row its memory at the peak, by part, beside the `room` up to which it fits; and its times."""
    known = [row for row in rows if row.memory]
    labels = [_layout(row) + ", does not fit" * (not row.fits) for row in known]
    large = {part for row in known for part in _large(row.memory or {})}
    memory = [{part: size for part, size in (row.memory or {}).items() if part in large} for row in known]
    panels = (
        _bars("per device at the peak; at most " + show_bytes(room) + " fits", memory, BYTES, room),
        _bars("at least, one after the other", [_in_turn(row) for row in known], SECONDS),
    )
    draw_bars(path, name, labels, panels)


def _bars(
    about: str, parts: Sequence[Mapping[str, float]], units: Sequence[tuple[str, float]], limit: float = math.inf
) -> Bars:
    """Return a panel in the unit that suits the longest bar, and with a line at a limit that is not far from it."""
    most = max((sum(each.values()) for each in parts), default=0)
    unit, one = suiting(most, units)
    scaled = [{part: size / one for part, size in each.items()} for each in parts]
    return Bars(f"{unit} {about}", scaled, limit / one if limit < _FAR * most else None)


def _in_turn(row: PlanRow) -> dict[str, float]:
    """Return the parts of the time without overlap."""
    if row.seconds is None or row.unoverlapped_seconds is None:
        return {}
    alone = {name: row.seconds[name] for name in ("compute", "HBM")}
    return {**alone, "collectives": row.unoverlapped_seconds - sum(alone.values())}
