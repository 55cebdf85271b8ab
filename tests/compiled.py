"""Read the collectives of compiled programs, and hold them to those of the traced program.

XLA prints a compiled program as HLO text. `collectives` reads these forms of it, for CPU, TPU and GPU:

| what | forms |
|---|---|
| one collective | `all-gather(...)`; `all-gather-start(...)` with `-done`; `async-start(...)` or a fusion around it |
| several arrays | one collective with several operands; each operand counts as one array |
| its devices | `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)`, `mesh['fsdp'=2,'expert'=4] {'fsdp'}`; pairs of a permutation |
| how often it runs | `known_trip_count` of the loops around it; on TPU the bound, start and step of the counter |

The numbers in groups are positions in the mesh, not device ids: on TPU the devices of a mesh are in the order of the
links, and XLA numbers the parts of a program in the order of the mesh.
"""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import UNORDERED, Traffic, TrafficTable, received_bytes
from moezoo.profiling.hlo import COLLECTIVES, Computation, Instruction, read_computations, trips
from moezoo.training.step import Step

_FROM_TRACE = {name: op for op, name in COLLECTIVES.items()} | dict.fromkeys(UNORDERED, "all-reduce")
_FROM_TRACE["ppermute"] = "collective-permute"

# How much more than the trace a program for a TPU or GPU may move over the same axes.
SLACK = 1.05
# All collectives, and those that XLA's CPU backend never merges with an equal one.
ALL, UNMERGED = frozenset(COLLECTIVES), ("reduce-scatter", "all-to-all")


class Table(defaultdict[tuple[str, MeshAxes], Traffic]):
    """The traffic of each collective, by HLO's name, over each set of mesh axes."""

    def __init__(self):
        super().__init__(lambda: Traffic(0, 0))

    @property
    def axes(self) -> list[MeshAxes]:
        """All sets of mesh axes."""
        return sorted({axes for _, axes in self})

    def bytes(self, axes: MeshAxes) -> int:
        """Return the bytes that all collectives over `axes` bring to a device."""
        return sum(traffic.bytes for (_, over), traffic in self.items() if over == axes)


class Collective(NamedTuple):
    """The transfer of one array by a compiled program.

    Attributes:
        op: HLO's name, without `-start`.
        axes: The mesh axes it runs over, in the order of the mesh; if the groups of devices are those of no axes, the
            groups as text.
        ways: The number of devices in a group.
        given: The bytes that each device gives.
        times: How often it runs.
    """

    op: str
    axes: MeshAxes
    ways: int
    given: int
    times: int

    @property
    def traffic(self) -> Traffic:
        """How often it runs, and the bytes that each device receives."""
        return Traffic(self.times, self.times * received_bytes(COLLECTIVES[self.op], self.given, self.ways))


def _bytes(type_: str) -> int:
    """Return the bytes of an array or a tuple of arrays."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        bits = re.search(r"\d+", dtype)
        size = math.prod(int(n) for n in dims.split(",") if n)
        total += size * int(bits[0]) // 8 if bits else size  # `pred` has a byte
    return total


def _groups(text: str, devices: int) -> list[tuple[int, ...]]:
    """Return the groups of positions that a collective runs over, or the pairs of a permutation."""
    places = np.arange(devices)
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return groups or [tuple(places.tolist())]
    numbers = lambda part: [int(n) for n in part.split(",")] if part else None  # noqa: E731
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = map(numbers, found.groups())
        return [*map(tuple, np.asarray(places.reshape(dims).transpose(order).reshape(shape)).tolist())]
    ids = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]" + ids + r" ?\{([^{}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        places = places.reshape(numbers(found[2]) or [-1]).transpose(numbers(found[3]))
        # `'a':(2)4` is the part of size 4 of axis 'a' that has a part of size 2 before it.
        parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", found[4])
        inside = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in parts}
        return _blocks(places, sizes, inside)
    raise ValueError(f"no groups of devices in a form that is known: {text[:300]}")


def _blocks(
    places: np.ndarray, sizes: Mapping[str, int], inside: Mapping[str, tuple[int, int]]
) -> list[tuple[int, ...]]:
    """Return the positions of a mesh group by group.

    Args:
        places: The positions, in the order of the mesh.
        sizes: Mesh axis -> its size.
        inside: Axis -> (the size of what comes before, the size) of its part along which the devices of a group differ.
    """
    split = []
    for axis, size in sizes.items():
        before, own = inside.get(axis, (1, 1))
        split += [before, own, size // (before * own)]
    last = np.moveaxis(places.reshape(split), range(1, len(split), 3), range(-len(sizes), 0))
    return [tuple(row.tolist()) for row in last.reshape(-1, math.prod(split[1::3]))]


class _Mesh:
    """Finds the mesh axes of groups of positions."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        live = [axis for axis, size in sizes.items() if size > 1]
        subsets = (axes for count in range(1, len(live) + 1) for axes in itertools.combinations(live, count))
        places = np.arange(math.prod(sizes.values()))
        self._blocks = {
            axes: {frozenset(block) for block in _blocks(places, sizes, {axis: (1, sizes[axis]) for axis in axes})}
            for axes in subsets
        }

    def axes(self, groups: list[tuple[int, ...]], *, pairs: bool) -> tuple[MeshAxes, int]:
        """Return the axes that the groups are over, the fewest whose blocks hold all `pairs`, and the group's size."""
        groups = [group for group in groups if len(set(group)) > 1]
        if not groups:
            return (), 1
        for axes, blocks in self._blocks.items():
            ways = math.prod(self.sizes[axis] for axis in axes)
            if pairs and all(any(block.issuperset(pair) for block in blocks) for pair in groups):
                return axes, ways
            if not pairs and blocks == {frozenset(group) for group in groups}:
                return axes, ways
        return (str(groups),), max(map(len, groups))


