"""Chips, how they are linked, and the least time that the collectives of a program take on their links.

Figures are the makers' peaks, so that no program exceeds them. Sources: Google's pages of each TPU
(docs.cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x), whose "bidirectional ICI bandwidth per chip" is that of all links
in both directions; "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) for one direction of a link, and for
the dimensions that are rings; NVIDIA's data sheets of A100, H100, H200, HGX and DGX B200, without sparsity.

A slice is a grid of chips or nodes, with one or several devices at each place. A *cut* divides its devices into blocks.
With B the bytes that a device receives in a row of a `TrafficTable`, n the devices of a group, m the blocks in which a
group has devices, and means taken over groups and devices, so much passes a cut per device:

| collective | bytes |
|---|---|
| `all_gather`, `reduce_scatter`, `psum` | B (m - 1) / (n - 1): what each block needs, or adds to a sum, passes once |
| `psum` on GPUs | B m / (2 (n - 1)) if m > 1: each block needs the sum, which switches can make (SHARP) |
| `all_to_all`, `ragged_all_to_all` on TPUs | B n / (n - 1) times the mean hops between two of the group |
| the same on GPUs | B n / (n - 1) times the share of pairs that are in two blocks |
| `ppermute` | B if m = n, because each device sends to another; otherwise perhaps nothing |

A pair may be a device and itself. Seconds of a cut are the sum over rows, divided by the speed of its links per device:

| cut | blocks | speed |
|---|---|---|
| `ICI x`, `ICI xy`, ... | the chips at the same place of these torus dimensions | that of these dimensions |
| `ICI` | the chips | that of all dimensions |
| `ICI and D2D` | the devices, where a chip has two | that of all dimensions and of the link in a chip |
| `network` | the nodes | that of a GPU's adapter |
| `NVLink` | the GPUs | NVLink's, and the adapter's where there are several nodes |

The speed of a torus dimension of a chips is that of 2 links in one direction if it is a ring, otherwise of
2 (a - 1) / a, the mean over chips. On v5p and tpu7x multiples of 4 are rings, on v5e and v6e 16; twisted tori are not
described. Meshes lie on a torus as `jax.experimental.mesh_utils.create_device_mesh` lays them, and on GPUs in order, so
that the last mesh axes lie within nodes. A program takes longer where links pause or data takes a detour.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.experimental.mesh_utils import create_device_mesh

from moezoo.errors import UserError, nearest
from moezoo.parallel.traffic import UNORDERED, TrafficTable


class Chip(NamedTuple):
    """One kind of chip. Numbers are per device of JAX, of which a tpu7x has two.

    Attributes:
        name: Its name in `topology=`.
        flops: Dense products in bfloat16, in FLOP/s.
        hbm_bytes: The size of its memory, in bytes.
        hbm_speed: The bytes per second that its memory reads or writes.
        link_speed: The bytes per second in one direction of one ICI link, or of NVLink.
        eight: The sizes of a slice of eight devices.
        kind: Its name in JAX; "" for GPUs, whose meshes do not depend on it.
        devices: The devices per chip.
        inner_speed: The bytes per second in one direction between the devices of a chip.
        ring: A torus dimension is a ring if it is a multiple of this.
        network_speed: The bytes per second in one direction of a GPU's network adapter; 0 on TPUs.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_speed: float
    link_speed: float
    eight: tuple[int, ...]
    kind: str = ""
    devices: int = 1
    inner_speed: float = 0.0
    ring: int = 0
    network_speed: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return not self.ring

    @property
    def setting(self) -> str:
        """The environment variable, as NAME=VALUE, with which JAX may take `usable_bytes`; empty on TPUs.

        Without it, JAX takes 0.75 of a GPU's memory. The rest of .95 is for CUDA itself and for NCCL.
        """
        return f"{_FRACTION}=.95" if self.is_gpu else ""

    @property
    def usable_bytes(self) -> int:
        """What JAX may take of its memory: all of a TPU's, and of a GPU's the share that `setting` sets."""
        return int(self.hbm_bytes * float(self.setting.partition("=")[2] or 1))

    @property
    def predicted_bytes(self) -> int:
        """The largest prediction that fits: a compiler may have more in use than was predicted."""
        return int(self.usable_bytes * LEAST_RATIO)


