"""Two training steps of a tiny model on the devices of this process, and its logits against a naive computation.

A trial runs what a run runs: the mesh, the layout, the strategy, the kernels that are chosen here, and the optimiser.
"""

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.data import Batch
from moezoo.models.base import LanguageModel
from moezoo.moe.dispatch import Dense
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import mesh_of
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.training.build import build_state, build_step
from moezoo.training.step import State, Step

_VOCAB, _EXPERTS, _PER_TOKEN = 64, 8, 2


class Sizes(NamedTuple):
    """What a trial runs: sizes, the dtype that layers compute in, and the largest error that its rounding explains."""

    width: int
    head_dim: int
    length: int
    dtype: str
    limit: float


# In float32 sums are made in another order; most errors here are below 1e-6.
ON_CPUS = Sizes(32, 16, 32, "float32", 1e-4)
# Sizes and the dtype that a chip's own kernels take.
ON_ACCELERATORS = Sizes(256, 64, 256, "bfloat16", 0.05)


class Trial(NamedTuple):
    """What a trial has made, before its first step.

    Attributes:
        sizes: Its sizes.
        execution: How it runs.
        step: Its training step.
        state: The state before the first step.
        tokens: The token ids of its batch, and of each row one more to predict.
        parameters: The number of parameters.
    """

    sizes: Sizes
    execution: MeshExecution
    step: Step
    state: State
    tokens: Int[np.ndarray, "rows seq"]
    parameters: int

    @property
    def description(self) -> str:
        """The mesh, the strategy and the dtype."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.execution.sizes.items() if size > 1) or "one device"
        dispatch = type(self.step.execution.dispatch).__name__.lower()
        return f"{mesh}, {dispatch}, {self.sizes.dtype}"


class Steps(NamedTuple):
    """What two steps gave: the loss of each, and how many seconds the compiler and each step took."""

    losses: tuple[float, float]
    compile_seconds: float
    step_seconds: tuple[float, float]


class Agreement(NamedTuple):
    """How far logits are from those of a naive computation.

    Attributes:
        error: As `measure_error` defines it.
        platform: The platform of the device of the naive computation.
    """

    error: float
    platform: str


def prepare(devices: list[Any], sizes: Sizes | None = None) -> Trial:
    """Return a trial on `devices`: experts are split over all of them or, if their number is even, over halves.

    The sizes are by default those for the platform of the devices.
    """
    count = len(devices)
    sizes = sizes or (ON_CPUS if devices[0].platform == "cpu" else ON_ACCELERATORS)
    fsdp = 2 if count % 2 == 0 and count > 2 else 1
    expert = count // fsdp
    width, vocab = math.lcm(sizes.width, count), math.lcm(_VOCAB, count)  # which the mesh divides
    cfg = compose(
        "model=mixtral",
        "model.layers=1",
        f"model.vocab={vocab}",
        f"model.embed={width}",
        f"model.heads={sizes.width // sizes.head_dim}",
        "model.kv_heads=1",
        f"model.head_dim={sizes.head_dim}",
        f"model.expert_mlp={width}",
        f"model.experts={expert * -(-_EXPERTS // expert)}",
        f"model.experts_per_token={_PER_TOKEN}",
        f"seq_len={sizes.length}",
        f"batch_size={count}",
        f"mesh.fsdp={fsdp}",
        f"mesh.expert={expert}",
        f"execution.dtype={sizes.dtype}",
        "schedule=constant",
        "schedule.warmup_steps=0",
        "optimizer.learning_rate=0.01",
        "steps=2",
    )
    execution = on_mesh(build_execution(cfg, mesh_of(cfg.mesh, devices)))
    step = build_step(cfg, execution)
    state = jax.block_until_ready(build_state(cfg, execution, step))
    tokens = np.random.default_rng(0).integers(0, vocab, (count, sizes.length + 1), np.int32)
    return Trial(sizes, execution, step, state, tokens, count_parameters(state.model, _PER_TOKEN)[0])


def compare_naively(trial: Trial) -> Agreement:
    """Compare the logits of the fresh model with those on one device: every expert on every token, naive kernels.

    The naive computation is on a CPU if JAX may use one, in float32. Call this before `run_steps`.
    """
    tokens, model = trial.tokens[:, :-1], trial.state.model
    ours = np.asarray(jax.jit(lambda m, t: m(t, execution=trial.execution).logits)(model, tokens))
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names accelerators alone
        device = jax.local_devices()[0]
    whole: LanguageModel = jax.device_put(jax.device_get(model), device)
    naive = Execution(dispatch=Dense(), kernels=Kernels(("reference",), ("reference",)))
    theirs = np.asarray(jax.jit(lambda m, t: m(t, execution=naive).logits)(whole, jax.device_put(tokens, device)))
    return Agreement(measure_error(ours, theirs), device.platform)


def measure_error(ours: Float[np.ndarray, "rows seq vocab"], theirs: Float[np.ndarray, "rows seq vocab"]) -> float:
    """Return the largest error of all rows, so that one device of many counts.

    That of a row is the median of its tokens, because a token near a tie between experts may take another one. That of
    a token is the root mean square of the differences of its logits, divided by that of the naive logits.
    """
    errors = np.sqrt(np.square(ours - theirs).mean(-1) / np.square(theirs).mean(-1))
    return float(np.median(errors, axis=1).max())


def run_steps(trial: Trial) -> Steps:
    """Compile the step and train two steps on the same batch, which uses the state of the trial up."""
    began = time.monotonic()
    run = trial.step.compile()
    compiled = time.monotonic() - began
    tokens, labels = trial.tokens[None, :, :-1], trial.tokens[None, :, 1:]
    positions = np.broadcast_to(np.arange(trial.sizes.length, dtype=np.int32), tokens.shape)
    batch, state = trial.step.feed()(Batch(tokens, labels, np.ones_like(tokens), positions)), trial.state
    losses, seconds = [], []
    for _ in range(2):
        began = time.monotonic()
        state, metrics = jax.block_until_ready(run(state, batch))
        seconds.append(time.monotonic() - began)
        losses.append(float(metrics.loss))
    return Steps((losses[0], losses[1]), compiled, (seconds[0], seconds[1]))
