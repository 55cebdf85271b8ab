"""`train_step`: whole training steps on random tokens.

Measures: the compiled step of a training run, optimiser included; its FLOPs are those of `model_flops`.
Against: one forward product of T*K rows [T*K, d] x [d, f] on one device, T*K being the assignments of a layer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import MATMUL, measurement, normal, report
from benchmarks.results import Report, Row, log, split
from benchmarks.steps import Running, random_batch
from benchmarks.timing import call_of, measure, peak_bytes
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.parallel.mesh import start
from moezoo.tools.plan.work import model_flops


def run(keys: Any) -> Report:
    """Time the steps of the same sizes by turns."""
    dtype = [f"execution.dtype={keys.dtype}"] if keys.dtype else []
    steps: list[Row] = [{"words": name, "cfg": compose(*words, *dtype)} for name, words in keys.steps.items()]
    start(max(step["cfg"].mesh.devices for step in steps))
    rows = []
    for (sizes, kind), same in split(steps, lambda step: (_sizes(step["cfg"]), step["cfg"].execution.dtype)).items():
        learned = all(step["cfg"].execution.routing == "learned" for step in same)
        t, d, f, _, k = sizes
        calls, peaks, flops = {}, {}, {}
        for step in same:
            log(f"compiling {step['words']}")
            who, running = f"moezoo {step['words']}", Running(step["cfg"])
            calls[who], peaks[who] = partial(running.run, random_batch(running)), running.peak
            flops[who] = model_flops(step["cfg"])
        x, w = normal(0, kind, (t * k, d), (d, f))
        product = jax.jit(jnp.matmul).lower(x, w).compile()
        calls[MATMUL], peaks[MATMUL] = call_of(product, x, w), peak_bytes(product)
        flops[MATMUL] = 2.0 * t * k * d * f
        timings = measure(calls, seconds=keys.seconds, samples=keys.samples)
        for who, timing in timings.items():
            labels = {
                "part": "train_step",
                "shape": dict(zip(("T", "d", "f", "E", "K"), sizes, strict=True)),
                "implementation": who,
                "pass": "forward" if who == MATMUL else "both",
                "routing": "untrained router" if learned else "as named",
                "dtype": kind,
            }
            speeds = [flops[MATMUL] / timings[MATMUL].ms, None]
            rows.append(measurement(labels, timing, flops[who], speeds, peaks[who]))
    return report(rows)


def _sizes(cfg: TrainConfig) -> tuple[int, int, int, int, int]:
    m = cfg.model
    return cfg.batch_size * cfg.seq_len, m.embed, m.expert_mlp, m.experts, m.experts_per_token
