"""`strategies`: the first updates of a training run, with each dispatch strategy on each mesh.

Measures: whole training steps on the same batches, alternately.
Against: each other; all start from the same parameters.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Column, Panel, Report, Row, Table, points, ratio, split, spread
from benchmarks.steps import Running, Turns, overrides
from moezoo.config.settings import TrainConfig
from moezoo.moe.mixture import layer_rows
from moezoo.parallel.mesh_execution import MeshExecution


def run(keys: Any, settings: Sequence[str]) -> Report:
    """Train each strategy on each mesh on the same batches, one update of each by turns.

    Raises `UserError` where words do not compose or fit together. Nothing has been compiled then.
    """
    names = list(itertools.product(keys.mesh, keys.dispatch))
    entries = [
        (f"{dispatch} on {mesh}", [*overrides("mesh", mesh), *overrides("dispatch", dispatch)])
        for mesh, dispatch in names
    ]
    trained = zip(names, Turns(entries, settings, {}).train(keys.updates), strict=True)
    return report([_row(mesh, dispatch, " ".join(settings), one) for (mesh, dispatch), one in trained])


def _row(mesh: str, dispatch: str, settings: str, done: Running) -> Row:
    cfg, results = done.cfg, done.results()
    parts = results["updates"] * done.layers * cfg.execution.microbatches * _sharing(done.execution)
    return {
        "strategy": dispatch,
        "mesh": mesh,
        "settings": settings,
        **results,
        "tokens_per_second": round(done.tokens_per_second, 1),
        "rows": (done.load - done.dropped) / parts,
        "room": _room(cfg, done.step.execution),
        "received_bytes": done.traffic.bytes,
    }


def _room(cfg: TrainConfig, execution: MeshExecution) -> int:
    """Return the rows that a device has room for in a layer with experts, in a micro-step."""
    tokens = cfg.batch_size // cfg.execution.microbatches * cfg.seq_len // execution.ways(execution.token_axes)
    group = execution.expert_group(cfg.model.experts)
    return layer_rows(execution.strategy, tokens, cfg.model.experts_per_token, group)


def _sharing(execution: MeshExecution) -> int:
    """Return the number of devices that share the assignments of a batch."""
    return execution.ways(tuple({*execution.token_axes, *execution.rules.compute.get("expert", ())}))


def report(rows: Sequence[Row]) -> Report:
    """Return one table per mesh; the picture has the speed, and the share of the room that rows use."""
    columns = (
        Column("strategy", "strategy"),
        Column("loss", "loss", ".6f"),
        Column("perplexity", "perplexity", ".3f"),
        Column("tokens/s", "tokens_per_second", ",.0f"),
        Column("ms", spread(".1f"), ">"),
        Column("rows", "rows", ",.0f"),
        Column("room", "room", ",d"),
        Column("used", ratio("rows", "room"), ".0%"),
        Column("dropped", "dropped", ".2%"),
        Column("MB in", "received_bytes", ".1f", 1e6),
        Column("peak MB", "peak_bytes", ".1f", 1e6),
    )
    first = rows[0]
    tables = [
        Table(f"mesh={mesh} {first['settings']}".strip() + f", {first['updates']} updates", columns, some)
        for mesh, some in split(rows, "mesh").items()
    ]
    panels = [
        Panel(label, points(rows, "mesh", "strategy", value))
        for label, value in (("tokens/s", "tokens_per_second"), ("rows in use / room for rows", ratio("rows", "room")))
    ]
    return Report(rows, tables, [panels], f"{first['device']}, {first['dtype']} {first['settings']}".strip())
