"""The output of `moezoo plan`: a table, JSON, a recommendation, and a picture."""

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.models import name_of
from moezoo.parallel.traffic import CallName
from moezoo.tools.plan.candidates import mesh_name
from moezoo.tools.plan.estimate import PlanRow, as_mapping
from moezoo.tools.plan.hardware import Slice

_GIB = 2**30
_WIDEST = 500  # no line is wrapped; most fit 180 columns


def as_json(rows: Sequence[PlanRow]) -> str:
    """Return the rows as JSON."""
    return json.dumps([as_mapping(row) for row in rows], indent=1)


def title(rows: Sequence[PlanRow], words: Sequence[str], where: Slice, call: CallName) -> str:
    """Return the line above the table."""
    chip, about = where.chip, call
    with contextlib.suppress(UserError):  # a strategy that has an option of the words may be in the rows only
        cfg = compose(*(rows[0].words if rows else words))
        about = f"{call} {name_of(cfg.model)}: batch_size={cfg.batch_size} seq_len={cfg.seq_len}"
    memory = f"{chip.hbm_bytes / _GIB:.0f} GiB at {chip.hbm_speed / 1e12:.2f} TB/s"
    lines = [
        f"{about} on {where}: {where.devices:,} x {chip.flops / 1e12:,.0f} TFLOP/s and {memory}",
        "Seconds are the least that peak rates allow; tokens/s and utilisation are bounds from above.",
    ]
    return "\n".join(lines)


def render(heading: str, rows: Sequence[PlanRow]) -> str:
    """Return the table, and under it why rows do not fit."""
    table = Table(box=box.SIMPLE)
    shown = {name: get for name, get in _COLUMNS.items() if any(get(row) for row in rows)}
    for name in shown:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(get(row) for get in shown.values()))
    console = Console(width=_WIDEST, record=True, file=io.StringIO())
    console.print(table)
    lines = [heading, *(line.rstrip() for line in console.export_text().splitlines() if line.strip())]
    lines += [f"{_name(row)}: {why}" for row in rows for why in (row.reason, row.caution) if why]
    lines += _shares(rows[0]) if rows and rows[0].memory else []
    return "\n".join(lines)


def _name(row: PlanRow) -> str:
    return " ".join(filter(None, [mesh_name(row.mesh), row.rules, row.dispatch, _settings(row)]))


def _number(get: Callable[[PlanRow], float | None], form: str, unit: float = 1.0) -> Callable[[PlanRow], str]:
    def cell(row: PlanRow) -> str:
        value = get(row)
        return "" if value is None else format(value / unit, form)

    return cell


def _settings(row: PlanRow) -> str:
    """Return settings of memory, by the ends of their keys, such as "microbatches=4" and "pipeline.microbatches=16"."""
    last = {word.partition("=")[0]: word for word in row.words if word.startswith(_MEMORY)}
    return " ".join(f"{key.partition('.')[2]}={word.partition('=')[2]}" for key, word in last.items())


_MEMORY = ("execution.remat=", "execution.microbatches=", "execution.pipeline.", "execution.reduce_dtype=", "dispatch.")
_LEFT = ("mesh", "rules", "dispatch", "settings", "bound by", "fits")
_COLUMNS: dict[str, Callable[[PlanRow], str]] = {
    "mesh": lambda row: mesh_name(row.mesh),
    "rules": lambda row: row.rules,
    "dispatch": lambda row: row.dispatch,
    "settings": _settings,
    "fits": lambda row: "yes" if row.fits else "NO",
    "GiB": _number(lambda row: row.bytes_per_device, ".4g", _GIB),
    "compiled": _number(lambda row: row.compiled_bytes, ".4g", _GIB),
    "s/step >=": _number(lambda row: row.step_seconds, ".4g"),
    "bound by": lambda row: row.bound_by or "",
    "bubble": _number(lambda row: row.bubble, ".1%"),
    "compute s": _number(lambda row: (row.seconds or {}).get("compute"), ".3g"),
    "HBM s": _number(lambda row: (row.seconds or {}).get("HBM"), ".3g"),
    "links s": _number(lambda row: max(_links(row).values(), default=None), ".3g"),
    "no overlap s": _number(lambda row: row.unoverlapped_seconds, ".4g"),
    "tokens/s/device <=": _number(lambda row: row.tokens_per_second_per_device, ",.0f"),
    "utilisation <=": _number(lambda row: row.utilisation, ".1%"),
}


