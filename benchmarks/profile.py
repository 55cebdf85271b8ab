"""`profile`: where the time of a training step goes, by named scope (`moezoo.profiling.profile`).

Measures: the compiled step of a training run, optimiser included, on random tokens.
Against: the whole step; the parts add up to it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.results import Column, Panel, Report, Row, Table, log
from benchmarks.steps import Running, random_batch
from benchmarks.timing import measure
from moezoo.config.compose import compose
from moezoo.host.machine import NO_CUDA_GRAPHS, add_xla_flags
from moezoo.parallel.mesh import start
from moezoo.profiling.profile import ORDER, Operation, profile

_TIMES = ("forward_ms", "recomputed_ms", "backward_ms", "moving_ms")


def run(keys: Any, overrides: Sequence[str]) -> Report:
    """Trace steps of a configuration, about as many as take `keys.seconds`, and report the time of each part."""
    cfg = compose(*overrides)
    add_xla_flags(NO_CUDA_GRAPHS)
    devices = start(cfg.mesh.devices)
    log(f"compiling {' '.join(overrides)}")
    # Otherwise a program from a compilation cache may have the named scopes of older code.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    running = Running(cfg)
    call = partial(running.run, random_batch(running))
    untraced = measure({"step": call}, seconds=keys.seconds / 2, samples=keys.samples)["step"].ms
    count = int(np.clip(keys.seconds * 1e3 / untraced, 1, keys.samples))
    log(f"tracing {count} step{'s' * (count != 1)}")
    whole, parts = profile(call, count, str(running.compiled.program.as_text()))
    labels = {"part": "profile", "settings": " ".join(overrides)}
    ends = {
        "step_ms": round(whole, 4),
        "untraced_ms": round(untraced, 4),
        "steps": count,
        "device": devices[0].device_kind,
        "devices": cfg.mesh.devices,
        "dtype": cfg.execution.dtype,
    }
    rows = [{**labels, **row, "largest": _largest(parts[row["name"]]), **ends} for row in times(whole, parts)]
    return report(rows)


def times(whole: float, parts: dict[str, dict[Operation, float]]) -> list[Row]:
    """Return the milliseconds of each part of a traced step, its share, and what it takes by phase and for moving."""
    return [
        {
            "name": name,
            "ms": _sum(parts[name]),
            "share": round(sum(parts[name].values()) / whole, 5),
            **{f"{phase}_ms": _sum(parts[name], phase=phase) for phase in ("forward", "recomputed", "backward")},
            "moving_ms": _sum(parts[name], moves=True),
        }
        for name in ORDER
        if name in parts
    ]


def _sum(part: dict[Operation, float], **fields: Any) -> float:
    chosen = (ms for op, ms in part.items() if all(getattr(op, name) == value for name, value in fields.items()))
    return round(sum(chosen, 0.0), 4)


def _largest(part: dict[Operation, float]) -> list[Row]:
    """Return the ten copies of `part` that take longest, none if it is another part."""
    copies = sorted(((ms, op) for op, ms in part.items() if op.copied), reverse=True)[:10]
    return [{"copied": op.copied, "phase": op.phase, "ms": round(ms, 4)} for ms, op in copies]


def report(rows: Sequence[Row]) -> Report:
    """Return a table of parts, with the whole step as its last line, and one of copies; the picture shows parts."""
    first = rows[0]
    lines = [row | {key: row[key] if row[key] >= 0.05 else None for key in _TIMES} for row in rows]
    lines.append({"name": "whole step", "ms": first["step_ms"]})
    lines[-1] |= {key: sum(row[key] for row in rows) for key in ("share", *_TIMES)}
    columns = [Column("part", "name"), Column("ms", "ms", ".1f"), Column("share", "share", ".1%")]
    titles = ("forward", "recomputed", "backward", "moving data")
    columns += [Column(title, key, ".1f") for key, title in zip(_TIMES, titles, strict=True)]
    devices = f"{first['devices']} {first['device']} device{'s' * (first['devices'] != 1)}"
    title = f"{first['settings']}: {first['steps']} steps of {first['step_ms']:.1f} ms "
    title += f"({first['untraced_ms']:.1f} ms without the trace), {devices}, {first['dtype']}"
    panel = Panel("ms per step", {row["name"]: {"": row["ms"]} for row in rows})
    copies = [copy for row in rows for copy in row["largest"]]
    largest = [Column("copied", "copied"), Column("phase", "phase"), Column("ms", "ms", ".1f")]
    tables = [Table(title, columns, lines), Table("the copies that take longest", largest, copies)]
    return Report(rows, tables, [[panel]], first["settings"])
