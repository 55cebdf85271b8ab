"""Rules: a layout as data. Which mesh axes store, compute and split what; one short YAML file is the whole truth."""

import dataclasses
import math
from collections.abc import Mapping

from moezoo.convert import show
from moezoo.errors import UserError, nearest
from moezoo.parallel.axes import LOGICAL_AXES, Axes, Role
from moezoo.parallel.mesh import AXES
from moezoo.parallel.placement import Placement

# What a layer can compute on without gathering it first.
_KEPT = ("expert",)


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layout.

    - `store`: logical axis -> mesh axes the dimension is stored over, major to minor;
    - `compute`: logical axis -> mesh axes it stays split over while computing, a prefix of the stored ones (what is
      stored and not computed is gathered);
    - `batch`, `sequence`: mesh axes that split the two dimensions of tokens.

    Raises `UserError` for names that do not exist, a mesh axis used twice, and a `compute` that is no prefix of
    `store`.
    """

    name: str
    store: Mapping[str, tuple[str, ...]]
    compute: Mapping[str, tuple[str, ...]]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]

    def __post_init__(self):
        for field, table in (("store", self.store), ("compute", self.compute)):
            for logical, axes in table.items():
                if logical not in LOGICAL_AXES:
                    raise UserError(f"rules.{field}.{logical}: no such logical axis; {nearest(logical, LOGICAL_AXES)}")
                self._check_axes(f"rules.{field}.{logical}", axes)
                if logical == "layer" and axes:
                    raise UserError(
                        f"rules.{field}.layer={show(axes)}: layers run one after the other on every device and are "
                        "stored whole; store another dimension over these axes, such as embed"
                    )
        for field, axes in (("batch", self.batch), ("sequence", self.sequence)):
            self._check_axes(f"rules.{field}", axes)
        for axis in set(self.batch) & set(self.sequence):
            raise UserError(f"rules.batch and rules.sequence both name mesh axis '{axis}'; leave it in one of them")
        for logical, kept in self.compute.items():
            stored = self.store.get(logical, ())
            if kept and logical not in _KEPT:
                raise UserError(
                    f"rules.compute.{logical}: only {', '.join(_KEPT)} can stay split while computing; leave it out"
                )
            # Any other order gathers blocks that do not lie next to each other: experts would be silently permuted.
            if tuple(kept) != tuple(stored[: len(kept)]):
                raise UserError(
                    f"rules.compute.{logical}={show(kept)} must come first in rules.store.{logical}={show(stored)}; "
                    "reorder rules.store so that what stays split is on the left"
                )

    @staticmethod
    def _check_axes(key: str, axes: tuple[str, ...]) -> None:
        for axis in axes:
            if axis not in AXES:
                raise UserError(f"{key} names mesh axis '{axis}', which does not exist; {nearest(axis, AXES)}")
            if axes.count(axis) > 1:
                raise UserError(f"{key}={show(axes)} names mesh axis '{axis}' twice; name it once")

    def __hash__(self) -> int:  # mappings do not hash; a layout is a key of jit's cache
        tables = [tuple(sorted((k, tuple(v)) for k, v in t.items())) for t in (self.store, self.compute)]
        return hash((self.name, *tables, tuple(self.batch), tuple(self.sequence)))

    @property
    def mesh_axes(self) -> set[str]:
        """Every mesh axis that the rules name."""
        return {a for axes in (*self.store.values(), self.batch, self.sequence) for a in axes}

    def placement(self, axes: Axes, sizes: Mapping[str, int], *, whole: tuple[str, ...] = ()) -> Placement:
        """Where a parameter of these axes lies on a mesh of these axis sizes.

        What is stored and not computed is gathered; dimensions of the logical axes `whole` are gathered altogether.
        Buffers are whole on every device: a step moves them by figures that all devices have, and they are small.
        """
        buffer = axes.role is Role.BUFFER
        stored = tuple(() if buffer else live(self.store.get(name, ()), sizes) for name in axes.names)
        kept = tuple(() if name in whole else live(self.compute.get(name, ()), sizes) for name in axes.names)
        gathered = tuple(s[len(k) :] for s, k in zip(stored, kept, strict=True))
        return Placement(axes, stored, gathered, math.prod(sizes[axis] for dim in stored for axis in dim))

    def check_parameter(
        self, name: str, placement: Placement, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> None:
        """Refuse a parameter that cannot be stored as its placement by these rules says.

        Raises `UserError` where two logical axes of the array share a mesh axis, or a size is not divisible.
        """
        owner: dict[str, str] = {}
        for logical, mesh_axes, size in zip(placement.axes.names, placement.stored, shape, strict=True):
            for axis in mesh_axes:
                if axis in owner:
                    raise UserError(
                        f"rules {self.name}: parameter {name} has logical axes '{owner[axis]}' and '{logical}' "
                        f"both stored over mesh axis '{axis}'; "
                        f"take it from rules.store.{owner[axis]} or rules.store.{logical}"
                    )
                owner[axis] = logical
            ways = math.prod(sizes[axis] for axis in mesh_axes)
            if size % ways:
                mesh = " ".join(f"mesh.{a}={sizes[a]}" for a in mesh_axes)
                raise UserError(
                    f"{mesh} splits '{logical}' {ways} ways but {LOGICAL_AXES[logical]}={size} ({name}); "
                    f"choose a mesh whose {' x '.join(mesh_axes)} divides {size}"
                )


def live(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of more than one device: XLA keeps collectives over single devices, so we never name those."""
    return tuple(a for a in axes if sizes.get(a, 1) > 1)
