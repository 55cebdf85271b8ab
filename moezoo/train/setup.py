"""From a configuration to what runs: the mesh, the execution, and a model laid out on it."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moezoo.axes import Role, parameter_table
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.mesh import make_mesh
from moezoo.models import FAMILIES, ModelConfig
from moezoo.nn.language_model import LanguageModel, check_tokens
from moezoo.rules import live
from moezoo.settings import TrainConfig


def execution(cfg: TrainConfig) -> Execution:
    """How `cfg` runs a model. Raises `UserError` where mesh, rules and sizes do not fit together."""
    run = Execution(
        mesh=make_mesh(cfg.mesh),
        rules=cfg.rules,
        dispatch=cfg.dispatch,
        dtype=cfg.execution.dtype,
        reduce_dtype=cfg.execution.reduce_dtype,
        remat=cfg.execution.remat,
        grouped_matmul=cfg.execution.grouped_matmul,
    )
    _check_experts(cfg.model.experts, run)
    run.specs(model_shapes(cfg.model))
    check_tokens(cfg.batch_size, cfg.seq_len, run, batch_key="batch_size", micro_steps=cfg.execution.microbatches)
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


def build(config: ModelConfig, *, key: jax.Array, dtype: str = "float32") -> LanguageModel:
    """A model of the family that `config` belongs to."""
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family.model(config, dtype=jnp.dtype(dtype), key=key)
    raise TypeError(f"{type(config).__name__} is no family's configuration")


def model_shapes(config: ModelConfig, dtype: str = "float32") -> PyTree:
    """The model with shapes for arrays: costs no memory and starts no device."""
    return jax.eval_shape(lambda: build(config, key=jax.random.key(0), dtype=dtype))


def initial_model(cfg: TrainConfig, run: Execution) -> LanguageModel:
    """A fresh model, born in its layout: no device ever holds more than its share. The seed alone decides values."""
    make = jax.jit(
        lambda key: build(cfg.model, key=key, dtype=cfg.execution.param_dtype),
        out_shardings=run.shardings(model_shapes(cfg.model, cfg.execution.param_dtype)),
    )
    return make(jax.random.key(cfg.seed))


def place(model: LanguageModel, run: Execution) -> LanguageModel:
    """A copy of `model` laid out as `run` needs it, from whatever layout it has."""
    if run.mesh is None:
        return jax.device_put(model, jax.devices()[0])
    return jax.device_put(model, run.shardings(model))


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
