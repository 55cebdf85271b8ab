"""The differences between two layouts: parameter by parameter, activation by activation, collective by collective."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from moezoo.parallel.collectives import MeshAxes
from moezoo.tools.sharding.describe import CollectiveRow, Sharding


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
