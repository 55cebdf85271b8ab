"""`layouts`: the first updates of a training run, under several rule sets, strategies and meshes.

Measures: whole training steps on the same batches, alternately.
Against: the first layout, and the first one on the same mesh; all start from the same parameters.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.results import Column, Panel, Report, Row, Table, log, split
from benchmarks.steps import Running, Turns, overrides
from moezoo.config.overrides import defaults
from moezoo.config.own import name_in
from moezoo.parallel.mesh import AXES
from moezoo.tools.plan.work import model_flops


def run(keys: Any, settings: Sequence[str]) -> Report:
    """Train each model under each layout on the same batches, one update of each layout by turns.

    Raises `UserError` where words do not compose or fit together. Nothing has been compiled then.
    """
    chosen = {group: "layout" for group in ("rules", "dispatch", "mesh")}
    turns = {
        model: Turns([(words, [*overrides("model", first), *words.split()]) for words in keys.layout], settings, chosen)
        for model, first in keys.models.items()
    }
    rows = []
    for model, one in turns.items():
        log(f"model {model}")
        running = one.train(keys.updates)
        first_on_mesh = {each.cfg.mesh: each for each in reversed(running)}
        for layout, done in zip(keys.layout, running, strict=True):
            words = [*overrides("model", keys.models[model]), *layout.split(), *settings]
            labels = {
                "model": model,
                "rules": _words(layout.split(), "rules"),
                "strategy": _words(layout.split(), "dispatch"),
                "optimizer": _words(words, "optimizer"),
            }
            rows.append(labels | _row(" ".join(settings), done, running[0], first_on_mesh[done.cfg.mesh]))
    return report(rows)


def _row(settings: str, done: Running, first: Running, on_mesh: Running) -> Row:
    cfg, received, table = done.cfg, {}, done.traffic
    for (axes,), traffic in table.by("axes").items():
        name = " ".join(sorted(axes, key=AXES.index))
        received[name] = received.get(name, 0) + traffic.bytes
    stages, pipeline = done.execution.stages, cfg.execution.pipeline
    order = f"{name_in(cfg.execution.context_parallel)} {done.execution.sequence_order}"
    return {
        "sequences": order if done.execution.sequence_axes else "whole",
        "pipeline": f"{pipeline.count(stages)} x {pipeline.chunks} {pipeline.gather}" if stages > 1 else "none",
        "mesh": " ".join(f"{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size > 1) or "one device",
        "settings": settings,
        **done.results(),
        "tokens_per_second_per_device": round(done.tokens_per_second / cfg.mesh.devices, 1),
        "speed": _speed(done, first),
        "speed_on_mesh": _speed(done, on_mesh),
        "received_by_axes": received,
        "step_flops": model_flops(cfg) / cfg.mesh.devices,
        "orthogonal_flops": sum(each.flops for each in done.step.update_work),
        "orthogonal_bytes": table.within("optimizer/orthogonalise").bytes,
    }


def _words(words: Sequence[str], group: str) -> str:
    """Return those of the words that choose and set a group; the name of its default if there are none."""
    options = [word for word in words if word.startswith(f"{group}.")]
    chosen = [word.removeprefix(f"{group}=") for word in words if word.startswith(f"{group}=")]
    return " ".join([*(chosen or [defaults()[group]]), *options])


def _speed(done: Running, reference: Running) -> float:
    return round(float(np.median(reference.timed / done.timed)), 3)


def report(rows: Sequence[Row]) -> Report:
    """Return one table per model and mesh; the picture has speed and bytes by mesh axes, a line of panels per model."""
    optional = [key for key in ("optimizer", "sequences", "pipeline") if len({row[key] for row in rows}) > 1]

    def words(row: Row) -> list[str]:
        return [row[key] for key in ("rules", "strategy", *optional)]

    def category(row: Row) -> str:
        return f"{row['mesh']}  {', '.join(words(row))}"

    tables, panels = [], []
    for model, mine in split(rows, "model").items():
        for mesh, here in split(mine, "mesh").items():
            title = f"{model} on {mesh} {here[0]['settings']}".strip() + f", {here[0]['updates']} updates"
            caption = f"{here[0]['speed']:.2f} is the first layout's speed on {mesh}, divided by that of "
            caption += f"{' '.join(words(mine[0]))} on {mine[0]['mesh']}"
            tables.append(Table(title, _columns(here, optional), here, None if here[0] is mine[0] else caption))
        speed = {category(row): {"": row["tokens_per_second_per_device"]} for row in mine}
        received = {
            category(row): {a.replace(" ", " and "): row["received_by_axes"].get(a, 0) / 1e6 for a in _axes(rows)}
            for row in mine
        }
        traffic = Panel("MB received per device and update", received, stacked=True)
        panels.append([Panel(f"{model}: tokens/s per device", speed), traffic])
    return Report(rows, tables, panels, f"{rows[0]['device']}, {rows[0]['dtype']} {rows[0]['settings']}".strip())


def _columns(rows: Sequence[Row], optional: Sequence[str]) -> list[Column]:
    columns = [Column(key, key) for key in ("rules", "strategy", *optional)]
    columns += [Column("loss", "loss", ".6f"), Column("perplexity", "perplexity", ".3f")]
    if any(row["dropped"] for row in rows):
        columns.append(Column("dropped", "dropped", ".1%"))
    columns.append(Column("tokens/s", "tokens_per_second_per_device", ",.0f"))
    columns.append(Column("speed", "speed_on_mesh", ".2f"))
    for axes in _axes(rows):
        # The statistics of routing have axes of their own and few bytes.
        if max(row["received_by_axes"].get(axes, 0) for row in rows) >= 5e3:
            title = "MB\n" + axes.replace(" ", "\n")
            columns.append(Column(title, lambda row, axes=axes: row["received_by_axes"].get(axes, 0), ".2f", 1e6))
    if any(row["orthogonal_flops"] for row in rows):
        columns.append(Column("GFLOP", "step_flops", ".2f", 1e9))
        columns.append(Column("ortho\nGFLOP", "orthogonal_flops", ".2f", 1e9))
        columns.append(Column("ortho\nMB", "orthogonal_bytes", ".2f", 1e6))
    return [*columns, Column("peak\nMB", "peak_bytes", ".1f", 1e6)]


def _axes(rows: Sequence[Row]) -> list[str]:
    """Return the sets of mesh axes over which layouts exchange, single axes first."""
    found = {name for row in rows for name in row["received_by_axes"]}
    return sorted(found, key=lambda name: (name.count(" "), [AXES.index(axis) for axis in name.split()]))