_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The smallest ratio of a prediction to what a compiler has in use (docs/planning.md).
LEAST_RATIO = 0.93
_GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 50e9, (2, 4), "TPU v5 lite", ring=16),
        Chip("v5p", 459e12, 95 * _GIB, 2765e9, 100e9, (2, 2, 2), "TPU v5", ring=4),
        Chip("v6e", 918e12, 32 * _GIB, 1638e9, 100e9, (2, 4), "TPU v6 lite", ring=16),
        # Its two devices share six links of 100 GB/s; the link between them is six times as fast as one of these.
        Chip(
            "tpu7x", 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 50e9, (2, 2, 1), "TPU7x", devices=2, inner_speed=600e9, ring=4
        ),
        # Adapters: one of 200 Gbit/s for an A100, of 400 Gbit/s for the others, as in NVIDIA's DGX machines.
        Chip("a100", 312e12, 80 * _GIB, 2.039e12, 300e9, (8,), network_speed=25e9),
        Chip("h100", 989.5e12, 80 * _GIB, 3.35e12, 450e9, (8,), network_speed=50e9),
        Chip("h200", 989.5e12, 150754820096, 4.8e12, 450e9, (8,), network_speed=50e9),
        Chip("b200", 2250e12, 180 * _GIB, 8e12, 900e9, (8,), network_speed=50e9),
    )
}


class Slice(NamedTuple):
    """Chips that are linked.

    Attributes:
        chip: Their kind.
        sizes: The chips along each torus dimension; of GPUs the nodes, and the GPUs per node.
    """

    chip: Chip
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes) * self.chip.devices

    def link_seconds(self, mesh: Mapping[str, int], traffic: TrafficTable) -> dict[str, float]:
        """Return cut -> the least seconds that its links are busy; the cuts are those of the module's tables.

        Args:
            mesh: Mesh axis -> number of devices, in the order of `moezoo.parallel.mesh.AXES`.
            traffic: The collectives of a call.

        Raises:
            UserError: The mesh has another number of devices.
        """
        if (count := math.prod(mesh.values())) != self.devices:
            raise UserError(f"topology={self} has {self.devices} devices and the mesh {count}; choose equal numbers")
        places, dims, found = places_of(self, tuple(mesh.values())), self._dims(), dict.fromkeys(self._cuts(), 0.0)
        for (collective, axes), each in traffic.by("collective", "axes").items():
            along = [number for number, axis in enumerate(mesh) if axis in axes]
            size = math.prod(places.shape[number] for number in along)
            groups = np.moveaxis(places, along, range(len(along))).reshape(size, -1, len(dims))
            for name, cut in self._cuts().items():
                passing = 0.0 if size == 1 else self._passing(collective, groups, cut) * each.bytes
                found[name] += passing / sum(dims[number].speed for number in cut)
        return found

    def _dims(self) -> "list[_Dim]":
        """Return the dimensions of the grid, and last that of the devices at one place."""
        chip = self.chip
        if chip.is_gpu:
            nodes, gpus = (1, *self.sizes)[-2:]
            return [_Dim("network", nodes, chip.network_speed * (nodes > 1)), _Dim("NVLink", gpus, chip.link_speed)]
        dims = []
        for name, size in zip("xyz", self.sizes, strict=False):
            is_ring = size % chip.ring == 0
            links = 2 if is_ring else 2 * (size - 1) / size
            dims.append(_Dim(name, size, links * chip.link_speed, is_ring))
        return [*dims, _Dim("D2D", chip.devices, chip.inner_speed)]

    def _cuts(self) -> dict[str, tuple[int, ...]]:
        """Return the dimensions that each cut is through.

        Blocks are whole chips or nodes, or single devices: devices at the same place of several chips are none, because
        data can pass between them by way of another chip.
        """
        *grid, inner = self._dims()
        long = tuple(number for number, dim in enumerate(grid) if dim.size > 1)
        cuts = {}
        for cut in itertools.chain(*(itertools.combinations(long, length + 1) for length in range(len(long)))):
            name = "" if cut == long else " " + "".join(grid[number].name for number in cut)
            cuts["network" if self.chip.is_gpu else f"ICI{name}"] = cut
        if inner.size > 1:
            cuts["NVLink" if self.chip.is_gpu else "ICI and D2D"] = (*long, len(grid))
        return cuts

    def _passing(self, collective: str, groups: np.ndarray, cut: tuple[int, ...]) -> float:
        """Return what passes a cut per byte received; `groups` are the places [devices of a group, groups, dims]."""
        devices, dims = len(groups), self._dims()
        block = np.sort(np.ravel_multi_index(tuple(groups[..., cut].T), [dims[number].size for number in cut]))
        blocks = 1 + (np.diff(block) != 0).sum(-1)  # of each group
        if collective == "ppermute":
            return float((blocks == devices).mean())
        if collective in ("all_to_all", "ragged_all_to_all"):
            if self.chip.is_gpu:
                hops = 1 - (block[:, :, None] == block[:, None]).mean()
            else:
                hops = sum(dims[number].mean_hops(groups[..., number]) for number in cut)
            return float(devices / (devices - 1) * hops)
        if self.chip.is_gpu and collective in UNORDERED:  # each block receives the sum at least
            return float(np.where(blocks > 1, blocks, 0).mean()) / (devices - 1) / 2
        return float((blocks - 1).mean()) / (devices - 1)


