"""Training runs that differ in how they are laid out: one update of each on the same batch, then the next batch.

So other load on the machine affects all of them. Each update ends before the next one starts.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import jax
import numpy as np

from moezoo.bench.candidates import peak_bytes
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, load, train_batches
from moezoo.errors import UserError
from moezoo.parallel.mesh import start
from moezoo.training.build import build_state, build_step

# The first updates are not timed, because only they allocate memory.
_WARM_UP = 2


class Results(TypedDict):
    """What every training run gives.

    Attributes:
        updates: the number of updates.
        loss: cross-entropy of the last batch before its update, nats per token.
        perplexity: the exponential of `loss`.
        ms: milliseconds per update, the median of all but the first two.
        ms_spread: the interquartile range; None for three or fewer timed updates.
        dropped: the share of assignments that found no room.
        peak_bytes: bytes per device that the compiled step needs.
    """

    updates: int
    loss: float
    perplexity: float
    ms: float
    ms_spread: float | None
    dropped: float
    peak_bytes: int | None
    device: str
    dtype: str


class Running:
    """A compiled step, its state, and the results of its updates."""

    def __init__(self, cfg: TrainConfig):
        self.execution = build_execution(cfg)
        # The execution has resolved a mesh axis of -1.
        self.cfg = cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **self.execution.sizes))
        self._step = build_step(cfg, self.execution)
        self._feed = self._step.feed()
        self._compiled = self._step.compile()
        self._state = jax.block_until_ready(build_state(cfg, self.execution, self._step))
        self._peak = peak_bytes(self._compiled)
        self.update_work = self._step.update_work
        self._loss, self.load, self.dropped, self.layers = math.nan, 0, 0, 1
        self._seconds: list[float] = []

    def update(self, micro_steps: Sequence[Batch]) -> None:
        """Run and time one update."""
        stacked = jax.tree.map(lambda *parts: np.stack(parts), *micro_steps)
        batch = jax.block_until_ready(self._feed(stacked))
        start = time.perf_counter()
        # Metrics can be read when one device is done. Until all are, another program's collectives must not start.
        self._state, metrics = jax.block_until_ready(self._compiled(self._state, batch))
        metrics = jax.device_get(metrics)
        self._seconds.append(time.perf_counter() - start)
        self._loss = float(metrics.loss)
        self.load, self.dropped = self.load + int(metrics.load.sum()), self.dropped + int(metrics.dropped.sum())
        self.layers = len(metrics.load)

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return len(self._seconds)

    @property
    def timed(self) -> np.ndarray:
        """Seconds of each timed update; of all updates if there are no more than the first two."""
        return np.asarray(self._seconds[_WARM_UP:] or self._seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a batch per median update."""
        return self.cfg.batch_size * self.cfg.seq_len / float(np.median(self.timed))

    def results(self) -> Results:
        """Return the results of the updates so far."""
        low, middle, high = np.percentile(self.timed, (25, 50, 75)) * 1e3
        return {
            "updates": self.updates,
            "loss": round(self._loss, 6),
            "perplexity": round(math.exp(self._loss), 4),
            "ms": round(float(middle), 3),
            "ms_spread": round(float(high - low), 3) if len(self.timed) > 3 else None,
            "dropped": self.dropped / max(self.load, 1),
            "peak_bytes": self._peak,
            "device": jax.devices()[0].device_kind,
            "dtype": self.cfg.execution.dtype,
        }


class Turns:
    """Configurations that train on the same batches by turns. Making it compiles nothing.

    Args:
        entries: for each configuration its name in messages, and its overrides.
        settings: overrides that hold for all.
        groups: the groups that the entries choose, so that `settings` may not; each with the option that names it.

    Raises:
        UserError: The words do not compose or fit together.
    """

    def __init__(self, entries: Sequence[tuple[str, Sequence[str]]], settings: Sequence[str], groups: dict[str, str]):
        for word in settings:
            if (key := word.split("=")[0]) in groups:
                raise UserError(f"--settings {word}: holds for all that is compared; name it in {groups[key]}")
            if twice := [name for name, own in entries if key in (other.split("=")[0] for other in own)]:
                raise UserError(f"--settings {word}: {key} is also set for {twice[0]}; set it in one place")
        self._names = [name for name, _ in entries]
        self._configs = [compose(*overrides, *settings) for _, overrides in entries]
        start(max(cfg.mesh.devices for cfg in self._configs))
        first = self._configs[0]
        for name, cfg in zip(self._names, self._configs, strict=True):
            build_execution(cfg)
            for key in ("batch_size", "seq_len", "seed", "data", "model"):
                if getattr(cfg, key) != getattr(first, key):
                    raise UserError(f"{name}: {key} must be the same for all; set it with --settings")
            # How sequences are split is part of a layout.
            own = {key: getattr(cfg.execution, key) for key in ("context_parallel", "sequence_order")}
            if cfg.execution != dataclasses.replace(first.execution, **own):
                raise UserError(
                    f"{name}: execution must be the same for all, except context_parallel and sequence_order; set it "
                    "with --settings"
                )
        self._source = load(first.data, seq_len=first.seq_len, seed=first.seed, vocab=first.model.vocab)

    def train(self, updates: int, log: Callable[[str], None]) -> list[Running]:
        """Compile all configurations, then make `updates` updates of each; `log` receives progress lines."""
        running = []
        for name, cfg in zip(self._names, self._configs, strict=True):
            log(f"compiling {name}")
            running.append(Running(cfg))
        cfg, micro_steps = self._configs[0], self._configs[0].execution.microbatches
        rows = cfg.batch_size // micro_steps
        batches = train_batches(self._source, seq_len=cfg.seq_len, batch_size=rows, seed=cfg.seed)
        for number in range(updates):
            log(f"update {number + 1}/{updates}")
            parts = [next(batches) for _ in range(micro_steps)]
            for one in running:
                one.update(parts)
        return running


def overrides(group: str, words: str) -> list[str]:
    """Return overrides from an entry's name (or an override in its place) and further overrides."""
    first, *rest = words.split() or [""]
    return [first if "=" in first else f"{group}={first}", *rest]
