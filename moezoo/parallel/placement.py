"""Where a parameter is stored on the mesh, computed once from its annotation, the rules and the mesh."""

import dataclasses
import itertools
import math

from jax.sharding import PartitionSpec

from moezoo.parallel.axes import Axes, Role
from moezoo.parallel.collectives import MeshAxes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter is stored. Mesh axes of one device appear nowhere.

    Attributes:
        axes: The parameter's role and logical axes.
        stored: For each dimension, the mesh axes that it is split over, major to minor.
        gathered: For each dimension, the mesh axes that its layer gathers it over: the last ones of `stored`, or all.
        ways: The number of devices that store different parts.
        taken: With 2 key-value heads on 4 devices, all of them store both heads; devices 0 and 1 use head 0, devices
            2 and 3 use head 1. For each dimension, the mesh axes along which devices take parts of what all of them
            store: as many parts as the dimension is long, the same one on devices next to each other. Empty for none.
        entered: For an array of a container, or a bias of partial sums, the mesh axes that split the weight while
            computing and not this array.
    """

    axes: Axes
    stored: tuple[MeshAxes, ...]
    gathered: tuple[MeshAxes, ...]
    ways: int
    taken: tuple[MeshAxes, ...] = ()
    entered: MeshAxes = ()

    @property
    def mesh_axes(self) -> MeshAxes:
        """All mesh axes that the parameter is split over."""
        return tuple(itertools.chain(*self.stored))

    @property
    def gathered_first(self) -> int | None:
        """The dimension that comes first in the gathered array: that of experts' matrices, if it is the only one.

        None where dimensions stay in order (`moezoo.parallel.stacks`).
        """
        dims = [dim for dim, axes in enumerate(self.gathered) if axes]
        experts = self.axes.is_matrix and self.axes.stacked == ("expert",) and len(self.axes.names) == 3
        return dims[0] if experts and dims in ([1], [2]) else None

    @property
    def spec(self) -> PartitionSpec:
        """The layout as JAX's `PartitionSpec`."""
        return PartitionSpec(*(axes or None for axes in self.stored))

    def local_size(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers each device stores of a parameter of this global shape."""
        return math.prod(shape) // self.ways


# The placement of a scalar that every device stores.
EVERYWHERE = Placement(Axes(Role.BUFFER, (), (), ()), (), (), 1)
