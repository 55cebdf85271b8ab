"""Where a parameter lies on the mesh: made once from its annotation, the rules and the mesh, and read by all others."""

import dataclasses
import itertools
import math

from jax.sharding import PartitionSpec

from moezoo.parallel.axes import Axes, Role
from moezoo.parallel.collectives import MeshAxes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Of one parameter: its `axes`, and dimension by dimension the mesh axes of more than one device it is

    - `stored` over, major to minor;
    - `gathered` over where its layer runs: the minor ones of those, all where nothing of the dimension stays split.

    `ways`: the number of devices that store different parts of it.
    """

    axes: Axes
    stored: tuple[MeshAxes, ...]
    gathered: tuple[MeshAxes, ...]
    ways: int

    @property
    def mesh_axes(self) -> MeshAxes:
        """All mesh axes it is stored over."""
        return tuple(itertools.chain(*self.stored))

    @property
    def spec(self) -> PartitionSpec:
        """Its layout for JAX."""
        return PartitionSpec(*(axes or None for axes in self.stored))

    def local_size(self, shape: tuple[int, ...]) -> int:
        """Numbers on one device of a parameter of that global shape."""
        return math.prod(shape) // self.ways


# Of scalars that every device has.
EVERYWHERE = Placement(Axes(Role.BUFFER, (), (), ()), (), (), 1)
