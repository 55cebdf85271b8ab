"""Reading traced programs: every equation with the number of times it runs, and the collectives among them.

Dead code does not count: a program is cleaned of it before it is read, inner programs included.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.traffic import Phase, Row, Traffic, TrafficTable, received_bytes

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


# What rematerialisation calls its bodies in name stacks.
_REPEATED, _BODIES = "rematted_computation", ("rematted_computation", "checkpoint")


class Equation(NamedTuple):
    """An equation of a traced program, inside `shard_map` with the sizes of its `mesh`'s axes.

    It runs `times` times, None where a loop without a known end holds it. `path` joins the name stacks of all that
    holds it and its own, as JAX writes them: named scopes in the transformations that they went through.
    """

    equation: JaxprEqn
    times: int | None
    mesh: Mapping[str, int]
    path: str

    @property
    def scope(self) -> str:
        """Its named scopes, "/" between outer and inner ones."""
        path = re.sub(r"(jvp\([^()]*\))\)/\1", r"\1)", self.path)  # a transposed checkpoint names its scopes twice
        names = re.findall(r"([^/()]+)(\(?)", path)  # what stands before a parenthesis is a transformation
        return "/".join(name for name, opens in names if not opens and name not in _BODIES)

    @property
    def phase(self) -> Phase:
        """The pass that it belongs to."""
        if _REPEATED in self.path:
            return "again"
        return "backward" if "transpose(" in self.path else "forward" if "jvp(" in self.path else "outside"


def equations(jaxpr: ClosedJaxpr | Jaxpr, platform: str | None = None) -> Iterator[Equation]:
    """Every equation of a traced program that its results or effects need, inner programs included.

    All branches of a choice; but where the platform compiled for will choose, that of `platform` alone, if given.
    jax 0.10 leaves dead code in a loop that ends on a condition.
    """
    program: Any = getattr(jaxpr, "jaxpr", jaxpr)
    cleaned, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    yield from _walk(cleaned, 1, platform, {}, "")


def _walk(
    jaxpr: ClosedJaxpr | Jaxpr, times: int | None, platform: str | None, mesh: Mapping[str, int], path: str
) -> Iterator[Equation]:
    for equation in jaxpr.eqns:
        here = f"{path}/{equation.source_info.name_stack}"
        yield Equation(equation, times, mesh, here)
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
            yield from _walk(inner, inside, platform, sizes, here)


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
    for found in equations(jaxpr, platform):
        equation, times, mesh, _ = found
        kind = equation.primitive.name
        chosen = kind != "cond" or _branch(equation, platform) is not None
        if not chosen and any(collective_traffic(branch, platform) for branch in equation.params["branches"]):
            raise ValueError("a collective in a branch: how often it runs depends on the data")
        if (name := _COLLECTIVES.get(kind)) is None:
            continue
        axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if times is None:
            raise ValueError(
                f"{name} over {axes} in a loop that ends on a condition: it runs an unknown number of times"
            )
        each = _bytes_of(name, equation, axes, mesh)
        table.add(Row(found.scope, found.phase, name, axes), Traffic(times, times * each))
    return table


def count_collectives(jaxpr: ClosedJaxpr | Jaxpr, platform: str = "tpu") -> Counter[tuple[str, MeshAxes]]:
    """How often each collective runs, whatever part of the program it belongs to."""
    found = collective_traffic(jaxpr, platform).by("collective", "axes")
    return Counter({(kind, axes): traffic.count for (kind, axes), traffic in found.items()})


def _bytes_of(name: str, equation: JaxprEqn, axes: MeshAxes, mesh: Mapping[str, int]) -> int:
    arrays: list[Any] = [x.aval for x in equation.invars]
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    given = min(sizes[:2]) if name == "ragged_all_to_all" else sum(sizes)
    return received_bytes(name, given, math.prod(mesh.get(axis, 1) for axis in axes))