def collectives(text: str, sizes: Mapping[str, int]) -> list[Collective]:
    """Return every collective over several devices that a compiled program runs.

    In a conditional, each branch counts as if it ran.

    Args:
        text: The program, as `compiled.as_text()` gives it.
        sizes: Mesh axis -> number of devices, as `mesh.shape`.

    Raises:
        ValueError: A collective runs an unknown number of times, or over devices in a form that is not known.
    """
    entry, computations = read_computations(text)
    mesh = _Mesh(sizes)

    @functools.cache
    def run(name: str) -> tuple[Collective, ...]:
        found: list[Collective] = []
        body = computations[name]
        for instruction in (i for key, i in body.items() if key != "ROOT"):
            op = instruction.op.removesuffix("-start")
            if op in COLLECTIVES:
                found += _moves(op, instruction, body, mesh)
            # The start of an asynchronous operation has the computation; `-done` and `-update` may name it again.
            elif not op.endswith(("-done", "-update")):
                inner = [c for called in instruction.called for c in run(called)]
                times = trips(instruction, body, computations) if op == "while" and inner else 1
                found += [c._replace(times=c.times * times) for c in inner]
        return tuple(found)

    return list(run(entry))


def _moves(op: str, instruction: Instruction, body: Computation, mesh: _Mesh) -> list[Collective]:
    groups = _groups(instruction.text, math.prod(mesh.sizes.values()))
    axes, ways = mesh.axes(groups, pairs=op == "collective-permute")
    if not axes:
        return []
    given = [_bytes(body[operand].type) for operand in instruction.operands]
    if op == "ragged-all-to-all":
        given = [min(given[:2])]  # operand and result; the rest are offsets and sizes
    elif op == "all-to-all" and "dimensions=" not in instruction.text:
        given = [sum(given)]  # one operand for each device
    return [Collective(op, axes, ways, one, 1) for one in given]


