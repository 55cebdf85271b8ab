"""What a configuration stores, computes and moves on each device of a mesh, without the devices.

Two configurations are compared parameter by parameter, activation by activation, collective by collective.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from moezoo.config.build import blueprint_on, build_execution
from moezoo.config.settings import TrainConfig, check_config
from moezoo.generation.generate import Continued
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.mesh import abstract_mesh, no_context_mesh
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import TrafficTable
from moezoo.profiling.hlo import COLLECTIVES
from moezoo.tools.calls import CALLS, CallName
from moezoo.tools.sharding.activations import ActivationRow, Spec, activations, cache_rows
from moezoo.typed import convert

# The collectives of JAX -> the operations of compiled programs.
_OPS = {ours: op for op, ours in COLLECTIVES.items() if op != "collective-broadcast"}
_OPS |= {"pmax": "all-reduce", "pmin": "all-reduce"}


class ParameterRow(NamedTuple):
    """How one array of the model is stored.

    Attributes:
        name: Its path, which the patterns of `trained` and `frozen` match.
        axes: Its logical axes, in order.
        spec: For each dimension, the mesh axes that it is split over, major to minor.
        shape: The shape of the whole array.
        local_shape: The shape of a device's part.
        bytes_per_device: The bytes of that part.
        trained: Whether a training step changes it by its gradient; never for buffers.
    """

    name: str
    axes: tuple[str, ...]
    spec: Spec
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes_per_device: int
    trained: bool


class CollectiveRow(NamedTuple):
    """All collectives of one operation that one part of a program runs over the same mesh axes.

    Attributes:
        op: The operation, by its name in compiled programs, such as "all-gather".
        mesh_axes: The mesh axes, in the order in which blocks are concatenated; for all-reduce in alphabetical order.
        count: How often they run in one call of the program.
        bytes: What one device receives from all of them (`moezoo.parallel.traffic.received_bytes`).
        scope: The part of the program, by its `jax.named_scope`s.
    """

    op: str
    mesh_axes: MeshAxes
    count: int
    bytes: int
    scope: str


class MemoryRow(NamedTuple):
    """What a device holds besides activations, and the bytes of it. The last of several rows is their sum, `all`."""

    name: str
    bytes_per_device: int


class Sharding(NamedTuple):
    """The rows of a configuration: every parameter, the main activations, every collective with the most bytes first.

    `memory`: parameters; in training gradients and the optimizer's state, in generation the cache; and their sum.
    Activations are those of one pass through the layers: of a micro-step, where there are several.
    """

    parameters: tuple[ParameterRow, ...]
    activations: tuple[ActivationRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()


def describe(
    cfg: TrainConfig,
    call: CallName = "train",
    *,
    parts: Literal["all", "parameters"] = "all",
    blueprint: Blueprint | None = None,
) -> Sharding:
    """Return what each device stores, computes and receives. No device is used.

    | `call` | the program |
    |---|---|
    | `train` | a training step, optimiser included |
    | `evaluate` | one batch of an evaluation |
    | `prefill` | the reading of `batch_size` prompts of `seq_len` tokens, padded to a rounded length |
    | `decode` | one more token of each of these rows |

    Collectives are those of the program as it is traced for an accelerator, before a compiler changes it.

    Args:
        cfg: The configuration.
        call: What runs.
        parts: "parameters" traces nothing: the other lists are empty.
        blueprint: As in `moezoo.training.build.build_step`.

    Raises:
        UserError: The parts of the configuration do not fit together, or a mesh axis is -1.
    """
    check_config(cfg)
    convert(CallName, call, "call")
    convert(Literal["all", "parameters"], parts, "parts")
    blueprint = blueprint_on(cfg, given=blueprint)
    if parts == "parameters":
        execution = build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")
        return Sharding(_parameters(blueprint, on_mesh(execution)))
    with no_context_mesh():
        program = CALLS[call](cfg, blueprint)
        traced = program.trace()
    traffic = collective_traffic(traced.jaxpr, "tpu")
    parameters = _parameters(blueprint, program.execution)
    memory = dict(program.memory)
    if isinstance(traced.out_info, Continued):
        rows = cache_rows(blueprint.shapes, traced.out_info.cache, program.execution)
        memory["cache"] = sum(row.bytes_per_device for row in rows)
    held = tuple(MemoryRow(*item) for item in (*memory.items(), ("all", sum(memory.values()))))
    arrays = activations(cfg, blueprint.shapes, program, traffic)
    return Sharding(parameters, arrays, collectives(traffic), held)


def collectives(traffic: TrafficTable) -> tuple[CollectiveRow, ...]:
    """Return the rows of a traced program, summed over phases."""
    found: dict[tuple[str, str, MeshAxes], tuple[int, int]] = {}
    for (scope, kind, axes), (count, received) in traffic.by("scope", "collective", "axes").items():
        before = found.get(key := (scope, _OPS[kind], axes), (0, 0))
        found[key] = before[0] + count, before[1] + received
    rows = [CollectiveRow(op, axes, *numbers, scope) for (scope, op, axes), numbers in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.scope, row.op, row.mesh_axes)))


def _parameters(blueprint: Blueprint, execution: MeshExecution) -> tuple[ParameterRow, ...]:
    rows = []
    arrays = jax.tree_util.tree_leaves_with_path(blueprint.shapes)
    placements, mask = jax.tree.leaves(execution.placements(blueprint.shapes)), jax.tree.leaves(blueprint.mask)
    for (path, array), placement, learns in zip(arrays, placements, mask, strict=True):
        local = tuple(size // execution.ways(over) for size, over in zip(array.shape, placement.stored, strict=True))
        stored = placement.local_size(array.shape) * array.dtype.itemsize
        name = jax.tree_util.keystr(path)
        rows.append(ParameterRow(name, placement.axes.names, placement.stored, array.shape, local, stored, learns))
    return tuple(rows)


class Change(NamedTuple):
    """Rows of both layouts for the same thing, which differ; None where a layout does not have it."""

    this: Any
    against: Any


class Differences(NamedTuple):
    """What differs; collectives are sorted by scope. `same` counts the rows of each kind that do not differ."""

    parameters: tuple[Change, ...]
    activations: tuple[Change, ...]
    collectives: tuple[Change, ...]
    memory: tuple[Change, ...]
    same: tuple[int, ...]


def find_differences(this: Sharding, against: Sharding) -> Differences:
    """Return the differences. Collectives are the same thing if scope, operation and mesh axes agree."""
    parameters = _changes(this.parameters, against.parameters, lambda row: row.name)
    activations = _changes(this.activations, against.activations, lambda row: row.name)
    collectives = _changes(this.collectives, against.collectives, _key)
    ordered = sorted(collectives, key=lambda change: _key(change.this or change.against))
    memory = _changes(this.memory, against.memory, lambda row: row.name)
    changes = (parameters, activations, tuple(ordered), memory)
    same = (len(rows) - sum(c.this is not None for c in each) for rows, each in zip(this, changes, strict=True))
    return Differences(*changes, tuple(same))


def _key(row: CollectiveRow) -> tuple[str, str, MeshAxes]:
    return row.scope, row.op, row.mesh_axes


def _changes(this: Sequence[Any], against: Sequence[Any], key: Callable[[Any], Hashable]) -> tuple[Change, ...]:
    here, there = ({key(row): row for row in rows} for rows in (this, against))
    pairs = (Change(here.get(each), there.get(each)) for each in {**here, **there})
    return tuple(change for change in pairs if change.this != change.against)
