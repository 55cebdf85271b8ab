"""Time several calls alternately, so that other load on the machine affects all of them.

An implementation of a function is timed in three passes: forward, backward, and both in one program.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from moezoo.tools.absent import memory_of

# Runs the work and returns when it is done.
Call = Callable[[], Any]
_Name = TypeVar("_Name", bound=Hashable)

Pass = Literal["forward", "backward", "both"]
# FLOPs of a pass, divided by those of the forward pass.
WORK: dict[Pass, int] = {"forward": 1, "backward": 2, "both": 3}
_SHORTEST = 0.02  # seconds per sample at least; much longer than reading the clock


class Timing(NamedTuple):
    """Milliseconds per call: the median of the samples and their interquartile range.

    `cpu_ms` is the median of what all threads of this process together worked.
    """

    ms: float
    spread: float
    cpu_ms: float = math.nan

    def rounded(self, digits: int, times: float = 1.0) -> dict[str, float]:
        """Return what a row has of it, multiplied by `times`."""
        return {"ms": round(times * self.ms, digits), "ms_spread": round(times * self.spread, digits)}


class Queued(NamedTuple):
    """A call that an accelerator can queue: it starts the work, and `wait` returns when the last of it is done."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.wait(self.start())


def call_of(program: Callable[..., Any], *arguments: Any) -> Call:
    """Return a call of a program of JAX."""
    return Queued(partial(program, *arguments), jax.block_until_ready)


def by_turns(
    samples: Mapping[_Name, Callable[[], float]], count: int, seconds: float = math.inf
) -> dict[_Name, list[float]]:
    """Take one sample of each per round, and return the seconds that each sample returned.

    Each gets at least one sample. It leaves when it has `count` samples or has run for `seconds`.
    """
    taken: dict[_Name, list[float]] = {name: [] for name in samples}
    waiting = set(samples)
    while waiting:
        for name in [n for n in samples if n in waiting]:
            taken[name].append(samples[name]())
            if len(taken[name]) >= count or sum(taken[name]) >= seconds:
                waiting.remove(name)
    return taken


def measure(calls: Mapping[str, Call], *, seconds: float, samples: int) -> dict[str, Timing]:
    """Time all calls by turns after a warm-up; a short call is repeated within a sample."""
    repeats = {}
    for name, call in calls.items():
        call()  # compiles and allocates
        repeats[name] = max(1, math.ceil(_SHORTEST / run(call, 1)))
    worked: dict[str, list[float]] = {name: [] for name in calls}

    def sample(name: str) -> float:
        began = time.process_time()
        seconds = run(calls[name], repeats[name])
        worked[name].append(time.process_time() - began)
        return seconds

    taken = by_turns({name: partial(sample, name) for name in calls}, samples, seconds)
    return {
        name: quartiles(np.asarray(values) / repeats[name])._replace(
            cpu_ms=float(np.median(worked[name])) / repeats[name] * 1e3
        )
        for name, values in taken.items()
    }


def run(call: Call, repeats: int) -> float:
    """Return the seconds of all `repeats` of a call together.

    An accelerator gets all of them at once, so that it does not wait for the host between two. On a CPU, calls that are
    started together would share its cores.
    """
    start, last = time.perf_counter(), None
    if isinstance(call, Queued) and jax.default_backend() != "cpu":
        for _ in range(repeats):
            last = call.start()
        call.wait(last)
    else:
        for _ in range(repeats):
            call()
    return time.perf_counter() - start


def quartiles(seconds: Any) -> Timing:
    """Return the median and the interquartile range of some samples."""
    low, middle, high = np.percentile(seconds, (25, 50, 75)) * 1e3
    return Timing(float(middle), float(high - low))


class Candidate(NamedTuple):
    """Calls by pass, and the peak bytes of each: arguments, results and temporaries; None if unknown."""

    calls: dict[Pass, Call]
    peak_bytes: dict[Pass, int | None]


def passes_of(function: Callable[..., Any]) -> dict[Pass, Callable[[tuple, tuple, Any], Any]]:
    """Return the forward pass of `function(*differentiable, *rest)`, and both passes in one program.

    Each takes `differentiable`, `rest` and the cotangent of the result. `both` returns the result and every gradient.
    """

    def forward(differentiable: tuple, rest: tuple, cotangent: Any) -> Any:
        del cotangent
        return function(*differentiable, *rest)

    def both(differentiable: tuple, rest: tuple, cotangent: Any) -> Any:
        value, pull = jax.vjp(lambda *d: function(*d, *rest), *differentiable)
        return value, pull(cotangent)

    return {"forward": forward, "both": both}


def compile_passes(function: Callable[..., Any], differentiable: tuple, rest: tuple, cotangent: Any) -> Candidate:
    """Compile all three passes; `backward` starts from what a forward pass keeps."""
    _, pull = jax.jit(lambda d, rest: jax.vjp(lambda *d: function(*d, *rest), *d))(differentiable, rest)
    whole, passes = (differentiable, rest, cotangent), passes_of(function)
    programs: dict[Pass, tuple[Any, tuple]] = {
        "forward": (passes["forward"], whole),
        "backward": (lambda pull, cotangent: pull(cotangent), (pull, cotangent)),
        "both": (passes["both"], whole),
    }
    calls: dict[Pass, Call] = {}
    peaks: dict[Pass, int | None] = {}
    for name, (program, arguments) in programs.items():
        ready = jax.jit(program).lower(*arguments).compile()
        calls[name] = call_of(ready, *arguments)
        peaks[name] = peak_bytes(ready)
    return Candidate(calls, peaks)


def peak_bytes(program: "jax.stages.Compiled") -> int | None:
    """Return the bytes that a program needs on one device, if they are known."""
    memory = memory_of(program)
    return memory and memory.peak
