"""Rules: a layout as data. One short YAML file in `conf/rules/` describes one layout completely."""

import dataclasses
import math
from collections.abc import Mapping

from moezoo.convert import check_fields, show
from moezoo.errors import UserError, nearest
from moezoo.parallel.axes import LOGICAL_AXES, Axes, Role
from moezoo.parallel.mesh import AXES
from moezoo.parallel.placement import Placement

# Logical axes that a layer can compute on without gathering them first.
_KEPT = ("expert",)


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layout: which mesh axes split parameters and tokens.

    A dimension is gathered, where its layer runs, over the axes in `store` that are not in `compute`.

    Attributes:
        name: The name of the layout, for messages.
        store: Logical axis -> the mesh axes that the dimension is stored over, major to minor.
        compute: Logical axis -> the mesh axes that the dimension stays split over while computing. They must be the
            first ones of `store`.
        batch: The mesh axes that split the batch.
        sequence: The mesh axes that split the sequence.

    Raises:
        UserError: A field has a wrong type, a name does not exist, a mesh axis is used twice, `layer` is split, or
            `compute` does not begin `store`.
    """

    name: str
    store: Mapping[str, tuple[str, ...]]
    compute: Mapping[str, tuple[str, ...]]
    batch: tuple[str, ...]
    sequence: tuple[str, ...]

    def __post_init__(self):
        check_fields("rules", self)
        if not self.name.isprintable():
            raise UserError(f"rules.name={show(self.name)} has characters that cannot be printed; write letters")
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
            # Any other order would gather blocks that are not adjacent, and silently permute experts.
            if kept != stored[: len(kept)]:
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

    def __hash__(self) -> int:  # the generated hash fails on mappings; an Execution must be hashable for jit
        tables = [tuple(sorted(table.items())) for table in (self.store, self.compute)]
        return hash((self.name, *tables, self.batch, self.sequence))

    @property
    def mesh_axes(self) -> set[str]:
        """All mesh axes that the rules name."""
        return {a for axes in (*self.store.values(), self.batch, self.sequence) for a in axes}

    def placement(self, axes: Axes, sizes: Mapping[str, int], *, whole: tuple[str, ...] = ()) -> Placement:
        """Return where a parameter is stored, and over which mesh axes it is gathered.

        A buffer is stored whole on every device: it is small, and a step updates it from numbers that all devices have.

        Args:
            axes: The parameter's role and logical axes.
            sizes: Mesh axis -> number of devices.
            whole: Logical axes that are gathered completely, `compute` notwithstanding.
        """
        buffer = axes.role is Role.BUFFER
        stored = tuple(() if buffer else live(self.store.get(name, ()), sizes) for name in axes.names)
        kept = tuple(() if name in whole else live(self.compute.get(name, ()), sizes) for name in axes.names)
        gathered = tuple(s[len(k) :] for s, k in zip(stored, kept, strict=True))
        return Placement(axes, stored, gathered, math.prod(sizes[axis] for dim in stored for axis in dim))

    def check_parameter(
        self, name: str, placement: Placement, shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> None:
        """Refuse a parameter that cannot be stored as its placement requires.

        Args:
            name: The parameter's path, for messages.
            placement: Its placement by these rules.
            shape: Its global shape.
            sizes: Mesh axis -> number of devices.

        Raises:
            UserError: Two dimensions are stored over the same mesh axis, or a size is not divisible by its devices.
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
    """Return the axes of more than one device. Collectives name only these: XLA keeps collectives over one device."""
    return tuple(a for a in axes if sizes.get(a, 1) > 1)
