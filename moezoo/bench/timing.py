"""Time several calls alternately, so that other load on the machine affects all of them."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Runs the work and returns when it is done.
Call = Callable[[], Any]

_SHORTEST = 0.02  # seconds per sample at least; much longer than reading the clock


class Timing(NamedTuple):
    """Milliseconds per call: the median of the samples and their interquartile range."""

    ms: float
    spread: float


def measure(calls: dict[str, Call], *, seconds: float, samples: int) -> dict[str, Timing]:
    """Time all calls alternately, one sample of each per round, after a warm-up.

    A call gets at least one sample. It leaves when it has `samples` samples or has run for `seconds`.
    """
    repeats = {}
    for name, call in calls.items():
        call()  # compiles and allocates
        repeats[name] = max(1, math.ceil(_SHORTEST / _seconds(call, 1)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    waiting = set(calls)
    while waiting:
        for name in [n for n in calls if n in waiting]:
            taken[name].append(_seconds(calls[name], repeats[name]))
            if len(taken[name]) >= samples or sum(taken[name]) * repeats[name] >= seconds:
                waiting.remove(name)
    return {name: _timing(values) for name, values in taken.items()}


def _seconds(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _timing(seconds: list[float]) -> Timing:
    low, middle, high = np.percentile(seconds, (25, 50, 75)) * 1e3
    return Timing(float(middle), float(high - low))
