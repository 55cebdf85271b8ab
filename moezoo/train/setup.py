"""From a configuration to what runs: the mesh, the execution, the step, and a state laid out for it."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.axes import Role, parameter_table
from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.mesh import make_mesh
from moezoo.models import build, model_shapes
from moezoo.nn.language_model import LanguageModel, check_tokens
from moezoo.rules import live
from moezoo.settings import TrainConfig
from moezoo.train.optimizer import Optimizer
from moezoo.train.step import State, Step


def execution(cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None) -> Execution:
    """How `cfg` runs a model over its batches, on its own mesh or on one without devices.

    Raises `UserError` where mesh, rules and sizes do not fit together.
    """
    run = layout(cfg, mesh)
    if cfg.seq_len > cfg.model.max_length:
        raise UserError(
            f"seq_len={cfg.seq_len} exceeds model.max_length={cfg.model.max_length}; shorten it or raise the maximum"
        )
    check_tokens(cfg.batch_size, cfg.seq_len, run, batch_key="batch_size", micro_steps=cfg.execution.microbatches)
    tokens = cfg.batch_size * cfg.seq_len // (cfg.execution.microbatches * run.ways(run.token_axes))
    if cfg.dispatch.chunks > tokens:
        raise UserError(
            f"dispatch.chunks={cfg.dispatch.chunks} exceeds the {tokens} tokens that a device has in a micro-step; "
            f"choose at most {tokens}, and few: each is a program of its own"
        )
    return run


def layout(cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None) -> Execution:
    """How `cfg` runs a model over anything. Raises `UserError` where mesh, rules and the model do not fit together."""
    run = Execution(
        mesh=make_mesh(cfg.mesh) if mesh is None else mesh,
        rules=cfg.rules,
        dispatch=cfg.dispatch,
        dtype=cfg.execution.dtype,
        reduce_dtype=cfg.execution.reduce_dtype,
        remat=cfg.execution.remat,
        grouped_matmul=cfg.execution.grouped_matmul,
        routing=cfg.execution.routing,
    )
    _check_experts(cfg.model.experts, run)
    run.specs(model_shapes(cfg.model))
    return run


def _check_experts(experts: int, run: Execution) -> None:
    axes = live(run.rules.compute.get("expert", ()), run.sizes)
    ways = run.ways(axes)
    if experts % ways:
        mesh = " x ".join(f"mesh.{axis}={run.sizes[axis]}" for axis in axes)
        fitting = max(n for n in range(1, ways) if experts % n == 0)
        raise UserError(
            f"{mesh} splits experts {ways} ways but model.experts={experts}; choose a mesh that splits them into a "
            f"divisor of {experts}, such as mesh.{axes[0]}={fitting}"
        )


def initial_model(cfg: TrainConfig, run: Execution) -> LanguageModel:
    """A fresh model, born in its layout: no device ever holds more than its share. The seed alone decides values."""
    make = jax.jit(
        lambda key: build(cfg.model, key=key, dtype=cfg.execution.param_dtype),
        out_shardings=run.shardings(model_shapes(cfg.model, cfg.execution.param_dtype)),
    )
    return make(jax.random.key(cfg.seed))


def make_step(cfg: TrainConfig, run: Execution) -> Step:
    """The step of a run; nothing is compiled yet."""
    shapes = model_shapes(cfg.model, cfg.execution.param_dtype)
    optimizer = Optimizer(cfg.optimizer, cfg.schedule, cfg.steps, shapes)
    micro_steps = cfg.execution.microbatches
    tokens = jax.ShapeDtypeStruct((micro_steps, cfg.batch_size // micro_steps, cfg.seq_len), jnp.int32)
    return Step(shapes, optimizer, run, Batch(*(tokens,) * 4), cfg.guard)


def initial_state(cfg: TrainConfig, run: Execution, step: Step) -> State:
    """The state before the first step, laid out as the step needs it."""
    model = initial_model(cfg, run)
    rest = jax.jit(lambda m: step.begin(m)[1:], out_shardings=tuple(step.state_shardings[1:]))
    return State(model, *rest(model))


def count_parameters(model: PyTree, experts_per_token: int) -> tuple[int, int]:
    """All parameters of `model`, and those that one token meets; buffers count in neither."""
    total = active = 0
    for _, axes, shape in parameter_table(model):
        if axes.role is Role.BUFFER:
            continue
        size = 1
        for dim in shape:
            size *= dim
        total += size
        experts = shape[axes.names.index("expert")] if "expert" in axes.names else 0
        active += size * experts_per_token // experts if experts else size
    return total, active
