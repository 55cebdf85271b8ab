"""Benchmark of whole training steps on random tokens.

Measures: the compiled step of a training run, optimiser included.
Against: one forward product of T*K rows [T*K, d] x [d, f] on one device, T*K being the assignments of a layer.
Columns: see `moezoo.bench.results`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.bench.candidates import peak_bytes
from moezoo.bench.parts import MATMUL, normal
from moezoo.bench.results import Measurement, make_measurement
from moezoo.bench.timing import Call, measure
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.data import Batch
from moezoo.models import model_shapes
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.mesh import start
from moezoo.training.build import build_state, build_step
from moezoo.training.step import State


def train_steps(
    settings: Sequence[str], dtype: str | None, seconds: float, samples: int, log: Callable[[str], None]
) -> Iterator[Measurement]:
    """Time the steps of all `settings` alternately; each is a string of overrides.

    FLOPs of a step are those of `model_flops`.
    """
    configs = {words: compose(*words.split(), *([f"execution.dtype={dtype}"] if dtype else [])) for words in settings}
    start(max(cfg.mesh.devices for cfg in configs.values()))
    for sizes, kind in dict.fromkeys((_sizes(cfg), cfg.execution.dtype) for cfg in configs.values()):
        same = {w: cfg for w, cfg in configs.items() if (_sizes(cfg), cfg.execution.dtype) == (sizes, kind)}
        learned = all(cfg.execution.routing == "learned" for cfg in same.values())
        calls: dict[str, Call] = {}
        peaks: dict[str, int | None] = {}
        for words, cfg in same.items():
            log(f"compiling {words}")
            calls[words], compiled = prepare_step(cfg)
            peaks[words] = peak_bytes(compiled)
        t, d, f, _, k = sizes
        x, w = normal(0, kind, (t * k, d), (d, f))
        product = jax.jit(jnp.matmul).lower(x, w).compile()
        calls[MATMUL] = partial(_wait, product, x, w)
        timings = measure(calls, seconds=seconds, samples=samples)
        flops = {words: model_flops(cfg) for words, cfg in same.items()} | {MATMUL: 2.0 * t * k * d * f}
        for who, timing in timings.items():
            yield make_measurement(
                part="train_step",
                shape=dict(zip(("T", "d", "f", "E", "K"), sizes, strict=True)),
                implementation=who if who == MATMUL else f"moezoo {who}",
                pass_="both" if who != MATMUL else "forward",
                routing="untrained router" if learned else "as named",
                dtype=kind,
                timing=timing,
                flops=flops[who],
                matmul=flops[MATMUL] / timings[MATMUL].ms,
                batched=None,
                peak=peak_bytes(product) if who == MATMUL else peaks[who],
            )


def _wait(program: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))


def _sizes(cfg: TrainConfig) -> tuple[int, int, int, int, int]:
    m = cfg.model
    return cfg.batch_size * cfg.seq_len, m.embed, m.expert_mlp, m.experts, m.experts_per_token


def model_flops(cfg: TrainConfig) -> float:
    """Return the FLOPs of the model in a step, over all devices: those of rematerialisation do not count.

    They are 6 per token and active parameter in a product, plus those of attention over the keys that a query sees.
    """
    m, tokens = cfg.model, cfg.batch_size * cfg.seq_len
    shapes = model_shapes(m)
    _, active = count_parameters(shapes, m.experts_per_token)
    seen = 0.0  # keys per query, itself included: the mean over queries, summed over layers
    for stack in shapes.stacks:
        for block in stack.blocks:
            window = block.attention.state(cfg.seq_len).places
            seen += stack.count * (window - window * (window - 1) / 2 / cfg.seq_len)
    attention = 2 * m.heads * m.dims_of_a_pair * seen
    return 3.0 * tokens * (2 * (active - m.looked_up) + attention)


def prepare_step(cfg: TrainConfig) -> tuple[Call, jax.stages.Compiled]:
    """Return a call that runs one more training step on random tokens, and the compiled step."""
    execution = build_execution(cfg)
    step = build_step(cfg, execution)
    compiled = step.compile()
    rng = np.random.default_rng(0)
    shape = step.arguments[1].tokens.shape
    tokens = rng.integers(0, cfg.model.vocab, (*shape[:2], cfg.seq_len + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(cfg.seq_len, dtype=np.int32), shape)
    whole = Batch(tokens[..., :-1], tokens[..., 1:], np.ones(shape, np.int32), positions)
    batch = step.feed()(whole)
    state: list[State] = [build_state(cfg, execution, step)]

    def call() -> Any:
        # The step donates the state that it gets. Metrics can be read when one device is done; until all are, another
        # program's collectives must not start.
        state[0], metrics = jax.block_until_ready(compiled(state[0], batch))
        return metrics

    return call, compiled
