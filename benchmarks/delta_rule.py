"""`delta_rule`: the gated delta rule by length, beside attention of equal width: time and temporary memory.

Measures: `delta_rule` in chunks, with one decay per head and with one per channel, forward, and forward and backward in
one program (pass `both`). Against: `attention`, by the backend that the device takes by itself, by default with as many
query heads as there are value heads and as many key heads; all documents of a row as long as the row.

For absent devices programs are only compiled. Then rows have the loops of the program, and the bytes that it reads and
writes (`moezoo.profiling.hlo.moved`) divided by those of its arguments and results, which is 1 at the least.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention
from benchmarks.results import Column, Report, Row, log, ratio
from benchmarks.timing import call_of, measure, passes_of
from moezoo.kernels.delta_rule import Operands, delta_rule
from moezoo.parallel.kernels import KernelOrder, Target, device_target
from moezoo.parallel.mesh import start
from moezoo.profiling.hlo import moved
from moezoo.tools.absent import absent_devices, compile_for, memory_of

_PASSES = ("forward", "both")
_IMPLEMENTATIONS = ("per_head", "per_channel", "attention")
_CASE = ("device", "tokens", "pass")
_SIZES = ("key_heads", "group", "head_dim", "dtype")


def run(keys: Any) -> Report:
    """Time all of them, for each length and pass, or compile them for absent devices."""
    on_cpu = start()[0].platform == "cpu" and not keys.absent
    keys = dataclasses.replace(keys, dtype=keys.dtype or ("float32" if on_cpu else "bfloat16"))
    sizes = {name: getattr(keys, name) for name in _SIZES}
    devices = {target: absent_devices(target)[0] for target in keys.absent}
    devices = devices or {jax.devices()[0].device_kind: jax.devices()[0]}
    rows: list[Row] = []
    cases: Any = itertools.product(devices.items(), keys.tokens, _PASSES)
    for (kind, device), tokens, name in cases:
        log(f"{kind}, {tokens} tokens, {name}")
        target = device_target(device)
        programs, operands = {}, {}
        for who in _IMPLEMENTATIONS:
            function, operands[who] = _call(who, tokens, keys, target)
            programs[who] = compile_for(device, passes_of(function)[name], *operands[who])
        found: dict[str, Row] = {}
        if not keys.absent:
            calls = {who: call_of(program, *operands[who]) for who, program in programs.items()}
            timings = measure(calls, seconds=keys.seconds, samples=keys.samples)
            found = {who: timing.rounded(4) for who, timing in timings.items()}
        labels = {"part": "delta_rule", "tokens": tokens, "sizes": sizes, "pass": name, "device": kind}
        for who, program in programs.items():
            memory = memory_of(program)
            assert memory is not None
            ms = found.get(who, {"ms": None, "ms_spread": None})
            row = {**labels, "implementation": who, **ms, "temporary_bytes": memory.temporaries}
            if keys.absent:
                total = moved(str(program.as_text()))
                row |= {"loops": total.loops, "moved_times": round(total.bytes / total.least, 1)}
            rows.append(row)
    return report(rows)


def _call(who: str, tokens: int, keys: Any, target: Target) -> tuple[Any, tuple[Any, ...]]:
    """Return a function, and its operands: differentiable ones, others, and the cotangent of its result."""
    heads, group, dim = keys.key_heads, keys.group, keys.head_dim
    if who == "attention":
        heads, group, dim = keys.attention_heads or (heads, group, dim)
        sizes = SimpleNamespace(
            kv_heads=heads, group=group, head_dim=dim, value_dim=dim, documents=1, dtype=keys.dtype, window=None
        )
        order = KernelOrder((), target)
        attend = partial(attention.call, scale=dim**-0.5, window=None, implementation=order)
        return attend, attention.operands_of(tokens, sizes, 1)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((1, tokens, heads, *shape), np.float32)  # noqa: E731
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (draw(dim), draw(dim)))
    v, back = draw(group, dim), draw(group, dim)
    decay = -np.exp(draw(group, *(dim,) * (who == "per_channel")))
    narrow = [x.astype(jnp.dtype(keys.dtype)) for x in (q, k, v, back)]
    strength = 1 / (1 + np.exp(-draw(group)))

    def call(q: Any, k: Any, v: Any, decay: Any, strength: Any, segment: Any) -> Any:
        order = KernelOrder(("chunked",), target)
        return delta_rule(Operands(q, k, v, decay, strength, segment), implementation=order).result

    segment = jnp.ones((1, tokens), jnp.int32)
    return call, ((*narrow[:3], decay, strength), (segment,), narrow[3])


def report(rows: Sequence[Row]) -> Report:
    """Return a table with one line per device, length and pass; the picture has one panel per pass, times by length."""
    timed = rows[0]["ms"] is not None
    columns = [Column(name, name, "d" if name == "tokens" else "") for name in _CASE]
    for key, unit, scale in ((("ms", "ms", 1.0),) if timed else ()) + (("temporary_bytes", "MB", 1e6),):
        columns += [
            Column(f"{who} {unit}", lambda line, name=f"{who} {key}": line[name], ".4g", scale)
            for who in _IMPLEMENTATIONS
        ]
        columns.append(Column("of attention", ratio(f"per_head {key}", f"attention {key}"), ".2f"))
    for title, key, form in () if timed else (("loops", "loops", "d"), ("moved", "moved_times", ".1f")):
        columns += [Column(f"{who} {title}", f"{who} {key}", form) for who in _IMPLEMENTATIONS]
    return attention.report_by_length("delta rule", rows, _CASE, columns)
