"""Rules: a layout as data. One short YAML file in `conf/rules/` describes one layout completely."""

import dataclasses
import math
from collections.abc import Mapping

from moezoo.errors import UserError, nearest
from moezoo.parallel.axes import LOGICAL_AXES, Axes, Role
from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.mesh import AXES, STAGE
from moezoo.parallel.placement import Placement
from moezoo.typed import check_fields, show

# Inner dimensions of layers. Each pair must stay split over the same mesh axes: query heads meet their key heads, and
# the results of routed and shared experts are summed over devices together.
_PAIRS = (("heads", "kv_heads"), ("mlp", "expert_mlp"))
# Axes that are split as another one: the results of all mixers are summed over the devices that share heads.
_AS = dict.fromkeys(("key_heads", "value_heads", "state_groups", "state_heads", "channels"), "heads")
_INNER = (*_PAIRS[0], *_PAIRS[1], "vocab")
# Logical axes that a layer can compute on without gathering them first.
_KEPT = ("expert", *_INNER)
# The logical axis that only pipeline stages split.
_LAYER = "layer"


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layout: which mesh axes split parameters and tokens.

    A dimension is gathered, where its layer runs, over the axes in `store` that are not in `compute`.

    Attributes:
        name: The name of the layout, for messages.
        store: Logical axis -> the mesh axes that the dimension is stored over, major to minor. `layer` is stored over
            `stage`, if each stage can have its own layers; where it cannot, and in all other parameters, the other
            dimensions that name `stage` are stored over it too.
        compute: Logical axis -> the mesh axes that the dimension stays split over while computing. They must be the
            first ones of `store`.
        batch: The mesh axes that split the batch.
        sequence: The mesh axes that split the sequence.

    Raises:
        UserError: A field has a wrong type, a name does not exist, a mesh axis is used twice, `layer` is split over
            another axis than `stage`, `stage` splits tokens or what computes, or comes before another axis, `compute`
            does not begin `store`, or an inner dimension (heads, widths, vocabulary) stays split over axes
            that split tokens or experts, or over other axes than the one that it meets.
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
                if logical in _AS:
                    raise UserError(
                        f"rules.{field}.{logical}: recurrent layers split {logical} as rules.{field}.{_AS[logical]} "
                        "says, because results of all mixers are summed over devices together; leave it out"
                    )
                self._check_axes(f"rules.{field}.{logical}", axes)
                if logical == _LAYER and axes not in ((), (STAGE,)):
                    raise UserError(
                        f"rules.{field}.layer={show(axes)}: only pipeline stages have layers of their own; write "
                        "[stage], and store another dimension over the other axes, such as embed"
                    )
                # Devices along the other axes exchange blocks that are next to each other.
                if STAGE in axes[:-1]:
                    raise UserError(
                        f"rules.{field}.{logical}={show(axes)}: stage must be the last of several axes; move it there"
                    )
        for field, axes in (("batch", self.batch), ("sequence", self.sequence)):
            self._check_axes(f"rules.{field}", axes)
            if STAGE in axes:
                raise UserError(
                    f"rules.{field}={show(axes)} names stage, along which devices have different micro-batches "
                    "already; leave it out"
                )
        for axis in set(self.batch) & set(self.sequence):
            raise UserError(f"rules.batch and rules.sequence both name mesh axis '{axis}'; leave it in one of them")
        for logical, kept in self.compute.items():
            stored = self.store.get(logical, ())
            if STAGE in kept:
                raise UserError(
                    f"rules.compute.{logical}={show(kept)}: no dimension stays split over stages, which run different "
                    "layers; leave stage out"
                )
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
        self._check_inner()

    def _check_inner(self) -> None:
        """Check the inner dimensions, over whose axes devices must have the same tokens and the same experts."""
        others = {"rules.batch": self.batch, "rules.sequence": self.sequence}
        others["rules.compute.expert"] = self.compute.get("expert", ())
        for logical in _INNER:
            kept = self.compute.get(logical, ())
            for key, axes in others.items():
                for axis in (axis for axis in kept if axis in axes):
                    raise UserError(
                        f"rules.compute.{logical}={show(kept)} and {key}={show(axes)} both name mesh axis '{axis}', "
                        f"but devices that split '{logical}' must have the same tokens and experts; "
                        f"take '{axis}' out of {key}, or keep '{logical}' split over an axis that is not in it"
                    )
        for one, other in _PAIRS:
            kept, expected = (self.compute.get(logical, ()) for logical in (other, one))
            if kept != expected:
                raise UserError(
                    f"rules.compute.{other}={show(kept)} differs from rules.compute.{one}={show(expected)}; "
                    "name the same mesh axes in both"
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

    def kept(self, logical: str, sizes: Mapping[str, int]) -> MeshAxes:
        """Return the mesh axes of more than one device that a logical axis stays split over while computing."""
        return live(self.compute.get(_AS.get(logical, logical), ()), sizes)

    def inner_axes(self, sizes: Mapping[str, int]) -> MeshAxes:
        """Return the mesh axes of more than one device that heads, widths or the vocabulary stay split over."""
        return tuple(dict.fromkeys(axis for logical in _INNER for axis in self.kept(logical, sizes)))

    def shared(self, axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return which logical axes of a parameter every device stores whole and takes a part of: `kv_heads`, or none.

        With 2 key-value heads on 4 devices, devices 0 and 1 compute on head 0, and devices 2 and 3 on head 1. So it is
        wherever heads are fewer than the devices that split them, and divide their number. `shape` is the global one.
        """
        ways = math.prod(sizes[axis] for axis in self.kept("kv_heads", sizes))
        sizes_of = zip(axes.names, shape, strict=True)
        return tuple(name for name, size in sizes_of if name == "kv_heads" and size < ways and ways % size == 0)

    def placement(
        self,
        axes: Axes,
        sizes: Mapping[str, int],
        *,
        whole: tuple[str, ...] = (),
        shared: tuple[str, ...] = (),
        by_layer: bool = False,
    ) -> Placement:
        """Return where a parameter is stored, and over which mesh axes it is gathered.

        A buffer is stored whole on every device: it is small, and a step updates it from numbers that all devices have.

        Args:
            axes: The parameter's role and logical axes.
            sizes: Mesh axis -> number of devices.
            whole: Logical axes that are gathered completely, `compute` notwithstanding.
            shared: Logical axes that every device stores whole and takes its part of (`Rules.shared`).
            by_layer: Whether each stage stores its own layers.
        """
        buffer = axes.role is Role.BUFFER
        unsplit = axes.names if buffer else shared
        stored = tuple(() if name in unsplit else self._stored(name, sizes, by_layer) for name in axes.names)
        kept = tuple(() if name in whole else self.kept(name, sizes) for name in axes.names)
        # A stage runs the layers that it stores.
        whose = zip(axes.names, stored, kept, strict=True)
        gathered = tuple(() if name == _LAYER else s[len(k) :] for name, s, k in whose)
        taken = tuple(k if name in shared else () for name, k in zip(axes.names, kept, strict=True))
        split = {axis for name in set(axes.within) & {*_INNER, *_AS} for axis in self.kept(name, sizes)}
        entered = tuple(sorted(split.difference(*kept)))
        ways = math.prod(sizes[axis] for dim in stored for axis in dim)
        return Placement(axes, stored, gathered, ways, taken, entered)

    def _stored(self, logical: str, sizes: Mapping[str, int], by_layer: bool) -> MeshAxes:
        axes = live(self.store.get(_AS.get(logical, logical), ()), sizes)
        return axes if by_layer == (logical == _LAYER) else tuple(axis for axis in axes if axis != STAGE)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Refuse a mesh, mesh axis -> number of devices, on which devices would compute the same or miss experts.

        Raises:
            UserError: An axis of more than one device is not named here, or tokens are split over some of the axes that
                experts are split over.
        """
        for axis, size in sizes.items():
            if size > 1 and axis not in self.mesh_axes:
                raise UserError(
                    f"mesh.{axis}={size} but rules {self.name} name no axis '{axis}', so its {size} devices "
                    f"would all do the same; set mesh.{axis}=1 or name it in the rules"
                )
        experts, tokens = self.kept("expert", sizes), (*self.batch, *self.sequence)
        split, whole = (tuple(axis for axis in experts if (axis in tokens) is inside) for inside in (True, False))
        if split and whole:
            raise UserError(
                f"rules {self.name}: experts stay split over {show(experts)} (rules.compute.expert), and tokens "
                f"are split over {show(split)} of these but not over {show(whole)}; name all of them in rules.batch "
                "and rules.sequence, or none"
            )

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
                if placement.axes.role is Role.FROZEN:
                    of_scales = "give blocks smaller pieces with moezoo.nn.few_bits.cut_pieces(model, execution), or "
                    raise UserError(
                        f"{mesh} splits '{logical}' {ways} ways but {name} has {size} entries along it; "
                        f"{of_scales if name.endswith('.scale') else ''}choose a mesh whose "
                        f"{' x '.join(mesh_axes)} divides {size}, or rules that do not split '{logical}'"
                    )
                shares = " or is a multiple of it" * bool(logical == "kv_heads" and self.kept(logical, sizes))
                raise UserError(
                    f"{mesh} splits '{logical}' {ways} ways but {LOGICAL_AXES[logical]}={size} "
                    f"({name}{', which all stages store together' * (STAGE in mesh_axes and logical != 'layer')}); "
                    f"choose a mesh whose {' x '.join(mesh_axes)} divides {size}{shares}"
                )


def live(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of more than one device. Collectives name only these: XLA keeps collectives over one device."""
    return tuple(a for a in axes if sizes.get(a, 1) > 1)
