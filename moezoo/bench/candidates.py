"""What is timed: an implementation's forward pass, backward pass, and both in one program."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from moezoo.bench.timing import Call

Pass = Literal["forward", "backward", "both"]
# FLOPs of a pass over those of the forward pass.
WORK: dict[Pass, int] = {"forward": 1, "backward": 2, "both": 3}


class Candidate(NamedTuple):
    """Calls by pass, and the bytes each holds at its peak: arguments, results and temporaries; None where unknown."""

    calls: dict[Pass, Call]
    peak_bytes: dict[Pass, int | None]


def compile_passes(
    function: Callable[..., Any], differentiable: Sequence[Any], rest: Sequence[Any], cotangent: Any
) -> Candidate:
    """A function of `differentiable` and `rest` (which gets no gradient), compiled in all three passes.

    The backward pass alone starts from what the forward pass kept; `both` returns the value and every gradient.
    """
    differentiable, rest = tuple(differentiable), tuple(rest)

    def linearize(differentiable: tuple, rest: tuple) -> Any:
        return jax.vjp(lambda *d: function(*d, *rest), *differentiable)

    def both(differentiable: tuple, rest: tuple, cotangent: Any) -> Any:
        value, pull = linearize(differentiable, rest)
        return value, pull(cotangent)

    def forward(differentiable: tuple, rest: tuple) -> Any:
        return function(*differentiable, *rest)

    _, pull = jax.jit(linearize)(differentiable, rest)
    programs: dict[Pass, tuple[Any, tuple]] = {
        "forward": (forward, (differentiable, rest)),
        "backward": (lambda pull, cotangent: pull(cotangent), (pull, cotangent)),
        "both": (both, (differentiable, rest, cotangent)),
    }
    calls: dict[Pass, Call] = {}
    peaks: dict[Pass, int | None] = {}
    for name, (program, arguments) in programs.items():
        ready = jax.jit(program).lower(*arguments).compile()
        calls[name] = lambda ready=ready, arguments=arguments: jax.block_until_ready(ready(*arguments))
        peaks[name] = peak_bytes(ready)
    return Candidate(calls, peaks)


def peak_bytes(program: "jax.stages.Compiled") -> int | None:
    """What a program needs at once on one device: arguments, results that are not in their place, temporaries."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
