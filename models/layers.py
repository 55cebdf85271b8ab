"""The layers of a model: how they are stacked, where each one is stored, and the loop that runs them.

Layers that repeat a pattern of kinds are stored as one `Stack` and run by one scan. With kinds A A B A A B A A B, the
period is A A B: the stack has three blocks, and each of their arrays has a leading dimension of three periods.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, count, groupby, pairwise, product
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.moe.routing import LayerSums
from moezoo.nn.cache import Cache
from moezoo.nn.positions import Context
from moezoo.parallel.axes import Stack
from moezoo.parallel.low_rank import with_dropout
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.weight_mover import WeightMover, use

# (block, what its mixer kept) -> what the loop keeps of the layer.
Collect = Callable[[Block, PyTree], PyTree]


class LayerAddress(NamedTuple):
    """Where layer `number` is stored: at index `index` of the arrays of block `kind` of stack `stack`.

    `routing_row`: its number among the layers with experts, from 0; None without experts.
    """

    number: int
    stack: int
    kind: int
    index: int
    routing_row: int | None

    @property
    def path(self) -> str:
        """The path of its block in the model."""
        return block_path(self.stack, self.kind)


def block_path(stack: int, kind: int) -> str:
    """Return the path of block `kind` of stack `stack` in a model."""
    return f"stacks[{stack}].blocks[{kind}]"


def layer_addresses(stacks: tuple[Stack, ...]) -> tuple[LayerAddress, ...]:
    """Return the address of each layer in order. `stacks` may hold shapes instead of arrays."""
    addresses, rows = list[LayerAddress](), count()
    for number, stack in enumerate(stacks):
        for index, (kind, block) in product(range(stack.count), enumerate(stack.blocks)):
            row = None if block.moe is None else next(rows)
            addresses.append(LayerAddress(len(addresses), number, kind, index, row))
    return tuple(addresses)


def layers_with_experts(stacks: tuple[Stack, ...]) -> tuple[int, ...]:
    """Return the number of the layer, from 0, of each routing row."""
    return tuple(each.number for each in layer_addresses(stacks) if each.routing_row is not None)


def routing_rows(stacks: tuple[Stack, ...]) -> dict[tuple[int, int], np.ndarray]:
    """Return, for each (stack, kind) with experts, the routing rows of its layers."""
    rows: dict[tuple[int, int], list[int]] = {}
    for address in layer_addresses(stacks):
        if address.routing_row is not None:
            rows.setdefault((address.stack, address.kind), []).append(address.routing_row)
    return {where: np.asarray(found) for where, found in rows.items()}


def find_periods(kinds: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Cut layers, given by their kinds, into runs of (layers per period, periods).

    They are leading layers, one pattern that repeats, and remaining layers, or no pattern. Leading and remaining layers
    are runs of equal ones, of period 1. One block is compiled for each layer of a period, and the pattern is the
    shortest with which the cut has the fewest blocks. Two equal halves are a pattern even if runs without one are as
    few blocks, so that each of two pipeline stages can run half of the layers.
    """
    total = len(kinds)
    changes = [0, *accumulate(one != other for one, other in pairwise(kinds))]

    def count_runs(first: int, end: int) -> int:
        return 1 + changes[end - 1] - changes[first] if first < end else 0

    fewest, pattern = count_runs(0, total), (total, 1, 0)  # the pattern: its first layer, period and periods
    for period in range(2, total // 2 + 1):
        if period >= fewest:
            break
        same = 0  # so many layers, from `first` on, equal the one `period` layers later
        for first in reversed(range(total - period)):
            same = same + 1 if kinds[first] == kinds[first + period] else 0
            periods = 1 + same // period
            blocks = count_runs(0, first) + period + count_runs(first + period * periods, total)
            if periods > 1 and blocks < fewest:
                fewest, pattern = blocks, (first, period, periods)
    half = total // 2
    if pattern[2] == 0 and fewest == half and kinds[:half] == kinds[half:]:
        pattern = (0, half, 2)
    first, period, periods = pattern
    before, after = kinds[:first], kinds[first + period * periods :]
    leading, remaining = ([(1, len([*run])) for _, run in groupby(part)] for part in (before, after))
    return leading + [(period, periods)] * (periods > 0) + remaining


def make_stacks(kinds: Sequence[Hashable], make_block: Callable[[Any, Array], Block], keys: Array) -> tuple[Stack, ...]:
    """Return the stacks of a model.

    Args:
        kinds: The kind of each layer in order. Layers of one kind have the same structure.
        make_block: `make_block(kind, key)` returns one layer.
        keys: A random key per layer.
    """
    stacks, first = [], 0
    for period, periods in find_periods(kinds):
        blocks = tuple(
            jax.vmap(functools.partial(make_block, kinds[at]))(keys[at : first + period * periods : period])
            for at in range(first, first + period)
        )
        stacks.append(Stack(blocks, periods))
        first += period * periods
    return tuple(stacks)


class LayersOutput(NamedTuple):
    """The result of all layers.

    `x`: activations after the last layer. `kept[stack][kind]`: what the loop kept. `sums`: routing sums of this device,
    one row per layer with experts; None with a cache or `collect`.
    """

    x: Float[Array, "batch seq embed"]
    kept: tuple[tuple[PyTree, ...], ...]
    sums: LayerSums | None


def run_layers(
    stacks: tuple[Stack, ...],
    x: Float[Array, "batch seq embed"],
    context: Context,
    execution: MeshExecution,
    cache: Cache | None = None,
    collect: Collect | None = None,
    first: int = 0,
) -> LayersOutput:
    """Run layers, with one scan per stack. A layer's weights are gathered inside the scan, just before it runs.

    With a `cache` or `collect` nothing is differentiated, and weights stay in their stack (`WeightMover.layer`).
    `first` is the number of the first layer among all of the model.

    | use | `cache`, `collect` | returns |
    |---|---|---|
    | training | neither | routing sums; layers are rematerialised by `execution.remat` |
    | reading a prompt, recording modules | `collect` | in `kept`, what `collect` returns for each layer |
    | reading one more token | `cache` | in `kept`, what later tokens need of it (`Cache.append`) |

    Naive equivalent: `for block in blocks: x = block(x, context, execution).x`.

    Raises `UserError` where devices share sequences and a mixer does not support it.
    """
    learns, collected = cache is None and collect is None, []
    for number, stack in enumerate(stacks):
        if learns:
            x, of_stack = learn_stack(stack, x, context, execution, first)
        else:
            x, of_stack = _read_stack(stack, x, context, execution, number, cache, collect)
        collected.append(of_stack)
        first += stack.count * len(stack.blocks)
    if not learns:
        return LayersOutput(x, tuple(collected), None)
    sums = {(n, kind): one for n, kinds in enumerate(collected) for kind, one in enumerate(kinds) if one is not None}
    return LayersOutput(x, (), _in_order(sums, stacks) if sums else None)


def learn_stack(
    stack: Stack, x: Array, context: Context, execution: MeshExecution, first: Array | int, held: PyTree = None
) -> tuple[Array, tuple[LayerSums | None, ...]]:
    """Run the layers of a stack in training; return activations, and the routing sums of each kind of layer.

    Args:
        stack: The layers. Its arrays may be a device's own layers of a longer stack.
        x: The activations.
        context: The coordinates of the tokens.
        execution: How the layers run.
        first: The number of the first layer among all of the model.
        held: The weights of `stack.blocks` if they are gathered already (`moezoo.parallel.weight_mover`).
    """

    def run(x: Array, block: Any, kept: Any, own: Context, *where: Any) -> tuple[Array, LayerSums | None]:
        weights = WeightMover(execution).gather(block, *where) if held is None else use(kept)
        out = with_dropout(weights, block, own.dropout, execution.first_input)(x, own, execution)
        return out.x, out.sums

    run, prepared = execution.checkpoint(run), _prepared(stack, context, execution)
    constant = jax.lax.stop_gradient(eqx.filter(stack.blocks, eqx.is_array))

    def step(x: Array, scanned: Any) -> tuple[Array, tuple[LayerSums | None, ...]]:
        period, blocks, kept = scanned
        collected = []
        for kind, block in enumerate(blocks):
            own = prepared[kind]
            if own.dropout is not None:
                own = dataclasses.replace(own, dropout=own.dropout.of(first + period * len(blocks) + kind))
            x, sums = run(x, block, None if kept is None else kept[kind], own, constant[kind], period)
            collected.append(sums)
        return x, tuple(collected)

    return jax.lax.scan(step, x, (jnp.arange(stack.count), stack.blocks, held))


def _read_stack(
    stack: Stack,
    x: Array,
    context: Context,
    execution: MeshExecution,
    number: int,
    cache: Cache | None,
    collect: Collect | None,
) -> tuple[Array, tuple[PyTree, ...]]:
    """Run the layers of stack `number` without gradients; return activations, and what the loop keeps of each kind."""
    prepared = _prepared(stack, context, execution)

    def step(x: Array, period: Array) -> tuple[Array, tuple[PyTree, ...]]:
        collected = []
        for kind, block in enumerate(WeightMover(execution).layer(stack.blocks, period)):
            past = None if cache is None else cache.past(number, kind, period)
            x, _, kept = block(x, prepared[kind], execution, past)
            collected.append(kept if collect is None else collect(block, kept))
        return x, tuple(collected)

    return jax.lax.scan(step, x, jnp.arange(stack.count))


def _prepared(stack: Stack, context: Context, execution: MeshExecution) -> list[Context]:
    """Return the context of each kind of layer."""
    for mixer in (block.attention for block in stack.blocks):
        if execution.sequence_axes and not mixer.splits_sequences:
            axes, kind = ", ".join(execution.sequence_axes), type(mixer).__name__
            raise UserError(
                f"rules {execution.rules.name} split sequences over mesh axes {axes}, mixer {kind} needs whole ones; "
                "use a mesh on which these have one device, or other rules"
            )
    # Computed once: neither again in the backward pass nor, by a compiler, for each head.
    return [dataclasses.replace(context, prepared=block.attention.prepare(context)) for block in stack.blocks]


def _in_order(sums: dict[tuple[int, int], LayerSums], stacks: tuple[Stack, ...]) -> LayerSums:
    """Join routing sums by (stack, kind) into one tree with a row per layer, in the order of the layers."""
    rows = routing_rows(stacks)
    order = np.argsort(np.concatenate([rows[where] for where in sums]))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *sums.values())
    if (order == np.arange(len(order))).all():
        return joined
    return jax.tree.map(lambda x: x[order], joined)
