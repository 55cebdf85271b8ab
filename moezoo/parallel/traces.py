"""Read traced programs: list every equation with the number of times it runs, and count collectives and their bytes.

Dead code is removed before a program is read, in inner programs too.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from moezoo.parallel.mesh import no_context_mesh
from moezoo.parallel.traffic import Phase, Row, Traffic, TrafficTable, received_bytes

# Primitive -> the name of its collective. JAX has several primitives for one collective, which differ in whether their
# result varies.
COLLECTIVES = {
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


# The names of rematerialised bodies in name stacks; only recomputed ones have the first.
_RECOMPUTED, _BODIES = "rematted_computation", ("rematted_computation", "checkpoint")


class Equation(NamedTuple):
    """One equation of a traced program.

    Attributes:
        equation: The equation, with its primitive, operands and parameters.
        times: How often it runs; None inside a loop that ends on a condition.
        mesh: Inside `shard_map`, mesh axis -> number of devices; empty outside.
        path: The name stacks of the equation and of all that contain it, joined by "/": named scopes, in the notation
            of JAX for transformations around them.
    """

    equation: JaxprEqn
    times: int | None
    mesh: Mapping[str, int]
    path: str

    @property
    def scope(self) -> str:
        """The equation's named scopes, the outermost first, joined by "/"."""
        # A transposed checkpoint repeats its scopes, and so does what a scope transposes within itself.
        path = re.sub(r"(jvp\([^()]*\))(/transpose\(|\)/)\1", r"\1", self.path)
        names = re.findall(r"([^/()]+)(\(?)", path)  # a transformation precedes a parenthesis
        return "/".join(name for name, opens in names if not opens and name not in _BODIES)

    @property
    def phase(self) -> Phase:
        """The phase of a training step that the equation belongs to."""
        return phase_of(self.path)


def phase_of(path: str) -> Phase:
    """Return the phase of a training step that an equation with these name stacks belongs to."""
    if _RECOMPUTED in path:
        return "recomputed"
    return "backward" if "transpose(" in path else "forward" if "jvp(" in path else "outside"


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a scan all iterations read, and how many it carries.

    What it cuts into slices and what it stacks has a dimension more outside than in its body. jax 0.12 names no counts.
    """
    body = scan.params["jaxpr"]
    results: list[Any] = [x.aval for x in scan.outvars]
    operands: list[Any] = [x.aval for x in scan.invars]
    carried = sum(x.ndim == y.ndim for x, y in zip(body.out_avals, results, strict=True))
    whole = sum(x.ndim == y.ndim for x, y in zip(body.in_avals, operands, strict=True))
    return whole - carried, carried


def equations(jaxpr: ClosedJaxpr | Jaxpr, platform: str | None = None) -> Iterator[Equation]:
    """Yield every equation of a traced program that its results or effects need, inner programs included.

    With jax 0.10, dead code remains in a loop that ends on a condition.

    Args:
        jaxpr: The program.
        platform: Of a choice that the lowering makes by platform, read only the branch for this one; None reads all
            branches. All branches of other conditionals are read.
    """
    program: Any = getattr(jaxpr, "jaxpr", jaxpr)
    with no_context_mesh():
        cleaned, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    yield from _walk(cleaned, 1, platform, {}, "")


def _walk(
    jaxpr: ClosedJaxpr | Jaxpr, times: int | None, platform: str | None, mesh: Mapping[str, int], path: str
) -> Iterator[Equation]:
    for equation in jaxpr.eqns:
        here = f"{path}/{equation.source_info.name_stack}"
        yield Equation(equation, times, mesh, here)
        kind, parameters = equation.primitive.name, jax.tree.leaves(list(equation.params.values()))
        programs = [x for x in parameters if isinstance(x, ClosedJaxpr | Jaxpr)]
        if not programs:
            continue
        inside, sizes = times, mesh
        if kind == "scan":
            inside = None if times is None else times * equation.params["length"]
        elif kind == "while":
            inside = None
        elif kind == "shard_map":
            sizes = dict(equation.params["mesh"].shape)
        elif platform is not None and (branch := branch_for(equation, platform)) is not None:
            programs = [branch]
        for inner in programs:
            yield from _walk(inner, inside, platform, sizes, here)


def branch_for(equation: JaxprEqn, platform: str) -> ClosedJaxpr | None:
    """Return the branch that a choice by platform takes on `platform`; None for any other equation."""
    platforms = equation.params.get("branches_platforms")
    if equation.primitive.name != "cond" or platforms is None:
        return None
    for named, branch in zip(platforms, equation.params["branches"], strict=True):
        if named is None or platform in named:
            return branch
    return None


def collective_traffic(jaxpr: ClosedJaxpr | Jaxpr, platform: str = "tpu") -> TrafficTable:
    """Return how often each collective of a traced program runs, and the bytes that each device receives.

    The numbers hold for the program as traced, before any compiler changes it. A collective in a scan counts once per
    iteration. An exchange of uneven sizes counts as the largest that the buffers allow.

    Args:
        jaxpr: The program, such as the jaxpr of a training step.
        platform: Where a choice depends on the platform, count the branch for this one.

    Raises:
        ValueError: A collective runs an unknown number of times: in a loop that ends on a condition, or in a branch
            that depends on data.
    """
    table = TrafficTable()
    for found in equations(jaxpr, platform):
        equation, times, mesh, _ = found
        kind = equation.primitive.name
        chosen = kind != "cond" or branch_for(equation, platform) is not None
        if not chosen and any(collective_traffic(branch, platform) for branch in equation.params["branches"]):
            raise ValueError("a collective in a branch: how often it runs depends on the data")
        if (name := COLLECTIVES.get(kind)) is None:
            continue
        axes: Any = equation.params.get("axes", equation.params.get("axis_name"))
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if times is None:
            raise ValueError(
                f"{name} over {axes} in a loop that ends on a condition: it runs an unknown number of times"
            )
        arrays: list[Any] = [x.aval for x in equation.invars]
        sizes = [array.size * array.dtype.itemsize for array in arrays]
        given = min(sizes[:2]) if name == "ragged_all_to_all" else sum(sizes)
        each = received_bytes(name, given, math.prod(mesh.get(axis, 1) for axis in axes))
        table.add(Row(found.scope, found.phase, name, axes), Traffic(times, times * each))
    return table
