"""The strategy that a call of a model runs, where the execution leaves it open (`dispatch=auto`).

Whoever calls the layers of a model resolves the execution first, because the strategy decides which weights are
gathered. Training, evaluation, prefill and decoding differ in sizes and phases, so each resolves its own.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from moezoo.moe.dispatch import Gather, Ring, Sizes
from moezoo.moe.dispatch.layer import layer_rows, received_bytes
from moezoo.parallel.axes import Stack, trainable_mask
from moezoo.parallel.dispatch import Dispatch, ExpertGroup
from moezoo.parallel.execution import Execution
from moezoo.parallel.traffic import CallName, Phase
from moezoo.parallel.weights import weight_moves

_PHASES: dict[bool, tuple[Phase, ...]] = {False: ("forward",), True: ("forward", "recomputed", "backward")}


def choose_dispatch(
    stacks: tuple[Stack, ...],
    rows: int,
    length: int,
    execution: Execution,
    call: CallName,
    trained: PyTree | None = None,
) -> Execution:
    """Return `execution` with a strategy in place of a choice; an execution with a strategy is returned as it is.

    All layers with experts of a model have the same sizes, so the first of them decides.

    Args:
        stacks: The layers, as whole arrays or their shapes.
        rows: The sequences of a micro-step, over all devices together.
        length: The tokens of each sequence, over all devices together.
        execution: How the call runs.
        call: What the layers are called for.
        trained: A tree of booleans like the model: which arrays are trained. None: all that `trainable_mask` names.
    """
    if isinstance(execution.dispatch, Dispatch | None):
        return execution
    sizes, group = _sizes(stacks, rows, length, execution, call, trained)
    return dataclasses.replace(execution, dispatch=execution.dispatch.resolve(sizes, group))


class Compared(NamedTuple):
    """What a choice compared, for messages.

    - `bytes`: candidate -> the bytes that a device receives with it per layer with experts and micro-step, in all
      phases of the call; empty where there was no choice;
    - `chosen`: the strategy;
    - `group`: the devices that share experts;
    - `room`: the rows that a device has room for with the chosen strategy, as a multiple of the rows in use if experts
      are used evenly.
    """

    bytes: dict[Dispatch, int]
    chosen: Dispatch
    group: ExpertGroup
    room: float


def compare(
    stacks: tuple[Stack, ...],
    rows: int,
    length: int,
    execution: Execution,
    call: CallName,
    trained: PyTree | None = None,
) -> Compared:
    """Return the strategy of a call and what it was compared with. Arguments are those of `choose_dispatch`."""
    sizes, group = _sizes(stacks, rows, length, execution, call, trained)
    dispatch = execution.dispatch or Gather()
    chosen, candidates = dispatch.resolve(sizes, group), dispatch.candidates(group)
    found = {strategy: received_bytes(strategy, sizes, group) for strategy in candidates} if len(candidates) > 1 else {}
    share = -(-sizes.tokens // group.size) if group.replicated else sizes.tokens
    return Compared(found, chosen, group, layer_rows(chosen, sizes.tokens, sizes.k, group) / (share * sizes.k))


def _sizes(
    stacks: tuple[Stack, ...], rows: int, length: int, execution: Execution, call: CallName, trained: PyTree | None
) -> tuple[Sizes, ExpertGroup]:
    """Return the sizes of a layer with experts, and the devices that share its experts."""
    places = ((number, kind) for number, stack in enumerate(stacks) for kind, b in enumerate(stack.blocks) if b.moe)
    number, kind = next(places)
    moe, count = stacks[number].blocks[kind].moe, stacks[number].count
    *_, embed, num_experts = moe.router.weight.shape
    group, weights = execution.expert_group(num_experts), 0
    # The backward pass ends at the first part, from the embedding on, in which something is trained.
    before = () if trained is None else (trained.embedding, trained.stacks[: number + 1])
    differentiated = _PHASES[call == "train" and (trained is None or any(jax.tree.leaves(before)))]
    phases = differentiated
    if execution.remat == "none":  # then tokens are kept
        phases = tuple(phase for phase in phases if phase != "recomputed")
    if group.axes:
        mask = (trainable_mask(stacks) if trained is None else trained.stacks)[number].blocks[kind].feed_forward.experts
        for strategy, sign in ((Gather(), 1), (Ring(), -1)):  # one moves weights, the other does not
            there = dataclasses.replace(execution, dispatch=strategy)
            moves = weight_moves(Stack((moe.experts,), count), mask, there).phases(recomputed=True)  # never kept
            used = itertools.chain(*(moves.get(phase, ()) for phase in differentiated))
            weights += sign * sum(move.received_bytes for move in used)
    tokens = rows * length // execution.ways(execution.token_axes)
    return Sizes(tokens, moe.router.k, embed, execution.dtype, weights, phases), group
