"""Layers over pipeline stages, inside `shard_map`: which device runs which, and the ticks in which they run.

    layers before -> layers in stages, one scan over ticks -> layers after

Before and after, each stage runs whole layers on its own micro-batches, one after the other. In a tick each stage runs
one chunk of its layers on one micro-batch, and hands the result to the next stage (`moezoo.parallel.pipeline`):

| collective over `stage` | times | moves |
|---|---|---|
| ppermute, to the next stage | once per tick | what a stage made, which the next tick needs |
| ppermute, to the stage before | once per tick | the micro-batches that stage 0 has not begun |
| ppermute, to the stage before | once per tick | the micro-batches that the last stage has done |
| all-to-all | once per pass and array | weights that are not stored by layer, to the stage that runs them |
| psum | once per pass | routing statistics |

The same run backwards for gradients. Naive equivalent: run all layers on one micro-batch after the other.

A stage without work in a tick computes as usual, on some micro-batch; nobody reads what it makes, so its gradient is
zero. Only the input of a tick is kept for the backward pass, which runs the tick again.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moezoo.models.layers import layer_addresses, learn_stack, run_layers
from moezoo.moe.routing import LayerSums, Routing, RoutingConfig, evenness, reduce_routing
from moezoo.nn.positions import Context, make_context
from moezoo.parallel.axes import Role, Stack, axes_of
from moezoo.parallel.collectives import psum, vary_like
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.execution import rematerialise
from moezoo.parallel.mesh import STAGE
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.pipeline import Piped
from moezoo.parallel.weight_mover import WeightMover, hold


class MicroBatches(NamedTuple):
    """What layers read besides activations: coordinates [micro-batches, batch, seq], and their numbers in the step."""

    coordinates: Coordinates
    numbers: Int[Array, " micro"]


class _Sums(NamedTuple):
    """Routing sums [micro-batches, layers, ...] of this device, and the routing rows of the layers."""

    sums: LayerSums
    rows: Array | np.ndarray


def run_stages(
    stacks: tuple[Stack, ...],
    x: Float[Array, "own batch seq embed"],
    own: MicroBatches,
    dropout: Dropout | None,
    execution: MeshExecution,
    config: RoutingConfig,
) -> tuple[Float[Array, "own batch seq embed"], Routing]:
    """Run all layers on the micro-batches of all stages.

    Args:
        stacks: The layers, as they are stored.
        x: The activations of this stage's own micro-batches.
        own: The other inputs of these.
        dropout: What low-rank pairs drop in this step.
        execution: How the layers run; it has stages.
        config: The coefficients of the routing losses.

    Returns:
        The activations of the own micro-batches, and the routing of all. Its losses are means over micro-batches, each
        by its tokens.
    """
    piped = execution.piped(stacks)
    assert piped is not None
    rows = [address.routing_row for address in layer_addresses(stacks)]
    stack, before = stacks[piped.stack], stacks[: piped.stack]
    period, first = len(stack.blocks), sum(each.count * len(each.blocks) for each in before)
    blocks, rest = _own_layers(stack, piped, execution)
    found: list[_Sums] = []

    def run_whole(x: Array, stacks: tuple[Stack, ...], start: int) -> Array:
        """Run layers from number `start` on, on the own micro-batches."""
        if not stacks:
            return x
        x, sums = _each_micro_batch(stacks, x, own, dropout, execution, start)
        if sums is not None:
            count = sum(each.count * len(each.blocks) for each in stacks)
            found.append(_Sums(sums, np.array([row for row in rows[start : start + count] if row is not None])))
        return x

    x = run_whole(x, before, 0)
    x, by_kind = _run_ticks(blocks, x, own, dropout, execution, piped, first)
    last = first + piped.periods * period
    for kind, sums in enumerate(by_kind):
        if sums is not None:
            of_stages = np.array(rows[first + kind : last : period]).reshape(piped.chunks, piped.stages, piped.depth)
            mine = lax.dynamic_index_in_dim(jnp.asarray(of_stages), lax.axis_index(STAGE), 1, keepdims=False)
            found.append(_Sums(sums, mine.reshape(-1)))
    x = run_whole(x, (*rest, *stacks[piped.stack + 1 :]), last)
    return x, _routing(found, sum(row is not None for row in rows), execution, config)


def _own_layers(stack: Stack, piped: Piped, execution: MeshExecution) -> tuple[PyTree, tuple[Stack, ...]]:
    """Return the blocks of this stage, arrays [chunks, depth, ...], and the layers left that do not run in stages."""
    chunks, stages, depth = piped.chunks, piped.stages, piped.depth

    @jax.named_scope("weights")
    def mine(x: Array, axes: Any) -> Array:
        if piped.by_layer and axes.role is not Role.BUFFER:
            return x.reshape(chunks, depth, *x.shape[1:])
        x = x[: piped.periods].reshape(chunks, stages, depth, *x.shape[1:])
        split = [dim for dim, over in enumerate(execution.placement_of_part(axes, x).stored) if STAGE in over]
        if not split:
            return lax.dynamic_index_in_dim(x, lax.axis_index(STAGE), 1, keepdims=False)
        # In the place of the dimension of layers there are three.
        return lax.all_to_all(x, STAGE, 1, 2 + split[0], tiled=True).squeeze(1)

    blocks = jax.tree.map(mine, stack.blocks, axes_of(stack).blocks)
    if piped.periods == stack.count:
        return blocks, ()
    return blocks, (Stack(jax.tree.map(lambda x: x[piped.periods :], stack.blocks), stack.count - piped.periods),)


def _each_micro_batch(
    stacks: tuple[Stack, ...],
    x: Array,
    own: MicroBatches,
    dropout: Dropout | None,
    execution: MeshExecution,
    first: int,
) -> tuple[Array, LayerSums | None]:
    """Run whole layers on one own micro-batch after the other; return activations and sums [own, layers, ...]."""

    def one(_: None, micro: tuple[Array, MicroBatches]) -> tuple[None, tuple[Array, LayerSums | None]]:
        x, (coordinates, number) = micro
        context = _context(make_context(coordinates, execution, execution.sequence_order), dropout, number)
        out = run_layers(stacks, x, context, execution, first=first)
        return None, (out.x, out.sums)

    return lax.scan(one, None, (x, own))[1]


def _context(context: Context, dropout: Dropout | None, number: Array) -> Context:
    return context if dropout is None else dataclasses.replace(context, dropout=dropout.of(number))


class _Carry(NamedTuple):
    """What passes from tick to tick.

    - `passed`: [batch, seq, embed], what the stage before made;
    - `waiting`: [own, ...], micro-batches that stage 0 has not begun;
    - `done`: [own, ...], micro-batches that the last stage has done.
    """

    passed: Array
    waiting: Array
    done: Array


def _run_ticks(
    blocks: PyTree,
    x: Float[Array, "own batch seq embed"],
    own: MicroBatches,
    dropout: Dropout | None,
    execution: MeshExecution,
    piped: Piped,
    first: int,
) -> tuple[Array, list[LayerSums | None]]:
    """Run the layers in stages; return activations, and for each kind of layer sums [micro-batches, layers, ...].

    A column of `waiting` or `done` turns by one stage with each micro-batch that is taken or put there: micro-batch m
    is in column m % own, at the beginning of `waiting` and at the end of `done` on stage m // own.
    """
    order, inside, stages, chunks = execution.pipeline, execution.within_stage, piped.stages, piped.chunks
    assert order is not None
    columns, period, stage = x.shape[0], len(blocks), lax.axis_index(STAGE)
    works = columns * stages * chunks
    with jax.named_scope("positions"):
        everyone = jax.tree.map(lambda part: lax.all_gather(part, STAGE, tiled=True), own)
    contexts = lax.map(lambda of: make_context(of, inside, execution.sequence_order), everyone.coordinates)
    held = _held(blocks, inside) if order.gather == "once" else None

    def work(x: Array, number: Array) -> tuple[Array, tuple[LayerSums | None, ...]]:
        chunk, micro = order.work(number, stages)
        context, which = jax.tree.map(lambda part: _at(part, micro), (contexts, everyone.numbers))
        mine, kept = jax.tree.map(lambda part: _at(part, chunk), (blocks, held))
        start = first + (chunk * stages + stage) * piped.depth * period
        return learn_stack(Stack(mine, piped.depth), x, _context(context, dropout, which), inside, start, kept)

    # The input of a tick is chosen outside, so that nothing else of the carry is kept.
    again = rematerialise(work, "offload" if execution.remat == "offload" else "full")
    to_next, to_last = ([(s, (s + step) % stages) for s in range(stages)] for step in (1, -1))

    def tick(carry: _Carry, time: Array) -> tuple[_Carry, tuple[LayerSums | None, ...]]:
        number, first, last = (jnp.clip(time - late, 0, works - 1) for late in (stage, 0, stages - 1))
        mine, begins, ends = (order.work(each, stages) for each in (number, first, last))
        column = begins.micro % columns
        new = _at(carry.waiting, column)
        x, sums = again(jnp.where((stage == 0) & (mine.chunk == 0), new, carry.passed), number)
        turned = lax.ppermute(new, STAGE, to_last)
        waiting = _put(carry.waiting, column, turned, (begins.chunk == 0) & (time < works))
        column = ends.micro % columns
        turned = lax.ppermute(_at(carry.done, column), STAGE, to_last)
        turned = jnp.where(stage == stages - 1, x, turned)
        done = _put(carry.done, column, turned, (ends.chunk == chunks - 1) & (time >= stages - 1))
        return _Carry(lax.ppermute(x, STAGE, to_next), waiting, done), sums

    zeros = vary_like(jnp.zeros_like(x), x)
    last, sums = lax.scan(tick, _Carry(x[0], x, zeros), jnp.arange(order.ticks(stages)))

    def by_micro(x: Array) -> Array:
        mine = order.by_micro(lax.dynamic_slice_in_dim(x, stage, works), stages)
        return mine.reshape(mine.shape[0], -1, *mine.shape[3:])

    return last.done, [None if one is None else jax.tree.map(by_micro, one) for one in sums]


def _held(blocks: PyTree, inside: MeshExecution) -> PyTree:
    """Return the gathered weights of all layers of a stage, held for many micro-batches."""
    chunks, depth = jax.tree.leaves(blocks)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)
    whole = lax.map(WeightMover(inside).gather, flat)
    return hold(jax.tree.map(lambda x: x.reshape(chunks, depth, *x.shape[1:]), whole), inside.reduce_dtype)


def _at(x: Array, index: Array | int) -> Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _put(x: Array, index: Array | int, entry: Array, where: Array) -> Array:
    """Return `x` with `entry` at `index`, if `where` is true."""
    entry = jnp.where(where, entry, _at(x, index))
    return lax.dynamic_update_index_in_dim(x, entry, index, 0, allow_negative_indices=False)


def _routing(found: list[_Sums], layers: int, execution: MeshExecution, config: RoutingConfig) -> Routing:
    """Return the routing of all layers over all micro-batches, of which each device has some."""
    inside = execution.within_stage
    flat = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), each.sums) for each in found]
    rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *flat)
    of_rows = reduce_routing(rows, config, inside.batch_axes, inside.sequence_axes)

    def by_layer(x: Array) -> Array:
        total, first = vary_like(jnp.zeros((layers, *x.shape[1:]), x.dtype), x), 0
        for each in found:
            shape = each.sums.z.shape
            part = x[first : first + shape[0] * shape[1]].reshape(*shape, *x.shape[1:])
            total, first = total.at[each.rows].add(part.sum(0, dtype=x.dtype)), first + shape[0] * shape[1]
        return total

    with jax.named_scope("routing"):
        assigned = of_rows.load.sum(1).astype(jnp.float32)  # as many for each token
        of_all = of_rows.load, of_rows.dropped, assigned * of_rows.load_balance_loss, assigned * of_rows.z_loss
        load, dropped, balance, z = psum(tuple(map(by_layer, of_all)), execution.stage_axes)
        all_assigned = jnp.maximum(load.sum(1), 1).astype(jnp.float32)
        return Routing(load, *evenness(load), dropped, balance / all_assigned, z / all_assigned)
