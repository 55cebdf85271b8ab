"""Reading traced programs: every equation with the number of times it runs, and the collectives among them."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.traffic import TrafficTable, received_bytes

# Primitives by which devices exchange data, by the name that counts give them: JAX has several of one kind, which
# differ in whether their result is typed as varying.
_COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "all_to_all": "all_to_all",
    "pmax": "pmax",
    "pmin": "pmin",
    "ppermute": "ppermute",
    "psum": "psum",
    "psum_invariant": "psum",
    "ragged_all_to_all": "ragged_all_to_all",
    "reduce_scatter": "reduce_scatter",
    "unreduced_psum": "psum",
    "unreduced_reduce_scatter": "reduce_scatter",
}


class Equation(NamedTuple):
    """An equation of a traced program, inside `shard_map` with the sizes of its `mesh`'s axes.

    It runs `times` times, None where a loop without a known end holds it.
    """

    equation: JaxprEqn
    times: int | None
    mesh: Mapping[str, int]


def equations(jaxpr: ClosedJaxpr | Jaxpr, platform: str | None = None) -> Iterator[Equation]:
    """Every equation of a traced program, inner programs included.

    All branches of a choice; but where the platform compiled for will choose, that of `platform` alone, if given.
    """
    yield from _walk(jaxpr, 1, platform, {})


def _walk(
    jaxpr: ClosedJaxpr | Jaxpr, times: int | None, platform: str | None, mesh: Mapping[str, int]
) -> Iterator[Equation]:
    for equation in jaxpr.eqns:
        yield Equation(equation, times, mesh)
        inside, sizes = times, mesh
        if equation.primitive.name == "scan":
            inside = None if times is None else times * equation.params["length"]
        elif equation.primitive.name == "while":
            inside = None
        elif equation.primitive.name == "shard_map":
            sizes = dict(equation.params["mesh"].shape)
        parts = tuple(equation.params.values())
        if platform is not None and (branch := _branch(equation, platform)) is not None:
            parts = (branch,)
        for inner in _inner(parts):
            yield from _walk(inner, inside, platform, sizes)


def _branch(equation: JaxprEqn, platform: str) -> ClosedJaxpr | None:
    """What a choice by platform comes to on `platform`; None for anything else."""
    platforms = equation.params.get("branches_platforms")
    if equation.primitive.name != "cond" or platforms is None:
        return None
    for named, branch in zip(platforms, equation.params["branches"], strict=True):
        if named is None or platform in named:
            return branch
    return None


def _inner(values: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)


def collective_traffic(jaxpr: ClosedJaxpr | Jaxpr, platform: str = "tpu") -> TrafficTable:
    """How often each collective runs and what it brings a device: what a traced step exchanges, before any compiler.

    A body that is scanned counts once a round; of what differs by platform, that of `platform` counts. Of an uneven
    exchange count the rows that can leave and arrive. Raises `ValueError` for a collective whose number of runs the
    program does not say: in a loop that ends on a condition, or in a branch.
    """
    table = TrafficTable()
    for equation, times, mesh in equations(jaxpr, platform):
        kind = equation.primitive.name
        chosen = kind != "cond" or _branch(equation, platform) is not None
        if not chosen and any(count_collectives(branch, platform) for branch in equation.params["branches"]):
            raise ValueError("a collective in a branch: how often it runs depends on the data")
        if (name := _COLLECTIVES.get(kind)) is None:
            continue
        axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if times is None:
            raise ValueError(
                f"{name} over {axes} in a loop that ends on a condition: it runs an unknown number of times"
            )
        table.add(name, axes, times, _bytes_of(name, equation, axes, mesh))
    return table


def count_collectives(jaxpr: ClosedJaxpr | Jaxpr, platform: str = "tpu") -> Counter[tuple[str, MeshAxes]]:
    """How often each collective runs."""
    return Counter({key: traffic.count for key, traffic in collective_traffic(jaxpr, platform).items()})


def _bytes_of(name: str, equation: JaxprEqn, axes: MeshAxes, mesh: Mapping[str, int]) -> int:
    arrays: list[Any] = [x.aval for x in equation.invars]
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    given = min(sizes[:2]) if name == "ragged_all_to_all" else sum(sizes)
    return received_bytes(name, given, math.prod(mesh.get(axis, 1) for axis in axes))
