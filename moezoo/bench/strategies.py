"""Benchmark of the dispatch strategies: the first updates of a training run, with each strategy on each mesh.

Measures: whole training steps on the same batches, alternately.
Against: each other; all start from the same parameters.
Columns: see `StrategyRow`. The table also has `used`, the quotient of `rows` and `room`; `MB in`, `received_bytes`; and
`peak MB`, `peak_bytes`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.analysis.cost import communication, expert_rows
from moezoo.bench.turns import Results, Running, Turns, overrides
from moezoo.parallel.execution import Execution


class StrategyRow(Results):
    """One strategy on one mesh.

    Attributes:
        tokens_per_second: tokens of a batch per median update.
        rows: rows that hold an assignment, per device, layer with experts and micro-step, averaged over all updates.
        room: rows that there is room for, per device, layer with experts and micro-step.
        received_bytes: bytes per device and update that collectives bring, by `moezoo.analysis.cost`.
    """

    strategy: str
    mesh: str
    settings: str
    tokens_per_second: float
    rows: float
    room: int
    received_bytes: int


def compare_strategies(
    dispatches: Sequence[str], meshes: Sequence[str], settings: str, updates: int, log: Callable[[str], None]
) -> list[StrategyRow]:
    """Train each strategy on each mesh on the same batches, one update of each alternately.

    Args:
        dispatches: names of strategies, each with optional overrides after it: "ragged dispatch.chunks=2".
        meshes: names of meshes, each with optional overrides after it.
        settings: overrides that hold for all.
        updates: the number of updates of each.
        log: receives progress lines.

    Raises:
        UserError: The words do not compose or fit together. Nothing has been compiled then.
    """
    names = [(mesh, dispatch) for mesh in meshes for dispatch in dispatches]
    entries = [
        (f"{dispatch} on {mesh}", [*overrides("mesh", mesh), *overrides("dispatch", dispatch)])
        for mesh, dispatch in names
    ]
    turns = Turns(entries, settings.split(), {"mesh": "--mesh", "dispatch": "--dispatch"})
    return [
        _row(mesh, dispatch, settings, one)
        for (mesh, dispatch), one in zip(names, turns.train(updates, log), strict=True)
    ]


def _row(mesh: str, dispatch: str, settings: str, done: Running) -> StrategyRow:
    cfg = done.cfg
    parts = done.updates * done.layers * cfg.execution.microbatches * _sharing(done.execution)
    return {
        "strategy": dispatch,
        "mesh": mesh,
        "settings": settings,
        **done.results(),
        "tokens_per_second": round(done.tokens_per_second, 1),
        "rows": (done.load - done.dropped) / parts,
        "room": expert_rows(cfg),
        "received_bytes": communication(cfg).bytes,
    }


def _sharing(execution: Execution) -> int:
    """Return the number of devices that share the assignments of a batch."""
    return execution.ways(tuple({*execution.token_axes, *execution.rules.compute.get("expert", ())}))


def print_table(rows: Sequence[StrategyRow], console: Console) -> None:
    """Print one table per mesh."""
    titles = ("strategy", "loss", "perplexity", "tokens/s", "ms", "rows", "room", "used", "dropped", "MB in", "peak MB")
    for mesh in dict.fromkeys(row["mesh"] for row in rows):
        here = [row for row in rows if row["mesh"] == mesh]
        what = f"mesh={mesh} {here[0]['settings']}".strip()
        table = Table(*titles, title=f"{what}, {here[0]['updates']} updates", box=box.SIMPLE)
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for row in here:
            peak = row["peak_bytes"]
            table.add_row(
                row["strategy"],
                f"{row['loss']:.6f}",
                f"{row['perplexity']:.3f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ms']:.1f}" + ("" if row["ms_spread"] is None else f" ± {row['ms_spread']:.1f}"),
                f"{row['rows']:,.0f}",
                f"{row['room']:,}",
                f"{row['rows'] / row['room']:.0%}",
                f"{row['dropped']:.2%}",
                f"{row['received_bytes'] / 1e6:.1f}",
                "" if peak is None else f"{peak / 1e6:.1f}",
            )
        console.print(table)


def picture(rows: Sequence[StrategyRow], path: Path) -> None:
    """Plot speed and the used share of the room for rows: one group of bars per mesh."""
    from matplotlib.figure import Figure

    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    figure = Figure(figsize=(max(6.0, 1.5 + 1.3 * len(meshes)), 5.6), layout="constrained")
    speed, use = figure.subplots(2, 1, sharex=True)
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        mine = {row["mesh"]: row for row in rows if row["strategy"] == name}
        at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(meshes))]
        speed.bar(at, [mine[mesh]["tokens_per_second"] for mesh in meshes], width, label=name, color=f"C{i}")
        shares = [mine[mesh]["rows"] / mine[mesh]["room"] for mesh in meshes]
        use.bar(at, shares, width, color=f"C{i}")
    speed.set_ylabel("tokens/s")
    use.set_ylabel("rows in use / room for rows")
    use.set_ylim(0, 1.05)
    use.set_xticks(range(len(meshes)), meshes)
    for axes in (speed, use):
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*speed.get_legend_handles_labels(), fontsize=8, ncols=min(3, len(names)), loc="outside lower center")
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']} {rows[0]['settings']}".strip(), fontsize=10)
    figure.savefig(path, dpi=120)
