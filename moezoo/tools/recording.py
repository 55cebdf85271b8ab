"""Run our model and record the input and output of every module.

A block returns its records in place of what a layer keeps for a cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Int32, PyTree

from moezoo.data import Batch
from moezoo.errors import UserError
from moezoo.models.base import LanguageModel, Unembedding, check_tokens
from moezoo.models.block import Block, LayerOutput
from moezoo.models.choice import choose_dispatch
from moezoo.models.layers import block_path, layer_addresses, run_layers
from moezoo.moe.experts import Experts
from moezoo.moe.router import Routed
from moezoo.nn.base import FeedForwardOutput, MixerOutput
from moezoo.nn.few_bits import cut_pieces
from moezoo.nn.positions import make_context
from moezoo.parallel.axes import Stack
from moezoo.parallel.collectives import ALONE
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh, place
from moezoo.parallel.stored import Stored
from moezoo.training.feed import Feed


class ModuleRecord(NamedTuple):
    """The input and output of a module; `input` is None if transformers has no comparable input."""

    input: np.ndarray | None
    output: np.ndarray


# A module's path, and the number of its layer in the model; None outside layers.
Where = tuple[str, int | None]


def record_model(model: LanguageModel, tokens: np.ndarray) -> dict[Where, ModuleRecord]:
    """Let `model` read `tokens` [batch, seq] on one device; return each module's record, in the order they finish."""
    execution = on_mesh(Execution())
    model = place(model, execution)
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    @jax.jit
    def program(model: LanguageModel) -> tuple[Any, Any, Any]:
        context = make_context(Coordinates(positions, jnp.ones_like(ids)), execution, "contiguous")
        x, before = _call_recording(model.embedding, "embedding", ids)
        out = run_layers(recording(model.stacks), x, context, execution, collect=lambda _, records: records)
        _, after = _call_recording(model.readout, "unembedding", out.x)
        return before, out.kept, after

    with jax.default_matmul_precision("highest"):
        before, inside, after = jax.device_get(program(model))
    records = [(None, one) for one in before]
    for layer in layer_addresses(model.stacks):
        kept = jax.tree.map(lambda x, i=layer.index: x[i], inside[layer.stack][layer.kind])
        records += [(layer.number, one) for one in kept]
    records += [(None, one) for one in after]
    return {(one.path, number): ModuleRecord(one.input, _gates(one.output)) for number, one in records}


def make_expert_ids(
    model: LanguageModel, execution: Execution, shape: tuple[int, int]
) -> Callable[[Batch], Int32[np.ndarray, "layer batch seq k"]]:
    """Return a function from a batch of `shape` [batch, seq], NumPy arrays, to the experts of its tokens.

    It drops nothing, and is compiled once. `layer` are those with experts; padding goes to expert number `experts`.
    Raises `UserError` for a model without experts, or where the mesh does not split the batches.
    """
    addresses = [each for each in layer_addresses(model.stacks) if each.routing_row is not None]
    if not addresses:
        raise UserError(
            f"the model has no layer with experts (all {model.config.layers} have an MLP), so nothing is routed; "
            "choose a model with experts, or make one with init_from=FOLDER upcycle.experts=8"
        )
    here = on_mesh(execution.in_turn)
    check_tokens(*shape, here, batch_key="batch_size")
    here = choose_dispatch(model.stacks, *shape, here.exact, "evaluate")
    device = SingleDeviceSharding(jax.devices()[0])
    sharding = NamedSharding(here.mesh, here.tokens_spec) if isinstance(here.mesh, Mesh) else device
    order = here.token_order(shape[1])
    placed = place(cut_pieces(model, here), here)
    feed = Feed(sharding, shape, order)

    def expert_ids(batch: Batch) -> np.ndarray:
        # Wait for each batch, as an evaluation does.
        found = jax.device_get(jax.block_until_ready(_run(placed, feed(batch), here)))
        return np.stack([found[each.stack][each.kind][0][each.index] for each in addresses])[:, :, np.argsort(order)]

    return expert_ids


