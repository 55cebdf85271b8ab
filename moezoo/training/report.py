"""What a run prints: the summary before step 1, progress, and what it left."""

import sys
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from moezoo.config.settings import TrainConfig
from moezoo.data import Source
from moezoo.kernels.attention import chosen_backend as chosen_attention
from moezoo.kernels.grouped_matmul import chosen_backend as chosen_product
from moezoo.parallel import distributed
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.dispatch import Dispatch, ExpertGroup
from moezoo.parallel.execution import Execution
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.evaluate import Evaluation
from moezoo.training.metrics import MetricsRow
from moezoo.training.sample import Sample
from moezoo.training.step import Step

_MOST_NAMES, _MOST_PARTS = 60, 4


def _bytes(number: int) -> str:
    count = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _count(number: int) -> str:
    return f"{number:,}"


def local_bytes(tree: PyTree, placements: PyTree) -> int:
    """Bytes that one device stores of `tree`, which may be shapes."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(placements), strict=True)
    return sum(placement.local_size(x.shape) * np.dtype(x.dtype).itemsize for x, placement in leaves)


def layout_lines(placements: PyTree) -> list[str]:
    """Each kind of parameter dimension that is stored split: over which axes, and what becomes of it in its layer."""
    lines = {}
    for placement in jax.tree.leaves(placements):
        for logical, over, moved in zip(placement.axes.names, placement.stored, placement.gathered, strict=True):
            if over:
                kept = over[: len(over) - len(moved)]
                fate = [f"gathered over {', '.join(moved)}"] if moved else []
                fate += [f"stays split over {', '.join(kept)}"] if kept else []
                lines[logical] = f"{logical}: stored over {', '.join(over)}; {', '.join(fate)} in its layer"
    return list(lines.values()) or ["everything whole on every device"]


def dispatch_line(dispatch: Dispatch, group: ExpertGroup) -> str:
    """What the strategy moves on this mesh."""
    name = type(dispatch).__name__.lower()
    if not group.axes:
        return f"{name}: all {group.num_experts} experts on every device, nothing moves"
    where = (
        f"over {', '.join(group.axes)} ({group.size} ways, {group.num_local} expert{'s' * (group.num_local > 1)} each)"
    )
    if dispatch.chunks > 1:
        where += f" in {dispatch.chunks} chunks"
    if (bound := dispatch.bound) and (factor := getattr(dispatch, bound)) is not None:
        where += f" with {bound}={factor}"
    if dispatch.moves == "weights":
        return f"{name}: expert weights move {where}, tokens stay"
    return f"{name}: tokens move {where}, expert weights stay"


def kernels_line(execution: Execution, length: int) -> str:
    """The backends that a step on sequences of `length` tokens runs."""
    target, names = execution.target, execution.kernels
    assert target is not None
    queries = length // execution.sequence_group.size
    return (
        f"grouped matmul {chosen_product(target, names.grouped_matmul)}, "
        f"attention {chosen_attention(target, queries, length, names.attention)}"
    )


def traffic_lines(traffic: TrafficTable) -> list[str]:
    """What a step's collectives bring a device, and the parts of the step for which they bring most."""
    if not traffic:
        return []
    parts = list(traffic.outline(2).by("scope").items())[:_MOST_PARTS]
    return [
        f"{_bytes(traffic.bytes)} to a device a step, by {traffic.count:,} collectives",
        "most for " + ", ".join(f"{scope} {_bytes(part.bytes)}" for (scope,), part in parts),
    ]


