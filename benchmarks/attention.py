"""`attention`: the backends of attention by length: time and temporary memory.

Measures: `attend` alone, forward, and forward and backward in one program (pass `both`).
Against: `reference`, which every backend is divided by, and `products`: the matrix products that `chunked` makes of the
pairs of blocks that it visits, two forward and five backward, each as one batched product. The batch has at most
`_SCORES` scores, and its time is multiplied for all pairs.
For absent devices programs are only compiled, so there are no times.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Column, Panel, Report, Row, Table, log, points, ratio, split
from benchmarks.timing import call_of, measure, passes_of
from moezoo.kernels import blocks
from moezoo.kernels.attention import Operands, attend, chosen_backend, chunked
from moezoo.kernels.attention.base import Coordinates
from moezoo.kernels.attention.intervals import intervals
from moezoo.parallel.kernels import KernelOrder, Target, device_target
from moezoo.parallel.mesh import start
from moezoo.tools.absent import absent_devices, compile_for, memory_of

# A batch holds at most this many tokens, and at least one row.
_TOKENS = 1024
_PASSES = ("forward", "both")
# The most scores of one batched product. The allocator keeps results of this size, instead of asking for new pages.
_SCORES = 2**21
# `one_query` holds a matrix per query, so it is not for the many queries of these calls.
_BACKENDS = ("reference", "chunked")
# What a line of the table is about.
_CASE = ("device", "tokens", "rows", "pass")
# The keys that hold for all lengths: `group` query heads per key head, `documents` of random lengths per row.
_SIZES = ("kv_heads", "group", "head_dim", "value_dim", "documents", "window", "dtype")


def run(keys: Any) -> Report:
    """Time all backends, for each length and pass, or compile them for absent devices."""
    on_cpu = start()[0].platform == "cpu" and not keys.absent
    keys = dataclasses.replace(keys, dtype=keys.dtype or ("float32" if on_cpu else "bfloat16"))
    sizes = {name: getattr(keys, name) for name in _SIZES}
    devices = {target: absent_devices(target)[0] for target in keys.absent}
    devices = devices or {jax.devices()[0].device_kind: jax.devices()[0]}
    rows: list[Row] = []
    cases: Any = itertools.product(devices.items(), keys.tokens, _PASSES)
    for (kind, device), tokens, name in cases:
        log(f"{kind}, {tokens} tokens, {name}")
        operands = operands_of(tokens, keys)
        target = device_target(device)
        own = chosen_backend(target, tokens, tokens, dtype=keys.dtype)
        names = dict.fromkeys((*_BACKENDS, own))
        programs = {who: compile_for(device, _program(who, name, keys, target), *operands) for who in names}
        labels = {"part": "attention", "tokens": tokens, "rows": _rows(tokens), "sizes": sizes, "pass": name}
        found = {} if keys.absent else _time(programs, jax.device_put(operands, device), keys, name)
        for who, program in programs.items():
            memory = memory_of(program)
            assert memory is not None
            ms = found.get(who, {"ms": None, "ms_spread": None})
            rows.append({**labels, "implementation": who, "device": kind, **ms, "temporary_bytes": memory.temporaries})
    return report(rows)


def _time(programs: dict[str, jax.stages.Compiled], operands: Any, keys: Any, name: str) -> dict[str, Row]:
    """Add the products to `programs`; return the times of each program."""
    calls = {who: call_of(program, *operands) for who, program in programs.items()}
    programs["products"], factors, times = _products(name, keys, operands[1][0])
    calls["products"] = call_of(programs["products"], *factors)
    timings = measure(calls, seconds=keys.seconds, samples=keys.samples)
    return {who: timing.rounded(4, times if who == "products" else 1.0) for who, timing in timings.items()}


def _rows(tokens: int) -> int:
    return max(1, _TOKENS // tokens)


def operands_of(
    tokens: int, sizes: Any, rows: int | None = None
) -> tuple[tuple[np.ndarray, ...], tuple[Coordinates], np.ndarray]:
    """Return queries, keys and values; their positions and segments; the cotangent of the result.

    A batch has `rows` rows, or as many as make 1024 tokens.
    """
    rng, batch = np.random.default_rng(0), rows or _rows(tokens)
    heads = sizes.kv_heads, sizes.group
    shapes = (*heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.value_dim)
    *qkv, back = (
        rng.standard_normal((batch, tokens, *shape), np.float32).astype(jnp.dtype(sizes.dtype))
        for shape in (*shapes, (*heads, sizes.value_dim))
    )
    starts = np.zeros((batch, tokens), bool)
    starts[:, 0] = True
    for row in starts:
        row[rng.choice(np.arange(1, tokens), min(sizes.documents, tokens) - 1, replace=False)] = True
    at = np.arange(tokens, dtype=np.int32)
    position = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    at = Coordinates(jnp.asarray(position), jnp.cumsum(starts, axis=1, dtype=jnp.int32))
    return tuple(qkv), (at,), back


def call(q: Any, k: Any, v: Any, at: Coordinates, *, scale: float, window: int | None, implementation: Any) -> Any:
    """Return the result of one call of a backend."""
    return attend(
        Operands(q, k, v, at, at, window, intervals(at, at, window)), scale, implementation=implementation
    ).result


def _program(who: str, name: Any, sizes: Any, target: Target) -> Any:
    order = KernelOrder((who,), target)
    return passes_of(partial(call, scale=sizes.head_dim**-0.5, window=sizes.window, implementation=order))[name]


def _products(name: str, sizes: Any, at: Coordinates) -> tuple[jax.stages.Compiled, tuple[jax.Array, ...], float]:
    """Return the program of some of the products, its operands, and how many times as many there are in all."""
    target = device_target(jax.devices()[0])
    on_gpu = blocks.measured(chunked.ON_GPUS, "chunked", target) if target.platform in ("cuda", "rocm") else None
    own = on_gpu or chunked.on_cpu(at, at, sizes.kv_heads, sizes.group, sizes.window)
    pairs, queries, keys = chunked.count_pairs(at, at, sizes.window, own)
    heads, rows = pairs * sizes.kv_heads, sizes.group * queries
    batch = max(1, min(heads, _SCORES // (rows * keys)))
    shapes = (rows, sizes.head_dim), (keys, sizes.head_dim), (keys, sizes.value_dim), (rows, sizes.value_dim)
    draw = np.random.default_rng(0).standard_normal
    operands = tuple(jnp.asarray(draw((batch, *shape), np.float32), sizes.dtype) for shape in (*shapes, (rows, keys)))

    def dot(x: Any, y: Any, x_dim: int, y_dim: int) -> Any:
        return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)

    def call(q: Any, k: Any, v: Any, back: Any, weights: Any) -> list[Any]:
        results = [dot(q, k, 2, 2), dot(weights, v, 2, 1)]
        if name == "both":  # the scores again, in another order: a compiler drops a product that it has already
            results += [dot(k, q, 2, 2), dot(back, v, 2, 2), dot(weights, k, 2, 1)]
            results += [dot(q, weights, 1, 1), dot(back, weights, 1, 1)]
        return results

    return jax.jit(call).lower(*operands).compile(), operands, heads / batch


def _memory(who: str) -> Column:
    return Column(f"{who} MB", lambda line: line.get(f"{who} temporary_bytes"), ".4g", 1e6)


def report(rows: Sequence[Row]) -> Report:
    """Return a table with one line per device, length and pass; the picture has one panel per pass, times by length."""
    timed = rows[0]["ms"] is not None
    columns = [Column(name, name, "d" if name in ("tokens", "rows") else "") for name in _CASE]
    if timed:
        columns += [Column(f"{who} ms", f"{who} ms", ".4g") for who in _BACKENDS]
        columns.append(Column("ratio", ratio("chunked ms", "reference ms"), ".2f"))
        columns.append(Column("products ms", "products ms", ".4g"))
        columns.append(Column("of products", ratio("chunked ms", "products ms"), ".2f"))
    columns += [_memory(who) for who in _BACKENDS]
    columns += [Column("ratio", ratio("chunked temporary_bytes", "reference temporary_bytes"), ".2f")]
    others = {row["implementation"] for row in rows} - {*_BACKENDS, "products"}
    columns += [_memory(who) for who in sorted(others)]
    return report_by_length("attention", rows, _CASE, columns)


def report_by_length(title: str, rows: Sequence[Row], case: Sequence[str], columns: Sequence[Column]) -> Report:
    """Return a table with one line per `case`, in which keys have the implementation before them, and the picture."""
    lines = []
    for some in split(rows, lambda row: tuple(row[name] for name in case)).values():
        line = dict(some[0])
        for row in some:
            line |= {f"{row['implementation']} {key}": value for key, value in row.items() if key not in case}
        lines.append(line)
    title = f"{title}, " + " ".join(f"{key}={value}" for key, value in rows[0]["sizes"].items())
    panels = [
        Panel(f"{name}, ms per call", points(some, "tokens", "implementation", "ms"), lines="tokens per row")
        for name, some in split(rows, "pass").items()
    ]
    return Report(rows, [Table(title, columns, lines)], [panels] if rows[0]["ms"] is not None else [], title)
