"""A closed form for the bytes that the collectives of a training step bring to each device.

Nothing is traced and no device is needed. Annotations and rules determine what is gathered and reduced, the strategy
determines what a layer exchanges (`Dispatch.exchanges`), and the rest is a few sums.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.models import model_shapes
from moezoo.models.base import LanguageModel
from moezoo.models.choice import choose_dispatch
from moezoo.moe.dispatch import Dispatch, DispatchChoice, Gather, Sizes
from moezoo.moe.dispatch.layer import layer_moves, layer_rows
from moezoo.moe.mixture import MoE
from moezoo.nn.context_parallel import context_parallel
from moezoo.optim import Optimizer
from moezoo.parallel.axes import Stack, trainable_mask
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, abstract_mesh
from moezoo.parallel.rules import Rules
from moezoo.parallel.traffic import Move, Moves, Phase, Row, Traffic, TrafficTable, inner_sum
from moezoo.parallel.weights import placed, weight_moves
from moezoo.training.loss import chunk_rows


def communication(
    config: TrainConfig,
    mesh: MeshShape | str | None = None,
    rules: Rules | str | None = None,
    dispatch: DispatchChoice | str | None = None,
    *,
    model: LanguageModel | None = None,
    trained: Callable[[str], bool] | None = None,
) -> TrafficTable:
    """Return how often each collective of a training step runs, and the bytes that one device receives from it.

    The table has one row per part of the step (two names deep, as `TrafficTable.outline(2)` of the trace), phase,
    collective and mesh axes; `.bytes` is the sum over all rows and `str` prints the table. Bytes are as defined in
    `moezoo.parallel.traffic.received_bytes`; for `ragged` they assume evenly spread rows. Counts are those of the
    program, before a compiler joins or splits collectives.

    Args:
        config: the training run.
        mesh: replaces the mesh of `config`; a value or a name.
        rules: replaces its rules; a value or a name.
        dispatch: replaces its strategy; a value or a name. The name of the strategy in `config` keeps its options.
        model: shapes that replace those of `config.model`, for example with containers.
        trained: as in `moezoo.training.step.Step`. If some parameters are frozen, the result is an upper bound for
            `remat=dots`: tokens that only gradients of frozen weights need are not gathered again.

    Raises:
        UserError: The parts do not fit together, or a mesh axis is -1.
    """
    config = _replace_parts(config, mesh, rules, dispatch)
    model, micro_steps = model_shapes(config.model) if model is None else model, config.execution.microbatches
    mask, table = trainable_mask(model, trained), TrafficTable()
    execution = build_execution(config, abstract_mesh(config.mesh))
    rows = config.batch_size // micro_steps
    execution = choose_dispatch(model.stacks, rows, config.seq_len, execution, "train", mask)

    def add(scope: str, phase: Phase, moves: Iterable[Move], times: int) -> None:
        for move in moves:
            if move.axes:
                traffic = Traffic(times, times * move.received_bytes)
                table.add(Row(scope, phase, move.collective, move.axes), traffic)

    def both(scope: str, moves: Moves, times: int, *, recomputed: bool, learns: bool = True) -> None:
        for phase, part in moves.phases(recomputed=recomputed).items():
            if learns or phase == "forward":
                add(scope, phase, part, times * micro_steps)

    kept = config.execution.remat == "none"  # then only weights are gathered twice and nothing is computed twice
    rows //= execution.ways(execution.batch_axes)
    length = config.seq_len // execution.ways(execution.sequence_axes)
    # The backward pass ends at the first part, from the embedding on, in which something is trained.
    learns = any(jax.tree.leaves(mask.embedding))
    both("embedding/weights", weight_moves(model.embedding, mask.embedding, execution), 1, recomputed=False)
    both("head/weights", weight_moves(model.readout, mask.readout, execution), 1, recomputed=False)
    attention, group, heads = context_parallel(execution), execution.sequence_group, execution.inner_group("heads")
    both("positions", attention.place_exchanges(rows * length, group), 1, recomputed=False)
    routing_layers = 0
    for stack, chosen in zip(model.stacks, mask.stacks, strict=True):
        learns = learns or any(jax.tree.leaves(chosen))
        both("layers/weights", weight_moves(stack, chosen, execution), stack.count, recomputed=True, learns=learns)
        for block, mine in zip(stack.blocks, chosen.blocks, strict=True):
            for part, moves in block.exchanges(rows * length, mine, execution).items():
                both(f"layers/{part}", moves, stack.count, recomputed=not kept, learns=learns)
            sizes = jax.tree.leaves(block.attention.kept_sizes(heads), is_leaf=lambda x: isinstance(x, dict))
            numbers = tuple(rows * length * math.prod(array.values()) for array in sizes)
            window = block.attention.count_slots(config.seq_len)
            kept_moves = attention.exchanges(numbers, execution.dtype, length, window, group)
            again = not kept and (config.execution.remat != "dots" or attention.repeats_with_dots)
            both("layers/attention", kept_moves, stack.count, recomputed=again, learns=learns)
            if block.moe is not None:
                routing_layers += stack.count
                rows_there = _experts(block.moe, rows * length, execution)
                both("layers/feed_forward", rows_there, stack.count, recomputed=not kept, learns=learns)
    _vocabulary(both, model, rows * length, execution, learns, mask.unembedding.norm.scale)
    add("routing", "forward", _statistics(config, routing_layers, rows, execution), micro_steps)
    add("loss", "forward", [_move("psum", execution.token_axes, 1, jnp.float32, execution)], micro_steps)
    # Once per step: the number of predicted tokens; gradients not stored over all axes that split tokens; the norm.
    add("loss", "outside", [_move("psum", execution.token_axes, 1, jnp.int32, execution)], 1)
    add("gradient_sums", "outside", _gradient_sums(model, mask, execution), 1)
    add("gradient_norm", "outside", [_move("psum", execution.live_axes, 1, jnp.float32, execution)], 1)
    optimizer = Optimizer(config.optimizer, config.schedule, config.steps, execution.placements(model))
    for move, times in optimizer.work(eqx.filter(model, mask), execution.ways).moves:
        add("optimizer/orthogonalise", "outside", [move], times)
    return table


def break_even(
    config: TrainConfig,
    mesh: MeshShape | str | None = None,
    rules: Rules | str | None = None,
    dispatch: DispatchChoice | str | None = None,
) -> float:
    """Return the tokens per device and micro-step at which `dispatch` and `gather` receive the same number of bytes.

    With fewer tokens `dispatch` receives less; with more, `gather`. The result is infinite if an additional token costs
    no more with `dispatch` than with `gather`. Only layers with experts count, forward and backward, with the
    rematerialisation of `config`. Arguments are those of `communication`.

    Raises:
        UserError: Nothing moves on this mesh, or `dispatch` moves weights.
    """
    config = _replace_parts(config, mesh, rules, dispatch)
    execution = build_execution(config, abstract_mesh(config.mesh), batches="any")
    stacks = model_shapes(config.model).stacks
    stack, block = next((stack, block) for stack in stacks for block in stack.blocks if block.moe is not None)
    strategy = config.dispatch
    split = execution.expert_group(config.model.experts).axes
    if not (isinstance(strategy, Dispatch) and strategy.moves == "tokens" and split):
        raise UserError(
            "nothing to compare: tokens move only with dispatch=ring, ragged or capacity, and only on a mesh that "
            "splits experts, such as mesh.expert=8"
        )

    def count_bytes(strategy: Dispatch, tokens: int) -> int:
        other = dataclasses.replace(execution, dispatch=strategy)
        layer = Stack((block,), stack.count)
        # Gathered weights are never kept.
        weights = weight_moves(layer, trainable_mask(layer), other).of_a_step(recomputed=True)
        moves = _experts(block.moe, tokens, other).of_a_step(recomputed=execution.remat != "none")
        return sum(move.received_bytes for move in (*weights, *moves))

    def line(strategy: Dispatch) -> tuple[float, float]:
        """Return the bytes that do not depend on the number of tokens, and the bytes per token."""
        # Many tokens, so that rounding does not matter.
        some, more = count_bytes(strategy, 2**18), count_bytes(strategy, 2**19)
        return float(2 * some - more), (more - some) / 2**18

    weights, token_of_gather = line(Gather())
    fixed, token = line(strategy)
    # `gather` has a cost per token too if devices hold the same tokens: results are joined.
    return (weights - fixed) / (token - token_of_gather) if token > token_of_gather else math.inf


def expert_rows(config: TrainConfig) -> int:
    """Return the rows per device that a layer with experts has room for in a micro-step."""
    rows, model = config.batch_size // config.execution.microbatches, model_shapes(config.model)
    execution = build_execution(config, abstract_mesh(config.mesh))
    strategy = choose_dispatch(model.stacks, rows, config.seq_len, execution, "train").strategy
    tokens = rows * config.seq_len // execution.ways(execution.token_axes)
    return layer_rows(strategy, tokens, config.model.experts_per_token, execution.expert_group(config.model.experts))


def _replace_parts(
    config: TrainConfig, mesh: MeshShape | str | None, rules: Rules | str | None, dispatch: DispatchChoice | str | None
) -> TrainConfig:
    """Return `config` with the values that replace its own."""
    if not isinstance(config, TrainConfig):
        raise UserError(f"config is a {type(config).__name__}, expected a TrainConfig; make one with moezoo.compose()")
    named: dict[str, Any] = {"mesh": mesh, "rules": rules, "dispatch": dispatch}
    for key, value in named.items():
        if isinstance(value, str):
            named[key] = getattr(compose(f"{key}={value}"), key)
    if isinstance(dispatch, str) and type(named["dispatch"]) is type(config.dispatch):
        named["dispatch"] = None
    return dataclasses.replace(config, **{key: value for key, value in named.items() if value is not None})


def _move(collective: str, axes: MeshAxes, numbers: int, dtype: DTypeLike, execution: Execution) -> Move:
    return Move(collective, axes, execution.ways(axes), numbers, dtype)


def _experts(moe: MoE, tokens: int, execution: Execution) -> Moves:
    """Return the moves of a layer's dispatch."""
    *_, embed, num_experts = moe.router.weight.shape
    sizes = Sizes(tokens, moe.router.k, embed, execution.dtype)
    return layer_moves(execution.strategy, sizes, execution.expert_group(num_experts))