class Budget:
    """What a traced program may move, and what the compiled program moves, by collective and mesh axes.

    Attributes:
        trace, program: How often each collective runs over each set of axes, and the bytes that each device receives.
            A collective of several arrays counts each of them.
    """

    def __init__(self, traced: TrafficTable, text: str, sizes: Mapping[str, int], slack: float = SLACK):
        """Read a program.

        Args:
            traced: The traffic of the traced program, on the platform of the compiled one.
            text: The program, as `compiled.as_text()` gives it.
            sizes: Mesh axis -> number of devices, as `mesh.shape`.
            slack: How many times the bytes of the trace the program may move over the same axes.
        """
        self.trace, self.program, self._slack = Table(), Table(), slack
        for row, traffic in traced.items():
            self.trace[_FROM_TRACE[row.collective], tuple(axis for axis in sizes if axis in row.axes)] += traffic
        for found in collectives(text, sizes):
            self.program[found.op, found.axes] += found.traffic

    def turned(self, axes: MeshAxes) -> Traffic:
        """Return how many reduce-scatters the compiler turned into all-reduces, and the bytes that these receive more.

        The all-reduce of an array receives twice the bytes of its reduce-scatter.
        """
        scatters, sums = ("reduce-scatter", axes), ("all-reduce", axes)
        gone = self.trace[scatters].bytes - self.program[scatters].bytes
        more = min(gone, (self.program[sums].bytes - self.trace[sums].bytes) // 2)
        return Traffic(self.trace[scatters].count - self.program[scatters].count, more) if more > 0 else Traffic(0, 0)

    def check(self, equal: Collection[str] = ()) -> None:
        """Fail, and print both tables, where the program moves more than the trace.

        | what | at most |
        |---|---|
        | all-gathers, all-to-alls, ragged all-to-alls and permutations over the same axes | as many as traced |
        | bytes of all collectives over the same axes | `slack` times the trace; see `turned` for reduce-scatters |

        Args:
            equal: The collectives, by HLO's names, of which the program must run what is traced, in count and bytes.
        """
        faults = [
            f"{op} over {' '.join(axes)} runs {traffic.count} times, traced {self.trace[op, axes].count} times"
            for (op, axes), traffic in self.program.items()
            if op not in ("all-reduce", "reduce-scatter") and traffic.count > self.trace[op, axes].count
        ]
        for axes in self.program.axes:
            moved, traced, turned = self.program.bytes(axes), self.trace.bytes(axes), self.turned(axes)
            if moved > self._slack * (traced + turned.bytes):
                excuse = f"; {turned.count} reduce-scatters became all-reduces, which adds {turned.bytes:,}"
                faults.append(f"over {' '.join(axes)} {moved:,} bytes, traced {traced:,}{excuse * bool(turned.count)}")
        for op, axes in sorted({*self.trace, *self.program}):
            if op in equal and (program := self.program[op, axes]) != (trace := self.trace[op, axes]):
                faults.append(f"{op} over {' '.join(axes)} runs {tuple(program)} (count, bytes), traced {tuple(trace)}")
        assert not faults, "\n".join(["the compiled program moves other than the traced one:", *faults, str(self)])

    def __str__(self) -> str:
        lines = [f"{'':46}{'traced':>22}{'compiled':>22}", f"{'op':22}{'axes':24}" + f"{'count':>8}{'bytes':>14}" * 2]
        for op, axes in sorted({*self.trace, *self.program}, key=lambda key: key[::-1]):
            pair = self.trace[op, axes], self.program[op, axes]
            if any(traffic.count for traffic in pair):
                cells = "".join(f"{traffic.count:8,}{traffic.bytes:14,}" for traffic in pair)
                lines.append(f"{op:22}{' '.join(axes):24}{cells}")
        return "\n".join(lines)


def budget_of(step: Step, compiled: Any) -> Budget:
    """Return the budget of a step and its compiled program; on CPUs that of `merged_on_cpu`, without slack."""
    mesh: Any = step.batch_shardings.tokens.mesh
    platform = str(mesh.devices.flat[0].platform)
    platform = "cuda" if platform == "gpu" else platform  # as lowering calls it
    traced = collective_traffic(step.traced.jaxpr, platform)
    if platform != "cpu":
        return Budget(traced, compiled.as_text(), mesh.shape)
    state, batch, _ = step.arguments
    merged = merged_on_cpu(traced, len(batch.tokens), state.model.config.tied_embeddings, mesh.shape)
    return Budget(merged, compiled.as_text(), mesh.shape, slack=1)


def merged_on_cpu(traced: TrafficTable, micro_steps: int, tied: bool, sizes: Mapping[str, int]) -> TrafficTable:
    """Return the trace without the collectives that XLA's CPU backend takes from an equal one.

    - Weights outside of layers are the same in all micro-steps, so they are gathered once, and a tied table once for
      both uses.
    - A ring of two devices sends the same hop where a layer is recomputed and in its backward pass: one serves both.

    It also unrolls a stack of one period. Then it merges more: what the layer recomputes with its forward pass, and
    sums of zeros. That is left out here.
    """
    table = TrafficTable()
    for row, traffic in traced.items():
        outside = row.scope in ("embedding/weights", "head/weights") and row.collective == "all_gather"
        ways = math.prod(sizes[axis] for axis in row.axes)
        again = row.collective == "ppermute" and row.phase == "recomputed" and ways == 2
        if outside:
            traffic = Traffic(traffic.count // micro_steps, traffic.bytes // micro_steps)
        if not (again or (outside and tied and row.scope.startswith("embedding"))):
            table.add(row, traffic)
    return table
