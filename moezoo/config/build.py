"""Build the mesh and the execution that a configuration describes."""

import dataclasses
import itertools
import math
from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from moezoo.config.memory import check_batch, check_sizes
from moezoo.config.settings import TrainConfig, check_config
from moezoo.convert import convert, show
from moezoo.errors import UserError
from moezoo.models import model_shapes
from moezoo.models.base import check_tokens
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels
from moezoo.parallel.mesh import AXES, abstract_mesh, make_mesh


def build_execution(
    cfg: TrainConfig, mesh: Mesh | AbstractMesh | None = None, *, batches: Literal["configured", "any"] = "configured"
) -> Execution:
    """Return how `cfg` runs a model: mesh, rules, dispatch, dtypes and memory in one value.

    Args:
        cfg: A configuration, from `moezoo.compose` or `moezoo.saved_config`.
        mesh: Replaces the mesh of `cfg`; it may have no devices, which is enough to trace a step.
        batches: "configured" checks that the mesh splits batches of the configured sizes evenly; "any" does not, for
            generation and comparisons.

    Raises:
        UserError: mesh, rules and sizes do not fit together, or not into the memory of the mesh's devices.
    """
    check_config(cfg)
    convert(Literal["configured", "any"], batches, "batches")
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
    check_sizes(cfg.model, execution)
    execution.specs(model_shapes(cfg.model))
    if batches == "configured":
        _check_batches(cfg, execution)
        check_batch(cfg, execution)
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
    try:
        check_tokens(cfg.batch_size, cfg.seq_len, execution, batch_key="batch_size", micro_steps=micro_steps)
    except UserError as error:
        raise UserError(f"{error}{_smaller_split(cfg, execution)}") from None
    if (tokens := cfg.batch_size * cfg.seq_len) >= 2**31:
        raise UserError(
            f"batch_size={cfg.batch_size} x seq_len={cfg.seq_len} makes {tokens} tokens per step, and they are counted "
            f"in int32; choose at most {2**31 - 1} together"
        )
    tokens //= micro_steps * execution.ways(execution.token_axes)
    if cfg.dispatch.chunks > tokens:
        raise UserError(
            f"dispatch.chunks={cfg.dispatch.chunks} exceeds the {tokens} tokens per device and micro-step; choose at "
            f"most {tokens}, and few: each chunk is compiled separately"
        )


def _smaller_split(cfg: TrainConfig, execution: Execution) -> str:
    """Where the mesh does not split `batch_size` evenly, name meshes that do: on all its devices, or on fewer."""
    size, micro_steps = cfg.batch_size, cfg.execution.microbatches
    ways = execution.ways(execution.batch_axes)
    if ways == 1 or size % (micro_steps * ways) == 0:
        return ""
    advice = []
    if fewer := [n for n in range(1, micro_steps) if size % (n * ways) == 0]:
        advice.append(f"execution.microbatches={fewer[-1]}")
    devices = math.prod(execution.sizes.values())
    for count in (n for n in range(devices, 1, -1) if devices % n == 0):
        # On fewer devices only a mesh without a split sequence is simpler than one on all of them.
        if sizes := _find_mesh(cfg, execution, count, whole_sequences=count < devices):
            keys = " ".join(f"mesh.{axis}={n}" for axis, n in sizes.items() if n != execution.sizes[axis])
            parts = math.prod(sizes[axis] for axis in cfg.rules.sequence)
            where = f"; sequences {parts} ways" * (parts > 1) + f", on {count} devices" * (count < devices)
            ways = math.prod(sizes[axis] for axis in cfg.rules.batch)
            advice.append(f"{keys} ({ways} way{'s' * (ways > 1)}{where})")
            if parts == 1:
                break
    else:
        advice += ["mesh=single"] * (size % micro_steps == 0)
    fewer_ways = f", or split it fewer ways with {' or '.join(advice)}" if advice else ""
    return f"{fewer_ways}; rules.batch={show(cfg.rules.batch)} names the mesh axes that split it"


def _find_mesh(cfg: TrainConfig, execution: Execution, devices: int, *, whole_sequences: bool) -> dict[str, int]:
    """Return the mesh of so many devices that splits the batch most, and changes the fewest axes; {} if none can."""
    axes: list[str] = list(AXES)
    batch, sequence = cfg.rules.batch, cfg.rules.sequence
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    choices = {axis: [size] for axis, size in execution.sizes.items()} | dict.fromkeys(batch, divisors)
    choices |= dict.fromkeys(sequence, [1] if whole_sequences else divisors)
    meshes = (dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*(choices[axis] for axis in axes)))
    fitting = [
        sizes
        for sizes in meshes
        if math.prod(sizes.values()) == devices
        and cfg.batch_size % (cfg.execution.microbatches * math.prod(sizes[axis] for axis in batch)) == 0
    ]

    def order(sizes: dict[str, int]) -> tuple[int, int]:
        changed = sum(n != execution.sizes[axis] for axis, n in sizes.items())
        return -math.prod(sizes[axis] for axis in batch), changed

    return next((sizes for sizes in sorted(fitting, key=order) if _fits(cfg, sizes)), {})


def _fits(cfg: TrainConfig, sizes: dict[str, int]) -> bool:
    """Whether the model of `cfg` runs on a mesh of these sizes."""
    shape = dataclasses.replace(cfg.mesh, **sizes)
    try:
        build_execution(dataclasses.replace(cfg, mesh=shape), abstract_mesh(shape))
    except UserError:
        return False
    return True
