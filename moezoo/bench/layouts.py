"""Benchmark of layouts: the first updates of a training run, under several rule sets, strategies and meshes.

Measures: whole training steps on the same batches, alternately.
Against: the first layout, and the first one on the same mesh; all start from the same parameters.
Columns: see `LayoutRow`. In the table, `tokens/s` are per device, `speed` is `speed_on_mesh`, `MB` with the names of
mesh axes is `received_bytes` (axes with less than 5 kB are left out), and `peak MB` is `peak_bytes`. Where an optimiser
orthogonalises, `GFLOP` is `step_flops`, and columns `ortho` are `orthogonal_flops` and `orthogonal_bytes`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.analysis.cost import communication
from moezoo.bench.train_step import model_flops
from moezoo.bench.turns import Results, Running, Turns, overrides
from moezoo.config.overrides import defaults
from moezoo.parallel.mesh import AXES


class LayoutRow(Results):
    """One layout of one model.

    Attributes:
        model: the model as it was named.
        rules: the words that choose the rule set.
        strategy: the words that choose the strategy.
        optimizer: the words that choose the optimiser, of the model, the layout or the settings.
        sequences: how the layout splits sequences: `gather` or `ring`, and the order of tokens; or `whole`.
        mesh: the mesh axes of more than one device, and their sizes.
        tokens_per_second_per_device: tokens of a batch per median update, divided by the number of devices.
        speed: the first layout's seconds divided by those of this one, the median over updates.
        speed_on_mesh: the same for the first layout on this mesh.
        received_bytes: bytes per device and update that collectives bring, by `moezoo.analysis.cost`, for each set of
            mesh axes that collectives run over together.
        step_flops: FLOPs of the model per device and update, by `moezoo.bench.train_step.model_flops`.
        orthogonal_flops, orthogonal_bytes: FLOPs per device and update of orthogonalising matrices, which `step_flops`
            leaves out; and the bytes that it receives, which `received_bytes` includes.
    """

    model: str
    rules: str
    strategy: str
    optimizer: str
    sequences: str
    mesh: str
    settings: str
    tokens_per_second_per_device: float
    speed: float
    speed_on_mesh: float
    received_bytes: dict[str, int]
    step_flops: float
    orthogonal_flops: int
    orthogonal_bytes: int


def compare_layouts(
    layouts: Sequence[str], models: dict[str, str], settings: str, updates: int, log: Callable[[str], None]
) -> list[LayoutRow]:
    """Train each model under each layout on the same batches, one update of each layout alternately.

    Args:
        layouts: overrides that choose rules, a strategy and a mesh: "rules=ep_as_dp dispatch=ring mesh=ep8".
        models: for each model, by the name that rows show, the name of its preset with optional overrides after it.
        settings: overrides that hold for all.
        updates: the number of updates of each.
        log: receives progress lines.

    Raises:
        UserError: The words do not compose or fit together. Nothing has been compiled then.
    """
    chosen = dict.fromkeys(("rules", "dispatch", "mesh"), "--layouts") | {"model": "--models"}
    entries = [(layout, layout.split()) for layout in layouts]
    all_turns = {
        model: Turns(
            [(name, [*overrides("model", words), *layout]) for name, layout in entries], settings.split(), chosen
        )
        for model, words in models.items()
    }
    rows: list[LayoutRow] = []
    for model, turns in all_turns.items():
        log(f"model {model}")
        running = turns.train(updates, log)
        first_on_mesh = {one.cfg.mesh: one for one in reversed(running)}
        for layout, one in zip(layouts, running, strict=True):
            words = " ".join((*overrides("model", models[model]), layout, settings))
            rows.append(_row(model, layout, words, settings, one, running[0], first_on_mesh[one.cfg.mesh]))
    return rows


def _row(
    model: str, layout: str, words: str, settings: str, done: Running, first: Running, on_mesh: Running
) -> LayoutRow:
    received: dict[str, int] = {}
    for (axes,), traffic in communication(done.cfg).by("axes").items():
        name = " ".join(sorted(axes, key=AXES.index))
        received[name] = received.get(name, 0) + traffic.bytes
    return {
        "model": model,
        "rules": _words(layout, "rules"),
        "strategy": _words(layout, "dispatch"),
        "optimizer": _words(words, "optimizer"),
        "sequences": f"{done.cfg.execution.context_parallel} {done.execution.sequence_order}"
        if done.execution.sequence_axes
        else "whole",
        "mesh": " ".join(f"{axis}={size}" for axis, size in done.cfg.mesh.sizes.items() if size > 1) or "one device",
        "settings": settings,
        **done.results(),
        "tokens_per_second_per_device": round(done.tokens_per_second / done.cfg.mesh.devices, 1),
        "speed": _speed(done, first),
        "speed_on_mesh": _speed(done, on_mesh),
        "received_bytes": received,
        "step_flops": model_flops(done.cfg) / done.cfg.mesh.devices,
        "orthogonal_flops": done.update_work.flops,
        "orthogonal_bytes": done.update_work.received_bytes,
    }


def _words(words: str, group: str) -> str:
    """Return those of the words that choose and set a group; the name of its default if there are none."""
    options = [word for word in words.split() if word.startswith(f"{group}.")]
    chosen = [word.removeprefix(f"{group}=") for word in words.split() if word.startswith(f"{group}=")]
    return " ".join([*(chosen or [defaults()[group]]), *options])


def _speed(done: Running, reference: Running) -> float:
    return round(float(np.median(reference.timed / done.timed)), 3)


def print_table(rows: Sequence[LayoutRow], console: Console) -> None:
    """Print one table per model and mesh."""
    for model, mesh in dict.fromkeys((row["model"], row["mesh"]) for row in rows):
        here = [row for row in rows if (row["model"], row["mesh"]) == (model, mesh)]
        first = next(row for row in rows if row["model"] == model)
        optional = [key for key in ("optimizer", "sequences") if len({row[key] for row in rows}) > 1]
        first_name = " ".join(str(first[key]) for key in ("rules", "strategy", *optional))
        # The statistics of routing have axes of their own and few bytes.
        axes = [name for name in _axes(here) if max(row["received_bytes"].get(name, 0) for row in here) >= 5e3]
        drops = ["dropped"] * any(row["dropped"] for row in here)
        orthogonal = any(row["orthogonal_flops"] for row in here)
        table = Table(
            *("rules", "strategy", *optional, "loss", "perplexity", *drops, "tokens/s", "speed"),
            *("MB\n" + name.replace(" ", "\n") for name in axes),
            *("GFLOP", "ortho\nGFLOP", "ortho\nMB") * orthogonal,
            "peak\nMB",
            title=f"{model} on {mesh} {here[0]['settings']}".strip() + f", {here[0]['updates']} updates",
            caption=None
            if here[0] is first
            else f"{here[0]['speed']:.2f} is the first layout's speed on {mesh}, "
            f"divided by that of {first_name} on {first['mesh']}",
            box=box.SIMPLE,
            collapse_padding=True,
        )
        words, figures = table.columns[: 2 + len(optional)], table.columns[2 + len(optional) :]
        for column in words:
            column.overflow = "fold"
        for column in figures:
            column.justify, column.no_wrap = "right", True
        for row in here:
            peak = row["peak_bytes"]
            table.add_row(
                row["rules"],
                row["strategy"],
                *(row[key] for key in optional),
                f"{row['loss']:.6f}",
                f"{row['perplexity']:.3f}",
                *(f"{row['dropped']:.1%}" for _ in drops),
                f"{row['tokens_per_second_per_device']:,.0f}",
                f"{row['speed_on_mesh']:.2f}",
                *(f"{row['received_bytes'].get(name, 0) / 1e6:.2f}" for name in axes),
                *_orthogonal(row) * orthogonal,
                "" if peak is None else f"{peak / 1e6:.1f}",
            )
        console.print(table)


def _orthogonal(row: LayoutRow) -> tuple[str, ...]:
    flops = (f"{number / 1e9:.2f}" for number in (row["step_flops"], row["orthogonal_flops"]))
    return (*flops, f"{row['orthogonal_bytes'] / 1e6:.2f}")


def _axes(rows: Sequence[LayoutRow]) -> list[str]:
    """Return the sets of mesh axes over which layouts exchange, single axes first."""
    found = {name for row in rows for name in row["received_bytes"]}
    return sorted(found, key=lambda name: (name.count(" "), [AXES.index(axis) for axis in name.split()]))


def picture(rows: Sequence[LayoutRow], path: Path) -> None:
    """Plot speed and bytes by mesh axes, one bar per layout: one line of panels per model."""
    from matplotlib.figure import Figure

    models, axes = list(dict.fromkeys(row["model"] for row in rows)), _axes(rows)
    most = max(sum(row["model"] == model for row in rows) for model in models)
    figure = Figure(figsize=(9.5, 1.2 + len(models) * (0.5 + 0.24 * most)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False, sharey="row")
    for (speed, traffic), model in zip(panels, models, strict=True):
        here = [row for row in rows if row["model"] == model]
        at = [
            -i - 0.5 * list(dict.fromkeys(row["mesh"] for row in here)).index(here[i]["mesh"]) for i in range(len(here))
        ]
        speed.barh(at, [row["tokens_per_second_per_device"] for row in here], color="0.45")
        _stack(traffic, at, here, axes)
        names = [f"{row['mesh']}  {row['rules']}, {row['strategy']}" for row in here]
        for key in ("optimizer", "sequences"):
            if len({row[key] for row in here}) > 1:
                names = [f"{name}, {row[key]}" for name, row in zip(names, here, strict=True)]
        speed.set_yticks(at, names, fontsize=7)
        speed.set_xlabel(f"{model}: tokens/s per device", fontsize=8)
        traffic.set_xlabel("MB received per device and update", fontsize=8)
        for panel in (speed, traffic):
            panel.grid(axis="x", alpha=0.3)
            panel.tick_params(axis="x", labelsize=7)
    figure.legend(*panels[0, 1].get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center")
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']} {rows[0]['settings']}".strip(), fontsize=9)
    figure.savefig(path, dpi=110)


def _stack(panel: Any, at: Sequence[float], rows: Sequence[LayoutRow], axes: Sequence[str]) -> None:
    """Draw the MB of each set of mesh axes next to each other."""
    left = np.zeros(len(rows))
    for i, name in enumerate(axes):
        part = np.array([row["received_bytes"].get(name, 0) / 1e6 for row in rows])
        panel.barh(at, part, left=left, color=f"C{i}", label=name.replace(" ", " and "))
        left += part
