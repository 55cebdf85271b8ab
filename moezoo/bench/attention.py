"""Benchmark of the attention backends: time and temporary memory by sequence length.

Measures: `attend` alone, forward, and forward and backward in one program (pass `both`).
Against: `reference`, which every backend is divided by, and `products`: the matrix products that `chunked` makes of the
pairs of blocks that it visits, two forward and five backward, each as one batched product. The batch has at most
`_SCORES` scores, and its time is multiplied for all pairs.
Columns: device; tokens per row; rows; pass; per backend the milliseconds per call (median) and the MB of temporaries
that the compiled program needs on one device; `ratio`, a backend's value divided by the value of `reference`; `of
products`, the milliseconds of `chunked` divided by those of `products`.
For absent devices programs are only compiled, so there are no times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.timing import measure
from moezoo.kernels.attention import Implementation, attend, chunked
from moezoo.kernels.attention.base import Place
from moezoo.parallel.absent import absent_devices

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# A batch holds at most this many tokens, and at least one row.
_TOKENS = 1024
_PASSES = ("forward", "both")
# The most scores of one batched product. The allocator keeps results of this size, instead of asking for new pages.
_SCORES = 2**21


# `one_query` holds a matrix per query, so it is not for the many queries of these calls.
_BACKENDS: tuple[Implementation, ...] = ("reference", "chunked")


class Sizes(NamedTuple):
    """Sizes that hold for all lengths: `group` query heads per key head, `documents` of random lengths per row."""

    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    documents: int
    window: int | None
    dtype: str


Measurement = TypedDict(
    "Measurement",
    {
        "part": str,
        "tokens": int,
        "rows": int,
        "sizes": Mapping[str, Any],
        "pass": str,
        "implementation": str,
        "device": str,
        "ms": float | None,
        "ms_spread": float | None,
        "temporary_bytes": int,
    },
)


def compare_attention(
    lengths: Sequence[int], sizes: Sizes, seconds: float, samples: int, log: Callable[[str], None]
) -> Iterator[Measurement]:
    """Time all backends alternately, for each length and pass."""
    device = jax.devices()[0]
    for tokens in lengths:
        arguments = jax.device_put(_operands(tokens, sizes), device)
        for name in _PASSES:
            log(f"{tokens} tokens, {name}")
            programs = {who: _compile(who, name, sizes, arguments) for who in _BACKENDS}
            calls = {who: partial(_wait, program, *arguments) for who, program in programs.items()}
            programs["products"], operands, times = _products(name, sizes, arguments[1])
            calls["products"] = partial(_wait, programs["products"], *operands)
            timings = measure(calls, seconds=seconds, samples=samples)
            for who, timing in timings.items():
                row = _row(tokens, sizes, name, who, device.device_kind, programs[who])
                scale = times if who == "products" else 1
                row.update(ms=round(scale * timing.ms, 4), ms_spread=round(scale * timing.spread, 4))
                yield row


def compile_attention(
    targets: Sequence[str], lengths: Sequence[int], sizes: Sizes, log: Callable[[str], None]
) -> Iterator[Measurement]:
    """Compile the same programs for absent devices; `targets` are names of `moezoo.parallel.absent`."""
    for target in targets:
        there = NamedSharding(Mesh(np.asarray(absent_devices(target)[:1]), ("x",)), PartitionSpec())
        for tokens in lengths:
            shapes = jax.tree.map(partial(_shape, there), _operands(tokens, sizes))
            for name in _PASSES:
                log(f"{target}, {tokens} tokens, {name}")
                for who in _BACKENDS:
                    yield _row(tokens, sizes, name, who, target, _compile(who, name, sizes, shapes))


def _shape(sharding: NamedSharding, x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _wait(program: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(program(*arguments))


def _rows(tokens: int) -> int:
    return max(1, _TOKENS // tokens)


def _operands(tokens: int, sizes: Sizes) -> tuple[tuple[np.ndarray, ...], Place, np.ndarray]:
    """Return queries, keys and values; their positions and segments; the cotangent of the result."""
    rng, batch = np.random.default_rng(0), _rows(tokens)
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
    place = Place(jnp.asarray(position), jnp.cumsum(starts, axis=1, dtype=jnp.int32))
    return tuple(qkv), place, back


def _compile(who: str, name: str, sizes: Sizes, arguments: Any) -> jax.stages.Compiled:
    def run(qkv: tuple[Any, Any, Any], place: Place) -> Any:
        options: Any = {"scale": sizes.head_dim**-0.5, "window": sizes.window, "implementation": who}
        q, k, v = qkv
        return attend(q, k, v, queries=place, keys=place, **options).result

    def forward(qkv: Any, place: Place, back: Any) -> Any:
        del back
        return run(qkv, place)

    def both(qkv: Any, place: Place, back: Any) -> Any:
        result, pull = jax.vjp(lambda qkv: run(qkv, place), qkv)
        return result, pull(back)

    return jax.jit({"forward": forward, "both": both}[name]).lower(*arguments).compile()


def _products(name: str, sizes: Sizes, place: Place) -> tuple[jax.stages.Compiled, tuple[jax.Array, ...], float]:
    """Return the program of some of the products, its operands, and how many times as many there are in all."""
    pairs, queries, keys = chunked.count_pairs(place, place, sizes.window)
    heads, rows = pairs * sizes.kv_heads, sizes.group * queries
    batch = max(1, min(heads, _SCORES // (rows * keys)))
    shapes = (rows, sizes.head_dim), (keys, sizes.head_dim), (keys, sizes.value_dim), (rows, sizes.value_dim)
    draw = np.random.default_rng(0).standard_normal
    operands = tuple(jnp.asarray(draw((batch, *shape), np.float32), sizes.dtype) for shape in (*shapes, (rows, keys)))

    def dot(x: Any, y: Any, x_dim: int, y_dim: int) -> Any:
        return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)

    def run(q: Any, k: Any, v: Any, back: Any, weights: Any) -> list[Any]:
        results = [dot(q, k, 2, 2), dot(weights, v, 2, 1)]
        if name == "both":  # the scores again, in another order: a compiler drops a product that it has already
            results += [dot(k, q, 2, 2), dot(back, v, 2, 2), dot(weights, k, 2, 1)]
            results += [dot(q, weights, 1, 1), dot(back, weights, 1, 1)]
        return results

    return jax.jit(run).lower(*operands).compile(), operands, heads / batch


def _row(tokens: int, sizes: Sizes, name: str, who: str, device: str, program: jax.stages.Compiled) -> Measurement:
    memory = program.memory_analysis()
    assert memory is not None
    return {
        "part": "attention",
        "tokens": tokens,
        "rows": _rows(tokens),
        "sizes": sizes._asdict(),
        "pass": name,
        "implementation": who,
        "device": device,
        "ms": None,
        "ms_spread": None,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _cases(results: Sequence[Measurement]) -> dict[tuple[str, int, int, str], dict[str, Measurement]]:
    """Group results by device, tokens, rows and pass; then by backend."""
    cases: dict[tuple[str, int, int, str], dict[str, Measurement]] = {}
    for row in results:
        case = row["device"], row["tokens"], row["rows"], row["pass"]
        cases.setdefault(case, {})[row["implementation"]] = row
    return cases


def print_table(results: Sequence[Measurement], console: Console) -> None:
    """Print one line per device, length and pass."""
    every = list(dict.fromkeys(row["implementation"] for row in results))
    who = [w for w in every if w != "products"]
    others = [w for w in who if w != "reference"]
    sizes = " ".join(f"{key}={value}" for key, value in results[0]["sizes"].items())
    columns = ["device", "tokens", "rows", "pass"]
    timed = any(row["ms"] is not None for row in results)
    for unit in ("ms", "MB") if timed else ("MB",):
        columns += [f"{w} {unit}" for w in who] + ["ratio"] * len(others)
        columns += ["products ms", "of products"] if unit == "ms" else []
    table = Table(*columns, title=f"attention, {sizes}", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for case, rows in _cases(results).items():
        line = [str(x) for x in case]
        bytes_ = {w: rows[w]["temporary_bytes"] / 1e6 for w in who}
        ms = {w: rows[w]["ms"] or 0.0 for w in every}
        for values in (ms, bytes_) if timed else (bytes_,):
            line += [f"{values[w]:.4g}" for w in who]
            line += [f"{values[w] / values['reference']:.2f}" if values["reference"] else "" for w in others]
            if values is ms:
                line += [f"{ms['products']:.4g}", f"{ms['chunked'] / ms['products']:.2f}"]
        table.add_row(*line)
    console.print(table)


def picture(results: Sequence[Measurement], path: Path) -> None:
    """Plot time over length: one panel per pass, one line per backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(_PASSES)), _PASSES, strict=True):
        for who in dict.fromkeys(row["implementation"] for row in results):
            points = [(r["tokens"], r["ms"]) for r in results if (r["pass"], r["implementation"]) == (name, who)]
            axes.loglog(*zip(*points, strict=True), marker="o", label=who)
        axes.set(title=name, xlabel="tokens per row", ylabel="ms per call")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
