"""What collectives bring a device: one definition, for what is predicted and for what a traced program says."""

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from moezoo.parallel.collectives import MeshAxes

# In a reduction the order of axes says nothing.
UNORDERED = ("pmax", "pmin", "psum")

# What computes first, what rematerialisation repeats, what gradients take; and what runs outside of differentiation, as
# gradients' sums do.
Phase = Literal["forward", "again", "backward", "outside"]


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

    def phases(self, *, again: bool) -> dict[Phase, tuple[Move, ...]]:
        """All that run in a training step, those that are repeated only if `again`."""
        return {"forward": self.forward, "again": self.again if again else (), "backward": self.backward}

    def of_a_step(self, *, again: bool) -> tuple[Move, ...]:
        """`phases`, one after the other."""
        return tuple(itertools.chain(*self.phases(again=again).values()))


class Row(NamedTuple):
    """Collectives of one kind that one part of a step runs, over `axes` in the order in which blocks are joined.

    `scope` names the part by its `jax.named_scope`s, "/" between outer and inner ones.
    """

    scope: str
    phase: Phase
    collective: str
    axes: MeshAxes


class Traffic(NamedTuple):
    """How often collectives run, and the bytes that a device receives by them in all."""

    count: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


class TrafficTable(dict[Row, Traffic]):
    """`Traffic` of every part of a step, by collective and mesh axes; axes of sums are in alphabetical order."""

    def add(self, row: Row, traffic: Traffic) -> None:
        """So much more."""
        if row.collective in UNORDERED:
            row = row._replace(axes=tuple(sorted(row.axes)))
        self[row] = self.get(row, Traffic(0, 0)) + traffic

    def outline(self, depth: int) -> "TrafficTable":
        """The same, with the `depth` outermost names of each scope."""
        table = TrafficTable()
        for row, traffic in self.items():
            table.add(row._replace(scope="/".join(row.scope.split("/")[:depth])), traffic)
        return table

    def by(self, *fields: str) -> dict[tuple[Any, ...], Traffic]:
        """Sums over the rows that agree in these fields of `Row`, the most bytes first."""
        found: dict[tuple[Any, ...], Traffic] = {}
        for row, traffic in self.items():
            key = tuple(getattr(row, field) for field in fields)
            found[key] = found.get(key, Traffic(0, 0)) + traffic
        return dict(sorted(found.items(), key=lambda item: -item[1].bytes))

    @property
    def bytes(self) -> int:
        """Of all together."""
        return sum(traffic.bytes for traffic in self.values())

    @property
    def count(self) -> int:
        """How many collectives run in all."""
        return sum(traffic.count for traffic in self.values())

    def __str__(self) -> str:
        lines = [("scope", "phase", "collective", "over", "times", "bytes")]
        ranked = sorted(self.items(), key=lambda item: -item[1].bytes)
        lines += [(*row[:3], " ".join(row.axes), f"{t.count:,}", f"{t.bytes:,}") for row, t in ranked]
        lines.append(("all", "", "", "", f"{self.count:,}", f"{self.bytes:,}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:{'<' if i < 4 else '>'}{widths[i]}}" for i, cell in enumerate(line)) for line in lines
        )
