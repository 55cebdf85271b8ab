"""The main arrays that a pass through the layers makes on each device, by the functions that the program uses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moezoo.config.settings import TrainConfig
from moezoo.models.base import LanguageModel
from moezoo.models.layers import block_path
from moezoo.moe.mixture import for_group
from moezoo.nn.base import Mixer
from moezoo.nn.cache import Cache
from moezoo.parallel.axes import parameter_table
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traffic import TrafficTable
from moezoo.tools.calls import Call

Spec = tuple[MeshAxes, ...]


class ActivationRow(NamedTuple):
    """How one array is split over devices.

    Attributes:
        name: What it is.
        axes: Its logical axes, in order.
        spec: For each dimension, the mesh axes that it is split over, major to minor.
        shape: The shape of the whole array. Key-value heads that several devices have count once per device.
        local_shape: The shape of a device's part.
        bytes_per_device: The bytes of that part.
    """

    name: str
    axes: tuple[str, ...]
    spec: Spec
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes_per_device: int


def activations(cfg: TrainConfig, model: LanguageModel, call: Call, traffic: TrafficTable) -> tuple[ActivationRow, ...]:
    """Return the main arrays of one pass, in the order in which it makes them. Layers that are alike share rows.

    With stages they are those of one micro-batch in its stage, and what the pipeline keeps of all micro-batches.

    `traffic`: the collectives of the traced call.
    """
    return tuple(dict.fromkeys(_rows(cfg, model, call, traffic)))


def _rows(cfg: TrainConfig, model: LanguageModel, call: Call, traffic: TrafficTable) -> Iterator[ActivationRow]:
    whole, dtype, (rows, length) = call.execution, call.execution.dtype, call.local_tokens
    execution = whole.within_stage
    # Of what recurrent layers exchange, the scopes are longer.
    kept = (row for row in traffic.within("layers/attention") if not row.scope.endswith(("convolution", "delta_rule")))
    gathers = {row.axes for row in kept if row.collective == "all_gather"}
    gathered = execution.sequence_axes and execution.sequence_axes in gathers
    split = (execution.batch_axes, execution.sequence_axes)

    def of_tokens(name: str, sizes: Mapping[str, int], dtype: DTypeLike = dtype) -> ActivationRow:
        return _row(name, ("batch", "seq", *sizes), split, (rows, length, *sizes.values()), dtype, execution)

    yield of_tokens("token ids", {}, jnp.int32)
    yield of_tokens("residual stream", {"embed": cfg.model.embed})
    blocks = [block for stack in model.stacks for block in stack.blocks]
    for block in blocks:
        for _, axes, shape in parameter_table(block.attention):
            if axes.outputs == ("heads", "head_dim"):
                yield of_tokens(
                    "queries", {"heads": shape[-2] // execution.inner_group("heads").size, "head_dim": shape[-1]}
                )
        if call.cache is not None:
            continue
        for name, whole_sizes in block.attention.shared_sizes().items():
            # Fewer key-value heads than devices are on several of them.
            sizes = {axis: max(1, size // _ways(axis, execution)) for axis, size in whole_sizes.items()}
            yield of_tokens(f"{name} kept by attention", sizes)
            if gathered:
                axes, local = ("batch", "seq", *sizes), (rows, call.length, *sizes.values())
                yield _row(f"{name} gathered over the sequence", axes, (split[0], ()), local, dtype, execution)
        yield from _of_chunks(block.attention, rows, execution)
    yield from () if call.cache is None else cache_rows(model, call.cache, execution)
    if mixtures := [block.moe for block in blocks if block.moe is not None]:
        yield of_tokens("router probabilities", {"router": cfg.model.experts}, jnp.float32)
        room, over = _room(cfg, call), (*execution.token_axes, *execution.expert_axes)
        for name, axis, size in (
            ("rows of the experts", "expert_embed", mixtures[0].experts.width),
            ("inner rows of the experts", "expert_mlp", cfg.model.expert_mlp // execution.inner_group("mlp").size),
        ):
            yield _row(name, ("rows", axis), (tuple(dict.fromkeys(over)),), (room, size), dtype, execution)
    yield from _pipeline_rows(cfg, call)
    logits = (call.logits, cfg.model.vocab // whole.inner_group("vocab").size)
    yield _row("logits held at once", ("tokens", "vocab"), (whole.token_axes,), logits, jnp.float32, whole)


def _of_chunks(mixer: Mixer, rows: int, execution: MeshExecution) -> Iterator[ActivationRow]:
    """Yield what chunks of split sequences make for each other, as every device has it."""
    ways, split = execution.ways(execution.sequence_axes), (execution.batch_axes, ())
    chunks = ways * (2 if execution.sequence_order == "balanced" else 1)
    for name, kept in mixer.chunk_sizes().items() if ways > 1 else ():
        sizes = [max(1, size // _ways(axis, execution)) for axis, size in kept.sizes.items()]
        local, dtype = (rows, chunks, *sizes), kept.dtype or execution.dtype
        name = f"{name} gathered over the sequence"
        yield _row(name, ("batch", "chunk", *kept.sizes), split, local, dtype, execution)


def _pipeline_rows(cfg: TrainConfig, call: Call) -> Iterator[ActivationRow]:
    """Yield what each stage keeps of the micro-batches; only training has a backward pass, which runs ticks again."""
    execution, order = call.execution, call.execution.pipeline
    if order is None or execution.stages == 1:
        return
    own, split = execution.micro_batches // execution.stages, (execution.batch_axes, execution.sequence_axes)
    kept = {"micro-batches that wait": ("micro-batches", own), "micro-batches that are done": ("micro-batches", own)}
    if "gradients" in call.memory:
        kept = {"inputs of ticks": ("ticks", order.ticks(execution.stages)), **kept}
    for name, (axis, count) in kept.items():
        axes, local = (axis, "batch", "seq", "embed"), (count, *call.local_tokens, cfg.model.embed)
        yield _row(name, axes, (execution.stage_axes, *split), local, execution.dtype, execution)


def cache_rows(model: LanguageModel, cache: Cache, execution: MeshExecution) -> Iterator[ActivationRow]:
    """Yield the arrays of a cache, whose shapes are those of whole arrays."""
    over = execution.batch_axes
    for number, kinds in enumerate(cache.states):
        for kind, state in enumerate(kinds):
            fields = jax.tree_util.tree_leaves_with_path(model.stacks[number].blocks[kind].attention.state(1))
            for (path, kept), array in zip(fields, jax.tree.leaves(state), strict=True):
                ways = (1, execution.ways(over), *(_ways(axis, execution) for axis in kept.sizes))
                local = tuple(size // parts for size, parts in zip(array.shape, ways, strict=True))
                name = jax.tree_util.keystr(path).removeprefix(".kept").removeprefix(".")
                name, axes = f"{name} in the cache of .{block_path(number, kind)}", ("layer", "batch", *kept.sizes)
                yield _row(name, axes, ((), over), local, array.dtype, execution)


def _row(
    name: str, axes: Sequence[str], spec: Spec, local: Sequence[int], dtype: DTypeLike, execution: MeshExecution
) -> ActivationRow:
    """Return the row of an array by the shape of a device's part; `spec` has the dimensions before the inner ones."""
    spec = (*spec, *(execution.rules.kept(logical, execution.sizes) for logical in axes[len(spec) :]))
    shape = tuple(size * execution.ways(over) for size, over in zip(local, spec, strict=True))
    return ActivationRow(name, tuple(axes), spec, shape, tuple(local), math.prod(local) * jnp.dtype(dtype).itemsize)


def _ways(axis: str, execution: MeshExecution) -> int:
    """Return the number of parts that a logical axis is split into while computing."""
    return execution.ways(execution.rules.kept(axis, execution.sizes))


def _room(cfg: TrainConfig, call: Call) -> int:
    """Return the rows that the experts of a device have room for, in the largest chunk."""
    execution, tokens = call.execution.within_stage, math.prod(call.local_tokens)
    group = execution.expert_group(cfg.model.experts)
    strategy = for_group(execution.strategy, group)
    return max(strategy.rows(chunk, cfg.model.experts_per_token, group) for chunk in strategy.chunk_sizes(tokens))
