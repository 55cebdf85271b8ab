"""The bytes that collectives bring to a device, and the table of those of a program."""

from typing import Any, Literal, NamedTuple

from moezoo.parallel.collectives import MeshAxes

# The result of a reduction does not depend on the order of axes.
UNORDERED = ("pmax", "pmin", "psum")

# The phases of a training step: the forward pass, what rematerialisation recomputes, the backward pass, and what runs
# outside of differentiation, such as the sums of gradients.
Phase = Literal["forward", "recomputed", "backward", "outside"]

# What a model is called for.
CallName = Literal["train", "evaluate", "prefill", "decode"]


def received_bytes(collective: str, given: int, ways: int) -> int:
    """Return the bytes that each device receives from one collective, rounded up.

    | collective | bytes received, for g = `given` and n = `ways` |
    |---|---|
    | `all_gather` | g (n - 1): the parts of all other devices |
    | `reduce_scatter` | g (n - 1) / n: the other devices' sums of its own part |
    | `all_to_all`, `ragged_all_to_all` | g (n - 1) / n, taking rows as evenly spread |
    | `psum`, `pmax`, `pmin` | 2 g (n - 1) / n: a reduce-scatter and an all-gather |
    | `ppermute` | g |

    Args:
        collective: The name of the collective.
        given: The bytes that each device gives.
        ways: The number of devices.
    """
    if collective == "all_gather":
        return given * (ways - 1)
    if collective == "ppermute":
        return given
    parts = -(-given * (ways - 1) // ways)
    return 2 * parts if collective in UNORDERED else parts


class Row(NamedTuple):
    """The key of a `TrafficTable`: all collectives of one kind that one part of a step runs over the same axes.

    Attributes:
        scope: The part, by its `jax.named_scope`s, the outermost first, joined by "/".
        phase: The phase of the step.
        collective: The name of the collective.
        axes: The mesh axes, in the order in which blocks are concatenated; for reductions in alphabetical order.
    """

    scope: str
    phase: Phase
    collective: str
    axes: MeshAxes


class Traffic(NamedTuple):
    """How often collectives run, and the bytes that each device receives from all of them together."""

    count: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


class TrafficTable(dict[Row, Traffic]):
    """The `Traffic` of each `Row` of a step. Printing it gives a table, the most bytes first."""

    def add(self, row: Row, traffic: Traffic) -> None:
        """Add `traffic` to that of `row`."""
        if row.collective in UNORDERED:
            row = row._replace(axes=tuple(sorted(row.axes)))
        self[row] = self.get(row, Traffic(0, 0)) + traffic

    def outline(self, depth: int) -> "TrafficTable":
        """Return the table with only the `depth` outermost names of each scope."""
        table = TrafficTable()
        for row, traffic in self.items():
            table.add(row._replace(scope="/".join(row.scope.split("/")[:depth])), traffic)
        return table

    def within(self, scope: str) -> "TrafficTable":
        """Return the rows of a scope and of those inside it."""
        return TrafficTable({row: each for row, each in self.items() if f"{row.scope}/".startswith(f"{scope}/")})

    def by(self, *fields: str) -> dict[tuple[Any, ...], Traffic]:
        """Return the sums over rows that agree in these fields of `Row`, the most bytes first."""
        found: dict[tuple[Any, ...], Traffic] = {}
        for row, traffic in self.items():
            key = tuple(getattr(row, field) for field in fields)
            found[key] = found.get(key, Traffic(0, 0)) + traffic
        return dict(sorted(found.items(), key=lambda item: -item[1].bytes))

    @property
    def bytes(self) -> int:
        """The bytes that each device receives in all."""
        return sum(traffic.bytes for traffic in self.values())

    @property
    def count(self) -> int:
        """The number of collectives that run in all."""
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
