"""What a training step costs before there is one: the bytes its collectives bring a device, in closed form.

Sizes alone decide: a parameter's annotation and the rules say what is gathered and reduced, the strategy says what a
layer exchanges (`Dispatch.exchanges`), and the rest is a few sums. Nothing is traced and no device is asked.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from moezoo.axes import Axes, Role, axes_of
from moezoo.collectives import MeshAxes, runs
from moezoo.compose import compose
from moezoo.errors import UserError
from moezoo.execution import Execution
from moezoo.mesh import MeshShape, abstract_mesh
from moezoo.models import model_shapes
from moezoo.moe.block import MoE, chunk_sizes
from moezoo.moe.dispatch import Dispatch, ExpertGroup, Gather, Replicated, Sizes
from moezoo.rules import Rules
from moezoo.settings import TrainConfig
from moezoo.traffic import Move, Moves, Table
from moezoo.train.setup import execution, layout


def communication(
    config: TrainConfig,
    mesh: MeshShape | str | None = None,
    rules: Rules | str | None = None,
    dispatch: Dispatch | str | None = None,
) -> Table:
    """How often each collective of a training step runs, and the bytes that one device receives by it.

    By collective and mesh axes; `.bytes` is their sum, `str` a table. `mesh`, `rules` and `dispatch`, or names of them,
    take the place of those of `config`; the name of the strategy that it has changes none of its options. What a
    collective brings is defined in `moezoo.traffic.received`; for `ragged`, of routed rows evenly spread. Counts are
    those of the program, before a compiler joins or splits collectives.

    Raises `UserError` where they do not fit together, and for a mesh axis of -1.
    """
    config = _instead(config, mesh, rules, dispatch)
    run = execution(config, abstract_mesh(config.mesh))
    model, micro_steps, table = model_shapes(config.model), config.execution.microbatches, Table()

    def add(moves: Iterable[Move], times: int) -> None:
        for move in moves:
            if move.axes:
                table.add(move.collective, move.axes, times, move.received)

    def both(moves: Moves, times: int, *, again: bool) -> None:
        add(moves.of_a_step(again=again), times * micro_steps)

    kept = config.execution.remat == "none"  # nothing is computed twice, and only weights are gathered twice
    rows = config.batch_size // micro_steps // run.ways(run.batch_axes)
    length = config.seq_len // run.ways(run.sequence_axes)
    both(_weights(model.embedding, run), 1, again=False)
    both(_weights(model.unembedding, run), 1, again=True)
    both(_places(rows * length, run), 1, again=False)
    routing_layers = 0
    for stack in model.stacks:
        both(_weights(stack, run), stack.count, again=True)
        both(_keys(config.model.kept_dims, rows * length, run), stack.count, again=not kept)
        if hasattr(stack.layer, "moe"):
            routing_layers += stack.count
            both(_experts(stack.layer.moe, rows * length, run), stack.count, again=not kept)
    add(_statistics(config, routing_layers, rows, run), micro_steps)
    # Once a step: the number of predicted tokens, gradients of what is not stored over all axes of tokens, the norm.
    add([_move("psum", run.token_axes, 1, jnp.int32, run), _move("psum", run.live_axes, 1, jnp.float32, run)], 1)
    add(_replicated(model, run), 1)
    return table


def break_even(
    config: TrainConfig,
    mesh: MeshShape | str | None = None,
    rules: Rules | str | None = None,
    dispatch: Dispatch | str | None = None,
) -> float:
    """Tokens a device and micro-step at which `dispatch` brings as many bytes as moving experts' weights would.

    With fewer, move tokens; with more, `gather`; infinite where tokens cost `gather` no less. Of layers with experts
    alone, forward and backward, rematerialised as `config` says. Raises `UserError` for a mesh on which nothing moves,
    and for a strategy that moves weights.
    """
    config = _instead(config, mesh, rules, dispatch)
    run = layout(config, abstract_mesh(config.mesh))
    moe = next(stack.layer.moe for stack in model_shapes(config.model).stacks if hasattr(stack.layer, "moe"))
    if run.strategy.moves == "weights" or not run.expert_group(config.model.experts).axes:
        raise UserError(
            "nothing to compare: tokens move to experts with dispatch=ring, ragged or capacity, on a mesh that splits "
            "experts, such as mesh.expert=8"
        )

    def brought(strategy: Dispatch, tokens: int) -> int:
        moves = _experts(moe, tokens, dataclasses.replace(run, dispatch=strategy))
        return sum(move.received for move in moves.of_a_step(again=run.remat != "none"))

    def line(strategy: Dispatch) -> tuple[float, float]:
        """What is brought whatever the number of tokens, and for each; numbers so large that rounding does not show."""
        some, more = brought(strategy, 2**18), brought(strategy, 2**19)
        return float(2 * some - more), (more - some) / 2**18

    weights, token_of_gather = line(Gather())
    fixed, token = line(run.strategy)
    # Tokens that are the same on all devices cost `gather` something too: results are joined.
    return (weights - fixed) / (token - token_of_gather) if token > token_of_gather else math.inf


def expert_rows(config: TrainConfig) -> int:
    """Rows that a device has room for in a layer with experts and a micro-step, used or not."""
    run = execution(config, abstract_mesh(config.mesh))
    group = run.expert_group(config.model.experts)
    rows = config.batch_size // config.execution.microbatches // run.ways(run.batch_axes)
    tokens = rows * (config.seq_len // run.ways(run.sequence_axes))
    k, strategy = config.model.experts_per_token, _strategy(run, group)
    return sum(strategy.rows(chunk, k, group) for chunk in chunk_sizes(tokens, run.strategy.chunks))


def _strategy(run: Execution, group: ExpertGroup) -> Dispatch:
    """The strategy, wrapped where tokens are the same on all devices of the group."""
    return run.strategy if set(group.axes) <= set(run.token_axes) else Replicated(run.strategy)


def _instead(
    config: TrainConfig, mesh: MeshShape | str | None, rules: Rules | str | None, dispatch: Dispatch | str | None
) -> TrainConfig:
    if not isinstance(config, TrainConfig):
        raise UserError(f"expected a configuration, as moezoo.compose(...) returns it, got {type(config).__name__}")
    named: dict[str, Any] = {"mesh": mesh, "rules": rules, "dispatch": dispatch}
    for key, value in named.items():
        if isinstance(value, str):
            named[key] = getattr(compose(f"{key}={value}"), key)
    if isinstance(dispatch, str) and type(named["dispatch"]) is type(config.dispatch):
        named["dispatch"] = None
    return dataclasses.replace(config, **{key: value for key, value in named.items() if value is not None})


def _move(collective: str, axes: MeshAxes, numbers: int, dtype: DTypeLike, run: Execution) -> Move:
    return Move(collective, axes, run.ways(axes), numbers, dtype)


def _leaves(module: PyTree) -> Iterable[tuple[Axes, tuple[int, ...]]]:
    for leaf, axes in zip(
        jax.tree.leaves(module), jax.tree.leaves(axes_of(module), is_leaf=lambda x: isinstance(x, Axes)), strict=True
    ):
        yield axes, leaf.shape


def _stored(axes: Axes, shape: tuple[int, ...], run: Execution) -> int:
    """Numbers of a parameter on one device."""
    return math.prod(shape) // run.ways(tuple(a for dim in run.rules.stored(axes, run.sizes) for a in dim))


def _weights(module: PyTree, run: Execution) -> Moves:
    """Of making a module's weights whole (`Execution.whole`), or one layer's of a stack: gathers, and again, and back.

    Axes that split tokens and axes that do not take one gather each, minor ones first; only the former sum gradients.
    """
    forward, backward = [], []
    for axes, shape in _leaves(module):
        numbers = _stored(axes, shape, run) // (shape[0] if "layer" in axes.names else 1)
        for dim in run.rules.gathered(axes, run.sizes):
            for split, part in reversed(runs(dim, run.token_axes)):
                gathered = _move("all_gather", part, numbers, run.dtype, run)
                forward.append(gathered)
                backward += [gathered.back(run.reduce_dtype)] if split else []
                numbers *= gathered.ways
    return Moves(tuple(forward), tuple(forward), tuple(backward))


def _places(tokens: int, run: Execution) -> Moves:
    """Of the whole sequence, positions and segments."""
    return Moves((_move("all_gather", run.sequence_axes, tokens, jnp.int32, run),) * 2)


def _keys(dims: tuple[int, ...], tokens: int, run: Execution) -> Moves:
    """Of the whole sequence, what attention looks back on."""
    gathered = tuple(_move("all_gather", run.sequence_axes, tokens * dim, run.dtype, run) for dim in dims)
    return Moves(gathered, gathered, tuple(move.back() for move in gathered))


def _experts(moe: MoE, tokens: int, run: Execution) -> Moves:
    """Of a layer's dispatch, chunk by chunk; weights that move do so once."""
    *_, embed, experts = moe.router.weight.shape
    group, moves = run.expert_group(experts), Moves()
    if not group.axes:
        return moves
    weights = tuple(math.prod(x.shape[2:]) for x in jax.tree.leaves(moe.experts))
    for chunk in chunk_sizes(tokens, run.strategy.chunks):
        sizes = Sizes(chunk, moe.router.choice.k, embed, weights, run.dtype)
        moves += _strategy(run, group).exchanges(sizes, group)
        weights = ()
    return moves


