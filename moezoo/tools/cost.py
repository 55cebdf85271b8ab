"""The bytes that the collectives of a training step bring to each device, read from the traced step.

Steps are traced on a mesh without devices, so any mesh will do.
"""

import dataclasses
import math
from typing import Any

from moezoo.config.build import blueprint_on, build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.models.blueprint import Blueprint
from moezoo.models.choice import choose_dispatch, expert_layer, weight_bytes
from moezoo.moe.chunks import layer_rows
from moezoo.moe.dispatch import Dispatch, DispatchChoice, Gather
from moezoo.parallel.mesh import MeshShape, abstract_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import Rules
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.build import build_step


def communication(
    config: TrainConfig,
    mesh: MeshShape | str | None = None,
    rules: Rules | str | None = None,
    dispatch: DispatchChoice | str | None = None,
    *,
    blueprint: Blueprint | None = None,
) -> TrafficTable:
    """Trace a training step; return how often each collective runs, and the bytes that a device receives from it.

    `.bytes` is the sum over all rows, `.outline(2)` joins the rows of each part of the step, and `str` prints the
    table. Bytes are as defined in `moezoo.parallel.traffic.received_bytes`; for `ragged` they assume evenly spread
    rows. Counts are those of the program, before a compiler joins or splits collectives. Tracing takes seconds.

    Args:
        config: The training run.
        mesh: The mesh in place of that of `config`; a value or a name.
        rules: The rules in place of its own; a value or a name.
        dispatch: The strategy in place of its own; a value or a name. The name of its own strategy keeps its options.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts do not fit together, or a mesh axis is -1.
    """
    config = _replace_parts(config, mesh, rules, dispatch)
    step = build_step(config, build_execution(config, abstract_mesh(config.mesh)), blueprint)
    return collective_traffic(step.traced.jaxpr)


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
    execution = on_mesh(build_execution(config, abstract_mesh(config.mesh), batches="any"))
    strategy = config.dispatch
    split = execution.expert_group(config.model.experts).axes
    if not (isinstance(strategy, Dispatch) and strategy.moves == "tokens" and split):
        raise UserError(
            "nothing to compare: tokens move only with dispatch=ring, ragged or capacity, and only on a mesh that "
            "splits experts, such as mesh.expert=8"
        )
    # Many tokens, so that rounding and what is sent once, such as counts of rows, do not matter.
    tokens = 2**20
    rows = tokens * execution.ways(execution.batch_axes)
    blueprint, length = blueprint_on(config), execution.ways(execution.sequence_axes)
    layer = expert_layer(blueprint.shapes.stacks, rows, length, "train", blueprint.mask)

    def split_bytes(strategy: Dispatch) -> tuple[int, float]:
        """Return the bytes of weights, and the other bytes per token."""
        table = layer.traffic(execution, strategy)
        return (weights := weight_bytes(table)), (table.bytes - weights) / tokens

    (weights, per_token_of_gather), (fixed, per_token) = split_bytes(Gather()), split_bytes(strategy)
    # `gather` has a cost per token too if devices hold the same tokens: results are joined.
    return (weights - fixed) / (per_token - per_token_of_gather) if per_token > per_token_of_gather else math.inf


def expert_rows(config: TrainConfig) -> int:
    """Return the rows per device that a layer with experts has room for in a micro-step."""
    rows, blueprint = config.batch_size // config.execution.microbatches, blueprint_on(config)
    execution = on_mesh(build_execution(config, abstract_mesh(config.mesh)))
    stacks, mask = blueprint.shapes.stacks, blueprint.mask
    strategy = choose_dispatch(stacks, rows, config.seq_len, execution, "train", mask).strategy
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
