"""From a configuration to how it runs: the mesh and the execution."""

from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.models import model_shapes
from moezoo.models.base import check_tokens
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import make_mesh


def build_execution(
    cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None, *, batches: Literal["configured", "any"] = "configured"
) -> Execution:
    """How `cfg` runs a model: mesh, rules, dispatch, dtypes and memory in one value.

    On the mesh of `cfg`, or on `mesh`, which may be one without devices. `batches` says what will be run: batches of
    the configured sizes, or of any (generation, comparisons), whose sizes are then not checked.

    Raises `UserError` where mesh, rules and sizes do not fit together.
    """
    execution = Execution(
        mesh=make_mesh(cfg.mesh) if mesh is None else mesh,
        rules=cfg.rules,
        dispatch=cfg.dispatch,
        dtype=cfg.execution.dtype,
        reduce_dtype=cfg.execution.reduce_dtype,
        remat=cfg.execution.remat,
        context_parallel=CONTEXT_PARALLEL[cfg.execution.context_parallel](),
        kernels=Kernels(cfg.execution.grouped_matmul or (), cfg.execution.attention or ()),
        routing=cfg.execution.routing,
    )
    _check_experts(cfg.model.experts, execution)
    execution.specs(model_shapes(cfg.model))
    if batches == "configured":
        _check_batches(cfg, execution)
    return execution


def _check_experts(num_experts: int, execution: Execution) -> None:
    axes = execution.expert_axes
    ways = execution.ways(axes)
    if num_experts % ways:
        mesh = " x ".join(f"mesh.{axis}={execution.sizes[axis]}" for axis in axes)
        fitting = max(n for n in range(1, ways) if num_experts % n == 0)
        raise UserError(
            f"{mesh} splits experts {ways} ways but model.experts={num_experts}; choose a mesh that splits them into a "
            f"divisor of {num_experts}, such as mesh.{axes[0]}={fitting}"
        )


def _check_batches(cfg: TrainConfig, execution: Execution) -> None:
    if cfg.seq_len > cfg.model.max_length:
        raise UserError(
            f"seq_len={cfg.seq_len} exceeds model.max_length={cfg.model.max_length}; shorten it or raise the maximum"
        )
    micro_steps = cfg.execution.microbatches
    check_tokens(cfg.batch_size, cfg.seq_len, execution, batch_key="batch_size", micro_steps=micro_steps)
    tokens = cfg.batch_size * cfg.seq_len // (micro_steps * execution.ways(execution.token_axes))
    if cfg.dispatch.chunks > tokens:
        raise UserError(
            f"dispatch.chunks={cfg.dispatch.chunks} exceeds the {tokens} tokens that a device has in a micro-step; "
            f"choose at most {tokens}, and few: each is a program of its own"
        )
