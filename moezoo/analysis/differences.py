"""The differences between two layouts: parameter by parameter, activation by activation, collective by collective."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from moezoo.analysis.sharding import Sharding


class Change(NamedTuple):
    """Rows of both layouts for the same thing, which differ; None where a layout does not have it."""

    this: Any
    against: Any


class Differences(NamedTuple):
    """What differs, in the order of both layouts. `same` counts the rows that do not."""

    parameters: tuple[Change, ...]
    activations: tuple[Change, ...]
    collectives: tuple[Change, ...]
    same: tuple[int, int, int]


def compare(this: Sharding, against: Sharding) -> Differences:
    """Return the differences. Collectives are the same thing if scope, operation and mesh axes agree."""
    name = lambda row: row.name  # noqa: E731
    keys = (name, name, lambda row: (row.scope, row.op, row.mesh_axes))
    changes = [_changes(*rows, key) for *rows, key in zip(this, against, keys, strict=True)]
    collectives = sorted(changes[2], key=lambda change: keys[2](change.this or change.against))
    unchanged = [len(rows) - sum(c.this is not None for c in each) for rows, each in zip(this, changes, strict=True)]
    return Differences(changes[0], changes[1], tuple(collectives), tuple(unchanged))


def _changes(this: Sequence[Any], against: Sequence[Any], key: Callable[[Any], Hashable]) -> tuple[Change, ...]:
    here, there = ({key(row): row for row in rows} for rows in (this, against))
    pairs = (Change(here.get(each), there.get(each)) for each in {**here, **there})
    return tuple(change for change in pairs if change.this != change.against)
