"""The programs that are timed: an implementation's forward pass, its backward pass, and both in one program."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from moezoo.bench.timing import Call

Pass = Literal["forward", "backward", "both"]
# FLOPs of a pass, divided by those of the forward pass.
WORK: dict[Pass, int] = {"forward": 1, "backward": 2, "both": 3}


class Candidate(NamedTuple):
    """Calls by pass, and the peak bytes of each: arguments, results and temporaries; None if unknown."""

    calls: dict[Pass, Call]
    peak_bytes: dict[Pass, int | None]


def compile_passes(
    function: Callable[..., Any], differentiable: Sequence[Any], rest: Sequence[Any], cotangent: Any
) -> Candidate:
    """Compile all three passes of `function(*differentiable, *rest)`; `rest` gets no gradient.

    `backward` starts from the residuals of a forward pass. `both` returns the value and every gradient.
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
    """Return the bytes that a program needs on one device: arguments, temporaries, results not stored in arguments."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