class _Dim(NamedTuple):
    """A dimension of a grid: how many places it has, and the bytes per second that enter a device's share of links."""

    name: str
    size: int
    speed: float
    is_ring: bool = False

    def mean_hops(self, groups: np.ndarray) -> float:
        """Return the mean hops between two devices of a group, each with itself too, by their places [n, groups]."""
        far = np.abs(np.subtract.outer(range(self.size), range(self.size)))
        far = np.minimum(far, self.size - far) if self.is_ring else far
        share = (groups[..., None] == np.arange(self.size)).mean(0)  # [groups, places]
        return float(np.einsum("gi,gj,ij", share, share, far)) / len(share)


@dataclasses.dataclass(frozen=True)  # NumPy would take a tuple for a row of an array
class _Device:
    """What JAX reads of a device to lay a mesh on a torus."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


@functools.lru_cache(maxsize=16)
def places_of(where: Slice, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the place in the grid of each device of a mesh, an array [*sizes, dims].

    The last of `dims` numbers the devices of a chip, or the GPUs of a node.
    """
    grid = [dim.size for dim in where._dims()]
    if where.chip.is_gpu:
        return np.moveaxis(np.indices(grid), 0, -1).reshape(*sizes, len(grid))
    *torus, cores = grid
    # As JAX lists the devices of a slice: x changes fastest, after the devices of a chip.
    numbers = enumerate(itertools.product(*map(range, (*reversed(torus), cores))))
    devices = [_Device(number, (*reversed(place), 0)[:3], core, where.chip.kind) for number, (*place, core) in numbers]
    mesh = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    places = [(*device.coords[: len(grid) - 1], device.core_on_chip) for device in mesh.flat]
    return np.asarray(places).reshape(*sizes, len(grid))


def parse_slice(text: str) -> Slice:
    """Return the slice that `topology=` names.

    | text | the slice |
    |---|---|
    | `v5p:8x8x8`, `v5e:4x8`, `tpu7x:4x4x4` | the chips along each torus dimension |
    | `h200:8` | one node of 8 GPUs |
    | `h200:16x8` | 16 nodes of 8 GPUs |
    | `v5p`, `h200` | 8 devices |

    Raises:
        UserError: The kind is unknown, or the sizes are not those of such a slice.
    """
    kind, colon, numbers = text.partition(":")
    if kind not in CHIPS:
        raise UserError(f"topology={text}: no chip '{kind}'; {nearest(kind, CHIPS)}")
    chip = CHIPS[kind]
    if not colon:
        return Slice(chip, chip.eight)
    most = 2 if chip.is_gpu else len(chip.eight)
    per_node = 72 if kind == "b200" else 8
    sizes = tuple(map(int, numbers.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", numbers) else ()
    if not (1 if chip.is_gpu else most) <= len(sizes) <= most:
        what = "NODESxGPUS or GPUS" if chip.is_gpu else "chips along each torus dimension"
        example = "16x8" if chip.is_gpu else "x".join(map(str, chip.eight))
        raise UserError(f"topology={text}: {kind} takes {what}, such as {kind}:{example}")
    if chip.is_gpu and max(sizes[-1:]) > per_node:
        nodes = f"{kind}:{-(-math.prod(sizes) // per_node)}x{per_node}"
        raise UserError(f"topology={text}: a node has at most {per_node} {kind}; write nodes x GPUs, such as {nodes}")
    return Slice(chip, sizes)
