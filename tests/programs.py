"""Reading and interpreting programs."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from moezoo.parallel.traces import collective_traffic


def largest_array(text: str) -> int:
    """Return how many numbers the largest array in the text of a compiled program has."""
    shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", text)
    return max(math.prod(map(int, dims.split(","))) for dims in set(shapes))


def hops_over_loops(text: str) -> dict[str, list[tuple[str, int]]]:
    """Return, for each computation of a scheduled program, what its hops (`ppermute`) overlap with, in order.

    A hop is the dtypes of its arrays, such as "bf16 f32", and the number of loops that have matrix products and no hops
    and run between its start and its end: none if it blocks. The outermost computation is named "ENTRY".
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = "ENTRY" if found[1] else found[2]
            bodies[name] = []
        elif name and " = " in line:
            bodies[name].append(line)

    @functools.cache
    def has(name: str, pattern: str) -> bool:
        return any(re.search(pattern, line) or calls(line, pattern) for line in bodies[name])

    def calls(line: str, pattern: str) -> bool:
        called = re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", line)
        return any(has(name, pattern) for name in called)

    product, hop = r" (dot|convolution)\(|__cublas", r" collective-permute(-start)?\("
    found_in = {}
    for name, lines in bodies.items():
        loops = [" while(" in line and calls(line, product) and not calls(line, hop) for line in lines]
        found = []
        for first, line in enumerate(lines):
            if re.search(hop, line):
                start, types = re.findall(r"%?([\w.-]+) = (.*?) collective-permute", line)[0]
                end = re.compile(rf" collective-permute-done\(.*%?{re.escape(start)}\)")
                last = next((i for i, later in enumerate(lines) if end.search(later)), first)
                if '"is_sync":true' in line:
                    last = first
                found.append((" ".join(sorted(set(re.findall(r"\b(bf16|f32)\[", types)))), sum(loops[first:last])))
        if found:
            found_in[name] = found
    return found_in


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


def count_collectives(jaxpr: ClosedJaxpr | Jaxpr, platform: str = "tpu") -> Counter[tuple[str, tuple[str, ...]]]:
    """Count how often each collective of a traced program runs, by (collective, mesh axes)."""
    found = collective_traffic(jaxpr, platform).by("collective", "axes")
    return Counter({(kind, axes): traffic.count for (kind, axes), traffic in found.items()})