def _statistics(config: TrainConfig, layers: int, rows: int, run: Execution) -> list[Move]:
    """The sums of losses and routing over devices (`reduce_routing`), in which an integer travels as two numbers."""
    experts, batch, sequence = config.model.experts, run.batch_axes, run.sequence_axes
    if config.model.load_balance_over == "batch":
        each = 2 * experts + experts + 2 + 1 + 2  # load, probabilities, tokens, z, drops
        return [_move("psum", batch + sequence, layers * each + 1, jnp.float32, run)]
    by_row = rows * (2 * experts + experts + 2) + 1 + 2
    each = 1 + 2 + 2 * experts + 2 + 1 + 2  # balance, rows, load, tokens, z, drops
    return [
        _move("psum", sequence, layers * by_row + 1, jnp.float32, run),
        _move("psum", batch, layers * each + 1, jnp.float32, run),
    ]


def _replicated(model: PyTree, run: Execution) -> list[Move]:
    """Gradients' sums over axes that split tokens and do not store the parameter."""
    moves = []
    for axes, shape in _leaves(model):
        stored = {a for dim in run.rules.stored(axes, run.sizes) for a in dim}
        rest = tuple(sorted(set(run.token_axes) - stored))
        if rest and axes.role is not Role.BUFFER:
            moves.append(_move("psum", rest, _stored(axes, shape, run), run.reduce_dtype, run))
    return moves
