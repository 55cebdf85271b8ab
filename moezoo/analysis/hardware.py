"""Chips, how they are linked, and the least time that the collectives of a program take on their links.

Figures are the makers' peaks, so that no program exceeds them. Sources: Google's pages of each TPU
(docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x), whose "bidirectional ICI bandwidth per chip" is that of all
links in both directions; "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) for one direction of a link and
for which dimensions are rings; NVIDIA's data sheets of A100, H100, H200 and DGX B200, without sparsity.

A slice is a grid of chips or nodes, with one or several devices in each. For every *cut* of the grid into blocks, what
enters the blocks passes the links between them. With B the bytes that a device receives in a row of a `TrafficTable`, n
the devices of a group, m the blocks that the group reaches into, and s the bytes per second that enter a device's share
of the links of a cut:

| collective | bytes per device that pass a cut |
|---|---|
| `all_gather`, `reduce_scatter`, `psum` on TPUs | B (m - 1) / (n - 1): each block needs every number, or adds to it, once |
| `psum` on GPUs | half of that, because switches can add (SHARP) |
| `all_to_all`, `ragged_all_to_all` on TPUs | B n / (n - 1) h, for h the mean hops between two of the group, itself too |
| the same on GPUs | B (n - n / m) / (n - 1): rows for other blocks |
| `ppermute`, once around a group | B m / n if m > 1: a round trip enters each block |

Seconds of a cut are the sum over all rows, divided by s. Cuts are, by the names of links:

| cut | blocks | s |
|---|---|---|
| `ICI x`, `ICI xy`, ... | the chips with the same coordinate in these torus dimensions | the sum over these dimensions |
| `ICI` | the chips: all dimensions of the torus | the sum over all dimensions |
| `ICI and D2D` | the devices, where a chip has two | all dimensions, and the link between both |
| `network` | the nodes | that of a GPU's adapter |
| `NVLink` | the GPUs | NVLink, and the adapter where there are several nodes |

A torus dimension of a chips adds 2 links of one direction where it is a ring, otherwise 2 (a - 1) / a, the mean over
its chips. Dimensions of the v5p and the tpu7x are rings if they are multiples of 4, those of the v5e and the v6e if they
are 16; twisted tori are not described. Mesh axes lie on a torus in the way that takes the least time of all in which
an axis is a product of parts of dimensions; JAX chooses one of these. On GPUs the last mesh axes lie within nodes.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moezoo.errors import UserError, nearest
from moezoo.parallel.traffic import TrafficTable


class Chip(NamedTuple):
    """One kind of chip. Numbers are per device of JAX, of which a tpu7x has two.

    Attributes:
        name: Its name in `topology=`.
        flops: Dense products in bfloat16, in FLOP/s.
        hbm_bytes: The size of its memory, in bytes.
        hbm_speed: The bytes per second that its memory reads or writes.
        link_speed: The bytes per second in one direction of one ICI link, or of NVLink.
        eight: The sizes of a slice of eight devices.
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
    devices: int = 1
    inner_speed: float = 0.0
    ring: int = 0
    network_speed: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return not self.ring


_GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 50e9, (2, 4), ring=16),
        Chip("v5p", 459e12, 95 * _GIB, 2765e9, 100e9, (2, 2, 2), ring=4),
        Chip("v6e", 918e12, 32 * _GIB, 1638e9, 100e9, (2, 4), ring=16),
        # Its two devices share six links of 100 GB/s; the link between them is six times as fast as one of these.
        Chip("tpu7x", 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 50e9, (2, 2, 1), devices=2, inner_speed=600e9, ring=4),
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
        sizes: The chips along each torus dimension; for GPUs the nodes, and the GPUs of each.
    """

    chip: Chip
    sizes: tuple[int, ...]

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
            UserError: The mesh has another number of devices, or an axis does not fit its nodes or torus.
        """


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