def _vocabulary(
    add: Callable[..., None], model: LanguageModel, tokens: int, execution: Execution, learns: bool, scale_learns: bool
) -> None:
    """Add the collectives over the devices that share the vocabulary: of embedding and head (`cross_entropy`).

    `learns`: whether something before the head is trained; `scale_learns`: whether the scale of the last norm is.
    """
    group, embed = execution.inner_group("vocab"), model.embedding.weight.shape[1]
    chunk = chunk_rows(tokens, model.vocab // group.size)
    count = -(-tokens // chunk)
    highest = Move("pmax", group.axes, group.size, chunk, jnp.float32)
    by_tokens = inner_sum(group, count * chunk * embed, execution.dtype)
    by_scale = inner_sum(group, embed, execution.reduce_dtype)
    add("embedding", Moves((inner_sum(group, tokens * embed, execution.dtype),)), 1, recomputed=False)
    of_chunks = highest, inner_sum(group, 2 * chunk, jnp.float32)
    add("head", Moves(of_chunks), count, recomputed=False)
    add("head", Moves(backward=(by_tokens,)), 1, recomputed=False, learns=learns)
    add("head", Moves(backward=(by_scale,)), 1, recomputed=False, learns=scale_learns)


def _statistics(config: TrainConfig, layers: int, rows: int, execution: Execution) -> list[Move]:
    """Return the sums of routing statistics over devices (`reduce_routing`), one per array, in 4-byte numbers."""
    num_experts, batch, sequence = config.model.experts, execution.batch_axes, execution.sequence_axes

    def sums(axes: MeshAxes, *numbers: int) -> list[Move]:
        return [_move("psum", axes, layers * each, jnp.float32, execution) for each in numbers]

    if config.model.load_balance_over == "batch":  # load, probabilities, tokens, z, drops
        return sums(batch + sequence, num_experts, num_experts, 1, 1, 1)
    by_row = sums(sequence, rows * num_experts, rows * num_experts, rows, 1, 1)
    return [*by_row, *sums(batch, 1, 1, num_experts, 1, 1, 1)]  # balance, rows, load, tokens, z, drops


def _gradient_sums(model: PyTree, trained: PyTree, execution: Execution) -> list[Move]:
    """Return the sums of gradients over the axes that split tokens but do not store the parameter."""
    moves = []
    for placement, array, learns in placed(model, trained, execution):
        rest = tuple(sorted(set(execution.token_axes) - set(placement.mesh_axes)))
        if rest and learns:
            moves.append(_move("psum", rest, placement.local_size(array.shape), execution.reduce_dtype, execution))
    return moves
