"""The strategy that a call of a model runs, where the execution leaves it open (`dispatch=auto`).

Whoever calls the layers of a model resolves the execution first, because the strategy decides which weights are
gathered. Training, evaluation, prefill and decoding differ in sizes and in what they differentiate, so each resolves
its own.

Candidates are compared by their traffic: the experts of one layer are traced with each, on the mesh without its
devices, and the bytes of all collectives in the program are added up.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from moezoo.moe.dispatch import Assignment, Gather
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import layer_rows, run_experts
from moezoo.parallel.axes import Stack, trainable_mask
from moezoo.parallel.collectives import vary, vary_like
from moezoo.parallel.dispatch import Dispatch, ExpertGroup
from moezoo.parallel.mesh import no_context_mesh
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import CallName, TrafficTable
from moezoo.parallel.weight_mover import WeightMover


def choose_dispatch(
    stacks: tuple[Stack, ...],
    rows: int,
    length: int,
    execution: MeshExecution,
    call: CallName,
    trained: PyTree | None = None,
) -> MeshExecution:
    """Return `execution` with a strategy in place of a choice; an execution with a strategy is returned as it is.

    All layers with experts of a model have the same sizes, so the first of them decides.

    Args:
        stacks: The layers, as whole arrays or their shapes.
        rows: The sequences of a micro-batch, over all devices together, or over those of a stage.
        length: The tokens of each sequence, over all devices together.
        execution: How the call runs.
        call: What the layers are called for.
        trained: A tree of booleans like the model: which arrays are trained. None: all that `trainable_mask` names.
    """
    if isinstance(execution.dispatch, Dispatch | None):
        return execution
    layer, inside = expert_layer(stacks, rows, length, call, trained), execution.within_stage
    received = lambda candidate: layer.traffic(inside, candidate).bytes  # noqa: E731
    chosen = execution.dispatch.resolve(received, execution.expert_group(layer.num_experts))
    return dataclasses.replace(execution, dispatch=chosen)


class Compared(NamedTuple):
    """What a choice compared, for messages.

    - `bytes`: candidate -> the bytes that a device receives with it per layer with experts and micro-step, in all
      phases of the call, without the weights that every candidate gathers; empty where there was no choice;
    - `chosen`: the strategy;
    - `group`: the devices that share experts;
    - `room`: the rows that a device has room for with the chosen strategy, as a multiple of the rows in use if experts
      are used evenly.
    """

    bytes: dict[Dispatch, int]
    chosen: Dispatch
    group: ExpertGroup
    room: float


def compare_strategies(
    stacks: tuple[Stack, ...],
    rows: int,
    length: int,
    execution: MeshExecution,
    call: CallName,
    trained: PyTree | None = None,
) -> Compared:
    """Return the strategy of a call and what it was compared with. Arguments are those of `choose_dispatch`."""
    layer, execution = expert_layer(stacks, rows, length, call, trained), execution.within_stage
    group, dispatch = execution.expert_group(layer.num_experts), execution.dispatch or Gather()
    candidates = dispatch.candidates(group)
    tables = {each: layer.traffic(execution, each) for each in candidates} if len(candidates) > 1 else {}
    chosen = dispatch.resolve(lambda candidate: layer.traffic(execution, candidate).bytes, group)
    alike = min((weight_bytes(table) for table in tables.values()), default=0)
    found = {each: table.bytes - alike for each, table in tables.items()}
    tokens = rows * length // execution.ways(execution.token_axes)
    share = -(-tokens // group.size) if group.replicated else tokens
    return Compared(found, chosen, group, layer_rows(chosen, tokens, layer.k, group) / (share * layer.k))


class ExpertLayer(NamedTuple):
    """The experts of one layer and the tokens of one call: all that their traffic depends on, beside the execution.

    Attributes:
        shapes: The shape and dtype of each whole array of the experts.
        structure: The tree of these arrays.
        trained: Which of them are trained.
        num_experts: E.
        k: The experts per token.
        embed: The width of a token where experts read it.
        rows: The sequences over all devices.
        length: The tokens of each.
        differentiated: Whether the call has a backward pass that reaches the layer.
    """

    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    structure: Any
    trained: tuple[bool, ...]
    num_experts: int
    k: int
    embed: int
    rows: int
    length: int
    differentiated: bool

    def traffic(self, execution: MeshExecution, dispatch: Dispatch) -> TrafficTable:
        """Return the collectives of a strategy: gathers of weights, dispatch, combine, and the gradients of all three.

        Only sizes are read, so this works while JAX traces the call. Results are remembered.
        """
        return _traffic(self, dataclasses.replace(execution, dispatch=dispatch))


def expert_layer(
    stacks: tuple[Stack, ...], rows: int, length: int, call: CallName, trained: PyTree | None = None
) -> ExpertLayer:
    """Return the first layer with experts, for a call. Arguments are those of `choose_dispatch`."""
    mixtures = ((number, kind) for number, stack in enumerate(stacks) for kind, b in enumerate(stack.blocks) if b.moe)
    number, kind = next(mixtures)
    moe = stacks[number].blocks[kind].moe
    # The backward pass ends at the first part, from the embedding on, in which something is trained.
    before = () if trained is None else (trained.embedding, trained.stacks[: number + 1])
    differentiated = call == "train" and (trained is None or any(jax.tree.leaves(before)))
    mask = trainable_mask(stacks) if trained is None else trained.stacks
    leaves, structure = jax.tree.flatten(moe.experts)
    shapes = tuple((x.shape[1:], jnp.dtype(x.dtype)) for x in leaves)
    learns = tuple(jax.tree.leaves(mask[number].blocks[kind].feed_forward.experts))
    num_experts, width = moe.router.weight.shape[-1], moe.experts.width
    return ExpertLayer(shapes, structure, learns, num_experts, moe.router.k, width, rows, length, differentiated)


@functools.lru_cache(maxsize=1024)
def _traffic(layer: ExpertLayer, execution: MeshExecution) -> TrafficTable:
    """Trace the experts of a layer as a step runs them: gathered, rematerialised, differentiated."""
    assert execution.mesh is not None
    group, inner, live = execution.expert_group(layer.num_experts), execution.inner_group("mlp"), execution.live_axes
    experts = jax.tree.unflatten(layer.structure, [jax.ShapeDtypeStruct(*each) for each in layer.shapes])
    trained = jax.tree.unflatten(layer.structure, layer.trained)

    def local(experts: Experts, x: Array, assignment: Assignment, back: Array) -> Array:
        learned, fixed = eqx.partition(WeightMover(execution).vary(experts), trained)

        def run(x: Array, gates: Array, learned: Experts) -> Array:
            whole = WeightMover(execution).gather(eqx.combine(learned, fixed))
            return run_experts(whole, x, Assignment(assignment.expert_ids, gates), group, execution)[0]

        # Cast before anything is differentiated: sums over devices that share the width are not the strategy's.
        inputs: tuple[Any, ...] = (*inner.enter((x, assignment.gates)), learned)
        if layer.differentiated:
            y, pull = jax.vjp(execution.checkpoint(run), *inputs)
            results: Any = y, pull(vary_like(back, y))
        else:
            results = run(*inputs)
        # One number per device, so that the program needs every result and sums none of them over devices.
        sums = (vary(each.astype(jnp.float32).sum(), live) for each in jax.tree.leaves(results))
        return functools.reduce(jnp.add, sums)[None]

    def of_tokens(size: int, dtype: DTypeLike) -> Any:
        return jax.ShapeDtypeStruct((layer.rows * layer.length, size), dtype)

    x, assignment = (
        of_tokens(layer.embed, execution.dtype),
        Assignment(of_tokens(layer.k, jnp.int32), of_tokens(layer.k, jnp.float32)),
    )
    split: Any = PartitionSpec(execution.token_axes or None)
    specs: Any = (execution.specs(experts), split, Assignment(split, split), split)
    # Axes of type Auto, whatever those of the mesh and of `jax.set_mesh` are: nothing here has a layout.
    sizes, names = zip(*((size, name) for name, size in execution.mesh.shape.items()), strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    with no_context_mesh():
        program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(live))
        return collective_traffic(jax.make_jaxpr(program)(experts, x, assignment, x))


def weight_bytes(table: TrafficTable) -> int:
    """Return the bytes that gathers of weights, and sums of their gradients, bring to a device."""
    return sum(traffic.bytes for row, traffic in table.items() if row.scope.endswith("weights"))
