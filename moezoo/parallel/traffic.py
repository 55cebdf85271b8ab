"""What collectives bring a device: one definition, for what is predicted and for what a traced program says."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from moezoo.parallel.collectives import MeshAxes

# In a reduction the order of axes says nothing.
UNORDERED = ("pmax", "pmin", "psum")


def received_bytes(collective: str, given: int, ways: int) -> int:
    """Bytes that one of `ways` devices receives when each gives `given` bytes to a collective.

    `all_gather`: everybody else's part; `reduce_scatter`: as many partial sums of its own part, (ways - 1) / ways of
    what it gives; `all_to_all` and `ragged_all_to_all`, whose rows are taken as evenly spread: the same; `psum`, `pmax`
    and `pmin`: a reduce-scatter and an all-gather; `ppermute`: what one other gives. Fractions count as a byte.
    """
    if collective == "all_gather":
        return given * (ways - 1)
    if collective == "ppermute":
        return given
    parts = -(-given * (ways - 1) // ways)
    return 2 * parts if collective in UNORDERED else parts


class Move(NamedTuple):
    """A collective over `axes` of `ways` devices, to which each gives `numbers` values of `dtype`."""

    collective: str
    axes: MeshAxes
    ways: int
    numbers: int
    dtype: DTypeLike

    @property
    def received_bytes(self) -> int:
        """Bytes a device receives."""
        return received_bytes(self.collective, self.numbers * jnp.dtype(self.dtype).itemsize, self.ways)

    def back(self, dtype: DTypeLike | None = None) -> "Move":
        """How gradients travel, in `dtype` if theirs is another."""
        kind = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(self.collective, self.collective)
        numbers = {"reduce_scatter": self.numbers * self.ways, "all_gather": self.numbers // self.ways}
        return Move(kind, self.axes, self.ways, numbers.get(kind, self.numbers), dtype or self.dtype)


@dataclasses.dataclass(frozen=True)
class Moves:
    """Of a forward pass; what it repeats where it is rematerialised; of the backward pass."""

    forward: tuple[Move, ...] = ()
    again: tuple[Move, ...] = ()
    backward: tuple[Move, ...] = ()

    def __add__(self, other: "Moves") -> "Moves":
        return Moves(self.forward + other.forward, self.again + other.again, self.backward + other.backward)

    def of_a_step(self, *, again: bool) -> tuple[Move, ...]:
        """All that run in a training step, those that are repeated only if `again`."""
        return (*self.forward, *(self.again if again else ()), *self.backward)


class Traffic(NamedTuple):
    """How often a collective runs, and the bytes that a device receives by it in all."""

    count: int
    bytes: int


class TrafficTable(dict[tuple[str, MeshAxes], Traffic]):
    """`Traffic` by collective and mesh axes, in the order in which blocks are joined; alphabetical for sums."""

    def add(self, collective: str, axes: MeshAxes, count: int, each: int) -> None:
        """`count` runs more, of `each` bytes."""
        axes = tuple(sorted(axes)) if collective in UNORDERED else axes
        had = self.get((collective, axes), Traffic(0, 0))
        self[collective, axes] = Traffic(had.count + count, had.bytes + count * each)

    @property
    def bytes(self) -> int:
        """Of all together."""
        return sum(traffic.bytes for traffic in self.values())

    @property
    def count(self) -> int:
        """How many collectives run in all."""
        return sum(traffic.count for traffic in self.values())

    def __str__(self) -> str:
        lines = [("collective", "over", "times", "bytes")]
        ranked = sorted(self.items(), key=lambda item: -item[1].bytes)
        lines += [(kind, " ".join(axes), f"{t.count:,}", f"{t.bytes:,}") for (kind, axes), t in ranked]
        lines.append(("all", "", f"{self.count:,}", f"{self.bytes:,}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines
        )
