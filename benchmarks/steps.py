"""Training steps: one on random tokens, and training runs that make updates by turns on the same batches."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.results import Row, log
from benchmarks.timing import by_turns, peak_bytes, quartiles
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, load, train_batches
from moezoo.errors import UserError
from moezoo.parallel.mesh import start
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.build import build_state, build_step

# The first updates are not timed, because only they allocate memory.
_WARM_UP = 2


class Running:
    """A compiled step, its state, and the results of its updates."""

    def __init__(self, cfg: TrainConfig):
        self.execution = on_mesh(build_execution(cfg))
        # The execution has resolved a mesh axis of -1.
        self.cfg = cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **self.execution.sizes))
        self.step = build_step(cfg, self.execution)
        self.feed = self.step.feed()
        self.compiled = self.step.compile()
        self.peak = peak_bytes(self.compiled.program)
        self.state = jax.block_until_ready(build_state(cfg, self.execution, self.step))
        self.loss, self.load, self.dropped, self.layers = math.nan, 0, 0, 1
        self.seconds: list[float] = []

    def run(self, batch: Batch) -> Any:
        """Run the step on a batch that `feed` has put onto the devices, and return its metrics when it is done."""
        # The step donates the state that it gets. Metrics can be read when one device is done; until all are, another
        # program's collectives must not start.
        self.state, metrics = jax.block_until_ready(self.compiled(self.state, batch))
        return metrics

    def update(self, batches: Iterator[Batch]) -> float:
        """Make an update with the next batch, and return its seconds."""
        # With stages a step has more micro-batches: the same rows, in the same order.
        shape = self.step.arguments[1].tokens.shape
        batch = jax.tree.map(lambda x: x.reshape(shape), next(batches))
        batch = jax.block_until_ready(self.feed(batch))
        began = time.perf_counter()
        metrics = jax.device_get(self.run(batch))
        seconds = time.perf_counter() - began
        self.loss, self.layers = float(metrics.loss), len(metrics.load)
        self.load, self.dropped = self.load + int(metrics.load.sum()), self.dropped + int(metrics.dropped.sum())
        return seconds

    @property
    def traffic(self) -> TrafficTable:
        """The collectives of the step, read from the program that was compiled."""
        return collective_traffic(self.step.traced.jaxpr)

    @property
    def timed(self) -> np.ndarray:
        """Seconds of each timed update; of all updates if there are no more than the first two."""
        return np.asarray(self.seconds[_WARM_UP:] or self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a batch per median update."""
        return self.cfg.batch_size * self.cfg.seq_len / float(np.median(self.timed))

    def results(self) -> Row:
        """Return what every training run gives; the spread is None for three or fewer timed updates."""
        timing = quartiles(self.timed)
        return {
            "updates": len(self.seconds),
            "loss": round(self.loss, 6),
            "perplexity": round(math.exp(self.loss), 4),
            "ms": round(timing.ms, 3),
            "ms_spread": round(timing.spread, 3) if len(self.timed) > 3 else None,
            "dropped": self.dropped / max(self.load, 1),
            "peak_bytes": self.peak,
            "device": jax.devices()[0].device_kind,
            "dtype": self.cfg.execution.dtype,
        }


class Turns:
    """Configurations that train on the same batches by turns. Making it compiles nothing.

    Args:
        entries: For each configuration its name in messages, and its overrides.
        settings: Overrides that hold for all.
        groups: The groups that the entries choose, so that `settings` may not; each with the key that names it.

    Raises:
        UserError: The words do not compose or fit together.
    """

    def __init__(self, entries: Sequence[tuple[str, Sequence[str]]], settings: Sequence[str], groups: dict[str, str]):
        for word in settings:
            if (key := word.split("=")[0]) in groups:
                raise UserError(f"{word}: holds for all that is compared; name it in {groups[key]}=")
            if twice := [name for name, own in entries if key in (other.split("=")[0] for other in own)]:
                raise UserError(f"{word}: {key} is also set for {twice[0]}; set it in one place")
        self._names = [name for name, _ in entries]
        self._configs = [compose(*overrides, *settings) for _, overrides in entries]
        start(max(cfg.mesh.devices for cfg in self._configs))
        for cfg in self._configs:
            build_execution(cfg)
        first = self._configs[0]
        self._source = load(first.data, seq_len=first.seq_len, seed=first.seed, vocab=first.model.vocab)

    def train(self, updates: int) -> list[Running]:
        """Compile all configurations, then make `updates` updates of each, one of each per batch."""
        running = []
        for name, cfg in zip(self._names, self._configs, strict=True):
            log(f"compiling {name}")
            running.append(Running(cfg))
        streams = itertools.tee(self._batches(updates), len(running))
        turns = {number: partial(one.update, streams[number]) for number, one in enumerate(running)}
        for number, seconds in by_turns(turns, updates).items():
            running[number].seconds = seconds
        return running

    def _batches(self, updates: int) -> Iterator[Batch]:
        cfg, micro_steps = self._configs[0], self._configs[0].execution.microbatches
        rows = cfg.batch_size // micro_steps
        batches = train_batches(self._source, seq_len=cfg.seq_len, batch_size=rows, seed=cfg.seed)
        for number in range(updates):
            log(f"update {number + 1}/{updates}")
            yield jax.tree.map(lambda *parts: np.stack(parts), *itertools.islice(batches, micro_steps))


def overrides(group: str, words: str) -> list[str]:
    """Return overrides from an entry's name (or an override in its place) and further overrides."""
    first, *rest = words.split() or [""]
    return [first if "=" in first else f"{group}={first}", *rest]


def random_batch(running: Running) -> Batch:
    """Return a batch of random tokens on the devices of a step."""
    cfg = running.cfg
    size = (cfg.batch_size, cfg.seq_len + 1)
    return batch_of(running, np.random.default_rng(0).integers(0, cfg.model.vocab, size))


def batch_of(running: Running, tokens: np.ndarray) -> Batch:
    """Return rows of tokens, each with one more than a sequence has, as a batch on the devices of a step."""
    shape = running.step.arguments[1].tokens.shape
    tokens = tokens.reshape(*shape[:2], -1).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape)
    return running.feed(Batch(tokens[..., :-1], tokens[..., 1:], np.ones(shape, np.int32), positions))