def summarize(
    cfg: TrainConfig, execution: Execution, step: Step, source: Source, baseline: float | None
) -> list[tuple[str, str]]:
    """Title and text of every line printed before step 1."""
    assert isinstance(execution.mesh, Mesh)
    state, placements = step.arguments[0], step.placements
    model, learned = state.model, execution.routing == "learned"
    total, active = count_parameters(model, cfg.model.experts_per_token)
    used = {a: s for a, s in execution.sizes.items() if s > 1}
    devices = execution.mesh.devices
    stored = local_bytes(state, placements)
    gradients = local_bytes(*(eqx.filter(tree, step.trained) for tree in (model, placements.model)))
    rows = [
        (
            "model",
            f"{type(model).__name__.lower()}: {_count(total)} parameters, {_count(active)} active a token "
            f"({cfg.model.layers} layers, {cfg.model.experts_per_token} of {cfg.model.experts} experts)",
        ),
        (
            "mesh",
            (" x ".join(f"{a} {s}" for a, s in used.items()) or "single")
            + f" on {devices.size} {devices.flat[0].platform} device{'s' * (devices.size > 1)}"
            + f" of {distributed.count()} processes" * distributed.several(),
        ),
        (
            "rules",
            f"{execution.rules.name}: batch over {', '.join(execution.batch_axes) or 'nothing'}, "
            f"sequence over {', '.join(execution.sequence_axes) or 'nothing'}",
        ),
        ("dispatch", dispatch_line(cfg.dispatch, execution.expert_group(cfg.model.experts))),
        *(
            [("routing", f"{execution.routing}: the router chooses no expert; measure speed, do not train")]
            * (not learned)
        ),
        ("kernels", kernels_line(execution, cfg.seq_len)),
        *(("layout", line) for line in layout_lines(placements.model)),
        ("memory", f"{_bytes(stored)} a device for parameters and moments, {_bytes(gradients)} for gradients"),
        *(("traffic", line) for line in traffic_lines(collective_traffic(step.traced.jaxpr))),
        (
            "precision",
            f"compute {cfg.execution.dtype}, parameters {cfg.execution.param_dtype}, "
            f"gradient sums {cfg.execution.reduce_dtype}; remat {execution.remat}",
        ),
    ]
    for title, text in source.summary.items():
        rows.append((title, text))
        if title == "held out":
            rows += [(title, line) for line in _held_out_lines(source.held_out)]
    if baseline is not None:
        rows.append(("baseline", f"a trigram model's validation loss is {baseline:.3f} nats a {source.unit}"))
    tokens = cfg.batch_size * cfg.seq_len
    every = f"every {_count(cfg.checkpoint_every)} steps and " if cfg.checkpoint_every else ""
    rows.append(("checkpoint", f"{every}at the end{'' if every else ' alone (checkpoint_every=0)'}"))
    rows.append(("step", f"{cfg.batch_size} sequences x {cfg.seq_len} = {_count(tokens)} tokens, {cfg.steps} steps"))
    return rows


def _held_out_lines(names: tuple[str, ...]) -> list[str]:
    """The names of the held-out documents, in as few lines as hold them; of very many, the first."""
    shown = " ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )
    return textwrap.wrap(shown, 100, break_on_hyphens=False, break_long_words=False)


def print_lines(rows: list[tuple[str, str]]) -> None:
    """Print titled lines, a title once for its lines; one process does."""
    if not distributed.is_first():
        return
    width = max(len(title) for title, _ in rows)
    before = ""
    for title, text in rows:
        print(f"{'' if title == before else title:<{width}}  {text}")
        before = title
    sys.stdout.flush()


def print_results(evaluation: Evaluation, baseline: float | None, sample: Sample, folder: Path, unit: str) -> None:
    """Validation loss, a sample, and where things are."""
    beside = f" (trigram {baseline:.3f})" if baseline is not None else ""
    rows = [("validation", f"{evaluation.loss:.4f} nats a {unit} over {_count(evaluation.tokens)} {unit}s{beside}")]
    rows.append(("sample", "the model's continuation of a held-out text, between ⟦ and ⟧"))
    rows += [("", line) for line in f"{sample.prompt}⟦{sample.continuation}⟧".splitlines()]
    for name, what in (
        ("metrics.jsonl", "a row a logged step"),
        ("loss.png", "loss by step"),
        ("expert_load.png", "how evenly experts are used"),
        ("checkpoints", "parameters, moments, loader position"),
        ("config.yaml", "the resolved configuration"),
    ):
        if (folder / name).exists():
            rows.append(("left", f"{folder / name}  {what}"))
    print_lines(rows)


class Progress:
    """A bar with loss, tokens a second and time left on a terminal; elsewhere a plain line a logged step.

    Of several processes one tells.
    """

    def __init__(self, first: int, steps: int, *, bound: str | None):
        """`bound`: the strategy's option that may drop assignments, if it has one."""
        self._steps, self._bound, self._warned = steps, bound, False
        self._bar: Any = None
        self._quiet = not distributed.is_first()
        if sys.stdout.isatty() and not self._quiet:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TextColumn("left"),
                progress.TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _warn(self, row: MetricsRow, assignments: int) -> None:
        self._warned = True
        layers = " ".join(map(str, row["dropped_by_layer"]))
        line = (
            f"warning: step {row['step']} dropped {row['dropped']:,} of {assignments:,} assignments, "
            f"layer by layer {layers}; dispatch.{self._bound} sets how many find room, null for all"
        )
        self._print(line)

    def report_skipped(self, step: int, loss: float, norm: float) -> None:
        """A step was not taken."""
        self._print(
            f"warning: step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g}; nothing was changed by it"
        )

    def step(self, step: int) -> None:
        """A step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, row: MetricsRow, seconds_left: float, *, assignments: int) -> None:
        """A row was logged, of so many assignments. The first time that some were dropped it is told in a warning."""
        text = f"loss {row['loss']:.4f}"
        if row["dropped"]:
            text += f"  dropped {row['dropped'] / assignments:.1%}"
            if not self._warned:
                self._warn(row, assignments)
        if "val_loss" in row:
            text += f"  validation {row['val_loss']:.4f}"
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], description=text)
        else:
            self._print(f"step {row['step']}/{self._steps}  {text}  {_duration(seconds_left)} left")

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line)
        elif not self._quiet:
            print(line, flush=True)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
    )
