"""The bytes that the collectives of a training step bring to each device, read from the traced step.

Steps are traced on a mesh without devices, so any mesh will do.
"""

import dataclasses
from typing import Any

from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.models.blueprint import Blueprint
from moezoo.moe.dispatch import DispatchChoice
from moezoo.parallel.mesh import MeshShape, abstract_mesh
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