@functools.partial(jax.jit, static_argnames="execution")
def _run(model: LanguageModel, batch: Batch, execution: MeshExecution) -> PyTree:
    """Return expert ids [layer, batch, seq, k] by stack and kind. Models of one kind are compiled once."""

    def local(model: LanguageModel, batch: Batch) -> PyTree:
        def collect(_: Any, records: tuple[Record, ...]) -> list[Array]:
            ids = (one.output.assignment.expert_ids for one in records if isinstance(one.output, Routed))
            return [each.reshape(*batch.tokens.shape, -1) for each in ids]

        context = make_context(Coordinates(batch.positions, batch.segments), execution, execution.sequence_order)
        x = model.embed(batch.tokens, execution)
        return run_layers(recording(model.stacks), x, context, execution, collect=collect).kept

    specs: Any = execution.specs(model), Batch(*(execution.tokens_spec,) * 4)
    return execution.run(local, (model, batch), specs, PartitionSpec(None, *execution.tokens_spec))


def recording(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Return stacks whose blocks return a tuple of `Record`s in place of what they keep for a cache."""
    return tuple(
        dataclasses.replace(
            stack, blocks=tuple(_RecordingBlock(b, block_path(s, k)) for k, b in enumerate(stack.blocks))
        )
        for s, stack in enumerate(stacks)
    )


class Record(eqx.Module):
    """The record of the module at `path`, as a compiled program returns it; the `output` of a router is `Routed`."""

    path: str = eqx.field(static=True)
    input: Any
    output: Any


def _call_recording(module: Any, path: str, *arguments: Any) -> tuple[Any, tuple[Record, ...]]:
    """Call `module` and also return the records of it and of every module inside it."""
    records: list[Record] = []
    result = _wrap(module, path, records)(*arguments)
    return result, tuple(records)


class _RecordingBlock(eqx.Module):
    """A block that returns its records in place of what it keeps for a cache."""

    block: Block
    path: str = eqx.field(static=True)

    @property
    def attention(self) -> Any:
        """The mixer of the block, which the loop asks to prepare."""
        return self.block.attention

    def __call__(self, *arguments: Any) -> LayerOutput:
        out, records = _call_recording(self.block, self.path, *arguments)
        return LayerOutput(out.x, None, records)


def _wrap(module: Any, path: str, records: list[Record]) -> Any:
    """Wrap `module` and every module inside it so that each call adds its input and output to `records`."""
    inside = {
        name: child
        for name, child in vars(module).items()
        if isinstance(child, eqx.Module) and not isinstance(child, Experts | Stored)
    }
    if inside:
        children = [_wrap(child, f"{path}.{name}", records) for name, child in inside.items()]
        module = eqx.tree_at(lambda m: [getattr(m, name) for name in inside], module, children)
    return _Wrapped(module, path, records)


class _Wrapped:
    """A module that records its calls and otherwise behaves as before."""

    def __init__(self, module: Any, path: str, records: list[Record]):
        self._module, self._path, self._records = module, path, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any, *arguments: Any) -> Any:
        # Two modules of transformers return what ours return one level up. Its experts return the weighted sum over a
        # token's experts; our `Experts` returns a row for each. Its unembedding returns logits before a cap; ours is a
        # matrix.
        call = self._module.before_cap if isinstance(self._module, Unembedding) else self._module
        result = call(x, *arguments)
        output = _array(result)
        if isinstance(self._module, Unembedding):
            self._records.append(Record(f"{self._path}.weight", None, output))
        if isinstance(result, FeedForwardOutput) and result.routed is not None:
            self._records.append(Record(f"{self._path}.experts", None, result.routed))
        self._records.append(Record(self._path, x, output))
        return result


def _array(result: Any) -> Any:
    """Return a module's result as one array, except that of a router."""
    if isinstance(result, MixerOutput):
        return result.leave(ALONE)
    return result[0] if isinstance(result, tuple) and not isinstance(result, Routed) else result


def _gates(output: Any) -> Any:
    """Return what a module returned; for a router, each token's gate for each expert, zero if not chosen."""
    if not isinstance(output, Routed):
        return output
    expert_ids, gates = output.assignment
    return (gates[..., None] * (expert_ids[..., None] == np.arange(output.sums.counts.shape[-1]))).sum(1)
