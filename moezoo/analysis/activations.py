"""The main arrays that a pass through the layers makes on each device, by the functions that the program uses."""

import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.analysis.calls import Call
from moezoo.config.settings import TrainConfig
from moezoo.models.base import LanguageModel
from moezoo.models.block import Block
from moezoo.models.layers import block_path
from moezoo.moe.dispatch.layer import for_group
from moezoo.nn.context_parallel import context_parallel
from moezoo.nn.positions import Context, LayerNumbers
from moezoo.parallel.axes import parameter_table
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.context_parallel import Place
from moezoo.parallel.execution import Execution

Spec = tuple[MeshAxes, ...]


class ActivationRow(NamedTuple):
    """How one array is split over devices.

    Attributes:
        name: What it is.
        axes: Its logical axes, in order.
        spec: For each dimension, the mesh axes that it is split over, major to minor.
        shape: The shape of the whole array.
        local_shape: The shape of a device's part.
        bytes_per_device: The bytes of that part.
    """

    name: str
    axes: tuple[str, ...]
    spec: Spec
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes_per_device: int


class _Field(NamedTuple):
    """One array of what attention keeps; `axes` are the logical axes of its last dimensions."""

    name: str
    axes: Sequence[str]
    shape: tuple[int, ...]
    dtype: DTypeLike


def activations(cfg: TrainConfig, model: LanguageModel, call: Call) -> tuple[ActivationRow, ...]:
    """Return the main arrays of one pass, in the order in which it makes them. Layers that are alike share rows."""
    return tuple(dict.fromkeys(_rows(cfg, model, call)))


def _rows(cfg: TrainConfig, model: LanguageModel, call: Call) -> Iterator[ActivationRow]:
    execution, dtype, (rows, length) = call.execution, call.execution.dtype, call.local_tokens
    split = (execution.batch_axes, execution.sequence_axes)

    def of_tokens(name: str, axes: Sequence[str], sizes: Sequence[int], dtype: DTypeLike = dtype) -> ActivationRow:
        return _row(name, ("batch", "seq", *axes), split, (rows, length, *sizes), dtype, execution)

    yield of_tokens("token ids", (), (), jnp.int32)
    yield of_tokens("residual stream", ("embed",), (cfg.model.embed,))
    blocks = [(block, stack.numbers) for stack in model.stacks for block in stack.blocks]
    for block, numbers in blocks:
        for _, axes, shape in parameter_table(block.attention):
            if axes.outputs == ("heads", "head_dim"):
                yield of_tokens("queries", axes.outputs, shape[-2:])
        if call.cache is not None:
            continue
        for name, axes, (_, _, *sizes), kind in _kept(block, cfg.model.embed, dtype, numbers):
            yield of_tokens(f"{name} kept by attention", axes, sizes, kind)
            moves = (
                context_parallel(execution)
                .exchanges((math.prod(sizes),), kind, 1, None, execution.sequence_group)
                .forward
            )
            if execution.sequence_axes and "all_gather" in (move.collective for move in moves):
                axes, whole = ("batch", "seq", *axes), (rows, call.length, *sizes)
                yield _row(f"{name} gathered over the sequence", axes, split[:1], whole, kind, execution)
    for number, kinds in enumerate(() if call.cache is None else call.cache.kept):
        for kind, kept in enumerate(kinds):
            for name, axes, (layers, _, *sizes), dtype_there in _fields(kept, 3):
                axes, local = ("layer", "batch", "slots", *axes), (layers, rows, *sizes)
                name = f"{name} in the cache of .{block_path(number, kind)}"
                yield _row(name, axes, ((), split[0]), local, dtype_there, execution)
    if any(block.moe is not None for block, _ in blocks):
        yield of_tokens("router probabilities", ("router",), (cfg.model.experts,), jnp.float32)
        room, over = _room(cfg, call), (*execution.token_axes, *execution.expert_axes)
        for name, axis, size in (
            ("rows of the experts", "expert_embed", cfg.model.embed),
            ("inner rows of the experts", "expert_mlp", cfg.model.expert_mlp),
        ):
            yield _row(name, ("rows", axis), (tuple(dict.fromkeys(over)),), (room, size), dtype, execution)
    logits = (call.logits, cfg.model.vocab)
    yield _row("logits held at once", ("tokens", "vocab"), (execution.token_axes,), logits, jnp.float32, execution)


def _row(
    name: str, axes: Sequence[str], spec: Spec, local: Sequence[int], dtype: DTypeLike, execution: Execution
) -> ActivationRow:
    """Return the row of an array by the shape of a device's part; dimensions after those of `spec` are whole."""
    spec = (*spec, *((),) * (len(local) - len(spec)))
    shape = tuple(size * execution.ways(over) for size, over in zip(local, spec, strict=True))
    return ActivationRow(name, tuple(axes), spec, shape, tuple(local), math.prod(local) * jnp.dtype(dtype).itemsize)


def _kept(block: Block, embed: int, dtype: DTypeLike, numbers: Any) -> Iterator[_Field]:
    """Yield what the attention of a stacked block keeps of each token, by running it on the shapes of one token."""
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block.attention)
    here: Any = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    execution = Execution(dtype=dtype)
    first = None if numbers is None else LayerNumbers(*numbers[0])

    def keep(attention: Any, x: Any, place: Any) -> PyTree:
        return execution.whole(attention)(x, Context(place, place, first), execution).kept

    return _fields(jax.eval_shape(keep, layer, jax.ShapeDtypeStruct((1, 1, embed), dtype), Place(here, here)), 2)


def _fields(kept: PyTree, leading: int) -> Iterator[_Field]:
    """Yield the arrays of `kept`, whose axes after the `leading` ones are named by the annotations of its class."""
    declared = typing.get_type_hints(type(kept))
    for path, array in jax.tree_util.tree_leaves_with_path(kept):
        name = jax.tree_util.keystr(path).removeprefix(".")
        count = array.ndim - leading
        axes = declared[name].dim_str.split()[-count:] if name in declared else ("kept",) * count
        yield _Field(name, axes, array.shape, array.dtype)


def _room(cfg: TrainConfig, call: Call) -> int:
    """Return the rows that the experts of a device have room for, in the largest chunk."""
    execution, tokens = call.execution, math.prod(call.local_tokens)
    group = execution.expert_group(cfg.model.experts)
    strategy = for_group(execution.strategy, group)
    return max(strategy.rows(chunk, cfg.model.experts_per_token, group) for chunk in strategy.chunk_sizes(tokens))
