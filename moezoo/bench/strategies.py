"""Benchmark of the dispatch strategies: the first updates of a training run, with each strategy on each mesh.

Measures: whole training steps on the same batches, alternately.
Against: each other; all start from the same parameters.
Columns: see `StrategyRow`. The table also has `used`, the quotient of `rows` and `room`; `MB in`, `received_bytes`; and
`peak MB`, `peak_bytes`.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.analysis.cost import communication, expert_rows
from moezoo.bench.candidates import peak_bytes
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, load, train_batches
from moezoo.errors import UserError
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import start
from moezoo.training.build import build_state, build_step
from moezoo.training.feed import Feed

# The first updates are not timed, because only they allocate memory.
_WARM_UP = 2


class StrategyRow(TypedDict):
    """One strategy on one mesh.

    Attributes:
        loss: cross-entropy of the last batch before its update, nats per token.
        perplexity: the exponential of `loss`.
        tokens_per_second: tokens of a batch per median update.
        ms: milliseconds per update, the median of all but the first two.
        ms_spread: the interquartile range; None for three or fewer timed updates.
        rows: rows that hold an assignment, per device, layer with experts and micro-step, averaged over all updates.
        room: rows that there is room for, per device, layer with experts and micro-step.
        dropped: the share of assignments that found no room.
        received_bytes: bytes per device and update that collectives bring, by `moezoo.analysis.cost`.
        peak_bytes: bytes per device that the compiled step needs.
    """

    strategy: str
    mesh: str
    settings: str
    updates: int
    loss: float
    perplexity: float
    tokens_per_second: float
    ms: float
    ms_spread: float | None
    rows: float
    room: int
    dropped: float
    received_bytes: int
    peak_bytes: int | None
    device: str
    dtype: str


class _Running:
    """A compiled step, its state, and the results of its updates."""

    def __init__(self, cfg: TrainConfig):
        self.execution = build_execution(cfg)
        # The execution has resolved a mesh axis of -1.
        self.cfg = cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **self.execution.sizes))
        self._step = build_step(cfg, self.execution)
        self._feed = Feed(self._step.batch_shardings.tokens, self._step.arguments[1].tokens.shape)
        self._compiled = self._step.compile()
        self._state = build_state(cfg, self.execution, self._step)
        self.peak = peak_bytes(self._compiled)
        self.loss, self.load, self.dropped, self.layers = math.nan, 0, 0, 1
        self.seconds: list[float] = []

    def update(self, micro_steps: Sequence[Batch]) -> None:
        """Run and time one update."""
        stacked = jax.tree.map(lambda *parts: np.stack(parts), *micro_steps)
        batch = jax.block_until_ready(self._feed(stacked))
        start = time.perf_counter()
        self._state, metrics = self._compiled(self._state, batch)
        metrics = jax.device_get(metrics)
        self.seconds.append(time.perf_counter() - start)
        self.loss = float(metrics.loss)
        self.load, self.dropped = self.load + int(metrics.load.sum()), self.dropped + int(metrics.dropped.sum())
        self.layers = len(metrics.load)


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
    for word in settings.split():
        if (group := word.split("=")[0]) in ("mesh", "dispatch"):
            raise UserError(f"--settings {word}: holds for all strategies and meshes; name it in --{group}")
    configs = [
        compose(*_overrides("mesh", mesh), *_overrides("dispatch", dispatch), *settings.split())
        for mesh, dispatch in names
    ]
    start(max(cfg.mesh.devices for cfg in configs))
    for cfg, (_, dispatch) in zip(configs, names, strict=True):
        build_execution(cfg)
        for key in ("batch_size", "seq_len", "seed", "data", "model", "execution"):
            if getattr(cfg, key) != getattr(configs[0], key):
                raise UserError(f"{dispatch}: {key} must be the same for all strategies; set it with --settings")
    cfg = configs[0]
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    running = []
    for (mesh, dispatch), cfg in zip(names, configs, strict=True):
        log(f"compiling {dispatch} on {mesh}")
        running.append(_Running(cfg))
    micro_steps = cfg.execution.microbatches
    batches = train_batches(source, seq_len=cfg.seq_len, batch_size=cfg.batch_size // micro_steps, seed=cfg.seed)
    for number in range(updates):
        log(f"update {number + 1}/{updates}")
        parts = [next(batches) for _ in range(micro_steps)]
        for one in running:
            one.update(parts)
    return [_row(mesh, dispatch, settings, updates, one) for (mesh, dispatch), one in zip(names, running, strict=True)]


def _overrides(group: str, words: str) -> list[str]:
    """Return overrides from an entry's name (or an override in its place) and further overrides."""
    first, *rest = words.split() or [""]
    return [first if "=" in first else f"{group}={first}", *rest]


def _row(mesh: str, dispatch: str, settings: str, updates: int, done: _Running) -> StrategyRow:
    cfg = done.cfg
    seconds = done.seconds[_WARM_UP:] or done.seconds
    low, middle, high = np.percentile(seconds, (25, 50, 75)) * 1e3
    shared = _sharing(done.execution)
    return {
        "strategy": dispatch,
        "mesh": mesh,
        "settings": settings,
        "updates": updates,
        "loss": round(done.loss, 6),
        "perplexity": round(math.exp(done.loss), 4),
        "tokens_per_second": round(cfg.batch_size * cfg.seq_len / middle * 1e3, 1),
        "ms": round(float(middle), 3),
        "ms_spread": round(float(high - low), 3) if len(seconds) > 3 else None,
        "rows": (done.load - done.dropped) / (updates * done.layers * cfg.execution.microbatches * shared),
        "room": expert_rows(cfg),
        "dropped": done.dropped / max(done.load, 1),
        "received_bytes": communication(cfg).bytes,
        "peak_bytes": done.peak,
        "device": jax.devices()[0].device_kind,
        "dtype": cfg.execution.dtype,
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
