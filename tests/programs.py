"""Reading and interpreting programs."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal


def largest_array(text: str) -> int:
    """Return how many numbers the largest array in the text of a compiled program has."""
    shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", text)
    return max(math.prod(map(int, dims.split(","))) for dims in set(shapes))


def executed_products(function: Callable[..., Any], *arguments: Any) -> list[tuple[int, ...]]:
    """Interpret `function` and return the shape of the left operand of each matrix product that it executes.

    Loops run as often, and branches are chosen, as the arguments determine.
    """
    found: list[tuple[int, ...]] = []

    def run(program: Any, given: list[Any]) -> list[Any]:
        jaxpr = getattr(program, "jaxpr", program)
        values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
        values |= zip(jaxpr.invars, given, strict=True)

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            values |= zip(equation.outvars, step(equation, [read(x) for x in equation.invars]), strict=True)
        return [read(x) for x in jaxpr.outvars]

    def step(equation: Any, given: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "while":
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry = given[second:]
            while run(params["cond_jaxpr"], [*given[:first], *carry])[0]:
                carry = run(params["body_jaxpr"], [*given[first:second], *carry])
            return carry
        if name == "scan":
            # What is scanned or stacked has one more dimension outside; versions of JAX name the counts differently.
            body = params["jaxpr"].jaxpr
            second = sum(x.aval.ndim == y.aval.ndim for x, y in zip(equation.invars, body.invars, strict=True))
            carried = sum(x.aval.ndim == y.aval.ndim for x, y in zip(equation.outvars, body.outvars, strict=True))
            first = second - carried
            carry, rows = given[first:second], []
            for i in range(params["length"]):
                results = run(params["jaxpr"], [*given[:first], *carry, *(x[i] for x in given[second:])])
                carry = results[:carried]
                rows.append(results[carried:])
            return [*carry, *(jax.numpy.stack(column) for column in zip(*rows, strict=True))]
        if name == "cond":
            return run(params["branches"][int(given[0])], given[1:])
        for key in ("jaxpr", "call_jaxpr"):
            if key in params:
                return run(params[key], given)
        if name == "dot_general":
            found.append(given[0].shape)
        results = equation.primitive.bind(*given, **params)
        return results if equation.primitive.multiple_results else [results]

    run(jax.make_jaxpr(function)(*arguments), jax.tree.leaves(arguments))
    return found