def _links(row: PlanRow) -> dict[str, float]:
    return {name: each for name, each in (row.seconds or {}).items() if name not in ("compute", "HBM")}


def _shares(row: PlanRow) -> list[str]:
    """Return lines about the first row: what is held at the peak, FLOPs, and collectives by operation and axis."""
    held = {name: size for name, size in (row.memory or {}).items() if size > 0.005 * (row.bytes_per_device or 0)}
    parts = (f"{name} {_gib(size)}" for name, size in sorted(held.items(), key=lambda item: -item[1]))
    lines = ["", f"{_name(row)}, in the {row.moment}; GiB of more than 0.5%:", *(f"  {part}" for part in parts)]
    if row.flops_per_device is not None and row.model_flops is not None:
        flops = (row.model_flops, row.flops_per_device, row.recomputed_flops or 0.0)
        model, executed, again = (f"{each / 1e12:,.4g}" for each in flops)
        lines.append(f"TFLOP per device: model {model}, executed {executed}, of which recomputed {again}")
    by: dict[tuple[str, str], int] = {}
    for each in row.collectives or ():
        place = each.op, " ".join(each.mesh_axes)
        by[place] = by.get(place, 0) + each.bytes
    named = (f"{op} over {axes} {size / 1e9:,.4g}" for (op, axes), size in sorted(by.items(), key=lambda x: -x[1]))
    lines += ["GB received per device: " + ", ".join(named)] if by else []
    links = ", ".join(f"{name} {value:.3g}" for name, value in _links(row).items())
    return lines + ([f"seconds that links are busy, by where they are cut: {links}"] if links else [])


def _gib(size: float) -> str:
    return f"{size / _GIB:.4g}"


def recommend(rows: Sequence[PlanRow], call: CallName) -> str:
    """Return the best row with the numbers that decide, the next layout, and the command that runs the best."""
    fitting = [row for row in rows if row.fits and row.step_seconds is not None]
    if not fitting:
        return ""
    best, *others = fitting
    layout = lambda row: (tuple(row.mesh.items()), row.rules, row.dispatch)  # noqa: E731
    held = best.compiled_bytes or best.bytes_per_device or 0
    lines = ["", f"recommended: {_name(best)}: {_bound(best)}; {_gib(held)} of {_gib(best.hbm_bytes)} GiB"]
    if other := next((row for row in others if layout(row) != layout(best)), None):
        lines.append(f"next: {_name(other)}: {_bound(other)}")
    if equal := sum(row.step_seconds == best.step_seconds for row in others):
        less = "the recommended one has less time without overlap, in two digits, or less memory"
        lines.append(f"{equal + 1} of these rows have the same bound; {less}")
    last = {
        word.partition("=")[0]: word for word in best.words if not (word.startswith("mesh.") and word.endswith("=1"))
    }
    if call == "train":
        lines.append("  moezoo train " + shlex.join(last.values()))
    return "\n".join(lines)


def _bound(row: PlanRow) -> str:
    return f"at least {row.step_seconds:.4g} s, bound by {row.bound_by}"


def stopped(rows: Sequence[PlanRow]) -> str:
    """Return the rows that were done when the command was stopped."""
    return render("stopped; what was done:", rows) + "\n" if rows else ""


def draw(rows: Sequence[PlanRow], path: Path, name: str) -> None:
    """Draw for each row its memory at the peak, by part, beside what a device has; and its times."""
    from moezoo.training.pictures import Bars, draw_bars

    known = [row for row in rows if row.memory]
    labels = [_name(row) + ", does not fit" * (not row.fits) for row in known]
    large = {part for row in known for part, size in (row.memory or {}).items() if size > 0.005 * row.hbm_bytes}
    memory = [{part: size / _GIB for part, size in (row.memory or {}).items() if part in large} for row in known]
    have = known[0].hbm_bytes / _GIB if known else None
    times = Bars("least seconds, one after the other", [_in_turn(row) for row in known])
    panels = Bars("GiB per device at the peak", memory, have), times
    draw_bars(path, name, labels, panels)


def _in_turn(row: PlanRow) -> dict[str, float]:
    """Return the parts of the time without overlap."""
    if row.seconds is None or row.unoverlapped_seconds is None:
        return {}
    alone = {name: row.seconds[name] for name in ("compute", "HBM")}
    return {**alone, "collectives": row.unoverlapped_seconds - sum(alone.values())}
