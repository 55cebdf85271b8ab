"""`accelerator`: all that is worth knowing about one accelerator, in parts of minutes each that can be resumed.

| part | measures | next to |
|---|---|---|
| `parity` | agreement of kernels and models with definitions on the host (`benchmarks.agreement`) | |
| `products`, `layers` | a grouped product, an MoE layer, of six sizes | a matmul, `blocked`, XLA, tokamax, PyTorch |
| `attention` | causal attention, 32 query heads and 8 key heads of 128, 4k to 32k tokens | other backends, cuDNN |
| | one query per row over a cache of so many slots, of these heads and of 128 heads over latents | `reference` |
| `step` | a training step of two billion parameters in bfloat16, and where its time goes | the peak of the device |
| `generate` | greedy generation by that model | the bytes that it reads |

Every measurement is a unit; its rows are printed as lines of JSON and kept in `rows.jsonl` as soon as it is done.
Called again with the same folder, units that are there are not measured again. A part ends when its minutes are over,
and what is left is named. A unit that fails leaves a row with its error, and the next one follows.
"""

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import agreement, attention, generate, kernels, tuning
from benchmarks.results import Column, Panel, Report, Row, Table, log, points, split
from benchmarks.steps import Running, random_batch
from benchmarks.timing import call_of, compile_passes, measure
from moezoo.analysis.compiling import memory_of
from moezoo.analysis.work import model_flops
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.kernels.attention import Operands, attend, chosen_backend
from moezoo.kernels.attention.base import Coordinates
from moezoo.parallel.kernels import Target, device_target
from moezoo.parallel.mesh import start
from moezoo.profiling.profile import ORDER, profile
from moezoo.training.files import replace_text

# 10^12 products of bfloat16 numbers and additions per second, dense, as vendors state them; by a part of the name of
# the device.
PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, " NVL": 835, "H100": 989, "H200": 989, "B200": 2250}
PEAK_TFLOPS |= {"v5 lite": 197, "v5e": 197, "v5": 459, "v6 lite": 918, "v6e": 918}  # a v5p is a "TPU v5"
ROWS = "rows.jsonl"
# Two billion parameters of which 0.4 are active, and the same structure in numbers for a test.
MODEL = (
    "qwen3_moe model.vocab=32768 model.embed=2048 model.layers=6 model.heads=16 model.kv_heads=4 model.head_dim=128 "
    "model.experts=64 model.experts_per_token=8 model.expert_mlp=768 model.max_length=4096"
)
_ONE = "mesh=single execution.dtype=bfloat16"


def peak_of(kind: str) -> int | None:
    """Return the peak of a kind of device, or None if it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in kind), None)


class Size(NamedTuple):
    """What is measured at a size."""

    presets: tuple[str, ...]
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    heads: dict[str, int]
    model: str
    step: str
    calls: tuple[str, ...]


SIZES = {
    "full": Size(
        agreement.PRESETS,
        ("S2", "S3", "L1", "S1", "L2", "L3"),
        (4096, 8192, 16384, 32768),
        {"kv_heads": 8, "group": 4, "head_dim": 128, "value_dim": 128},
        MODEL,
        "batch_size=4 seq_len=4096",
        ("1x512x128", "8x512x128"),
    ),
    "tiny": Size(
        ("mixtral",),
        ("tiny",),
        (128,),
        {"kv_heads": 2, "group": 2, "head_dim": 32, "value_dim": 32},
        "qwen3_moe model.layers=1 model.embed=32 model.expert_mlp=32",
        "batch_size=1 seq_len=16",
        ("1x8x4",),
    ),
}


class Unit(NamedTuple):
    """One measurement: the part that it belongs to, its name there, and the function that yields its rows."""

    part: str
    name: str
    measure: Callable[[], Iterable[Row]]


def run(keys: Any, folder: Path) -> Report:
    """Measure what `folder` does not hold yet, and return all that it holds then.

    Raises `UserError` for `tune=true` on what is no GPU, and for a folder with rows of something else.
    """
    device = start()[0]
    target = device_target(device)
    name = keys.size or ("tiny" if target.platform == "cpu" else "full")
    size = SIZES[name]
    if keys.tune and target.capability is None:
        raise UserError(f"tune=true measures sizes for GPUs, and this is {target.platform}; leave it out")
    units = [unit for unit in _units(size, target, keys) if unit.part in (*keys.only, "tune")]
    path = folder / ROWS
    labels = {"device": device.device_kind, "size": name}
    rows = _read(path, labels)
    failed = {(row["part"], row["unit"]) for row in rows if "error" in row}
    done = {(row["part"], row["unit"]) for row in rows} - failed
    began: dict[str, float] = {}
    for unit in units:
        if unit[:2] in done:
            log(f"{unit.part} {unit.name}: measured before")
            _use(unit, rows, folder)
            continue
        minutes = (time.monotonic() - began.setdefault(unit.part, time.monotonic())) / 60
        if minutes > keys.minutes:
            log(f"{unit.part} {unit.name}: left, the part has run for {minutes:.0f} minutes; out={folder} goes on")
            continue
        found = _rows(unit, labels)
        # What it left when it failed is replaced only now, because not every call comes to it.
        rows = [row for row in rows if (row["part"], row["unit"]) != unit[:2]] + found
        print(*map(json.dumps, found), sep="\n", flush=True)
        # As a whole, so that a call that is killed leaves no part of a unit.
        replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        jax.clear_caches()
        _use(unit, rows, folder)
    return report(rows)


def _use(unit: Unit, rows: Sequence[Row], folder: Path) -> None:
    """Write the table of sizes if they are what the unit measures: the units after it run with them."""
    if unit.part == "tune":
        tuning.write(tuning.table_of(rows), folder)


def check(rows: Sequence[Row], folder: Path) -> None:
    """Raise `UserError` if something failed or disagrees."""
    failed = sum("error" in row for row in rows)
    apart = sum(row.get("agrees") is False for row in rows)
    if failed or apart:
        raise UserError(f"accelerator: {failed} measurements failed and {apart} results disagree; see {folder / ROWS}")


def _read(path: Path, labels: Mapping[str, str]) -> list[Row]:
    """Return the rows of earlier calls. Raises `UserError` for other lines, and if their labels are others."""
    rows = []
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            row = None
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
            if not (isinstance(row, dict) and {"part", "unit", *labels} <= row.keys()):
                raise ValueError(f"line {number} is no row of it")
            rows.append(row)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not as accelerator leaves it ({error}); name another folder") from None
    for name, own in labels.items():
        if other := [row[name] for row in rows if row[name] != own]:
            raise UserError(f"{path} has rows of {name} {other[0]}, and this is {own}; name another folder")
    return rows


def _rows(unit: Unit, labels: Mapping[str, str]) -> list[Row]:
    """Return the rows of a unit; one with the error if it fails."""
    log(f"{unit.part} {unit.name}")
    labels = {"unit": unit.name, **labels, "jax": jax.__version__, "date": f"{datetime.date.today()}"}
    try:
        found = list(unit.measure())
    except Exception as error:  # the next units do not depend on it
        found = [_failed("", error)]
    return [{**row, "part": unit.part, **labels} for row in found]


def _failed(who: str, error: Exception) -> Row:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    log(f"{who}: {text}" if who else text)
    return {"implementation": who, "error": text}


def _units(size: Size, target: Target, keys: Any) -> Iterator[Unit]:
    """Yield all units, what is most worth knowing first."""
    yield Unit("parity", "all", partial(agreement.rows, size.presets))
    if keys.tune:
        yield Unit("tune", "layers", partial(tuning.tune, target, size.shapes[:3], keys))
    for part, kind in (("products", "grouped_matmul"), ("layers", "moe_layer")):
        for name in size.shapes:
            yield Unit(part, name, partial(_kernel, kind, name, keys))
    for tokens in size.tokens:
        yield Unit("attention", f"{tokens}", partial(_attention, tokens, size, target, keys))
    for tokens in size.tokens:
        yield Unit("attention", f"decode {tokens}", partial(_decode, tokens, size, keys))
    yield Unit("step", "all", partial(_step, size, target, keys))
    yield Unit("generate", "all", partial(_generate, size, keys))


def _kernel(kind: str, name: str, keys: Any) -> Iterator[Row]:
    failures: list[Row] = []
    failed = lambda who, error: failures.append(_failed(who, error))  # noqa: E731
    for row in kernels.rows_of(kind, name, "uniform", "bfloat16", keys.timed(), failed):
        yield {**row, "name": name}
    yield from failures


def _attention(tokens: int, size: Size, target: Target, keys: Any) -> Iterator[Row]:
    heads = size.heads
    qkv, (at,), back = attention.operands_of(tokens, keys.timed(**heads, documents=1, window=None, dtype="bfloat16"))
    qkv, back = jax.device_put((qkv, back))
    own = chosen_backend(target, tokens, tokens)

    def of_backend(name: str) -> Callable[..., Any]:
        return lambda q, k, v: attention.call(
            q, k, v, at, scale=heads["head_dim"] ** -0.5, window=None, implementation=name
        )

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        result = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return result.reshape(back.shape)

    functions = {f"moezoo {name}": of_backend(name) for name in dict.fromkeys((own, "chunked", "reference"))}
    functions |= {"cudnn": cudnn} if target.platform == "cuda" else {}
    # Of each query, on average half of the keys: two products forward, five backward.
    rows = qkv[0].shape[0]
    flops = 2 * rows * tokens * (tokens + 1) / 2 * heads["kv_heads"] * heads["group"]
    flops *= heads["head_dim"] + heads["value_dim"]
    candidates = {}
    for who, function in functions.items():
        try:
            candidates[who] = compile_passes(function, tuple(qkv), (), back)
        except Exception as error:
            yield _failed(who, error)
    for passed in ("forward", "both"):
        calls = {who: each.calls[passed] for who, each in candidates.items()}
        for who, timing in measure(calls, seconds=keys.seconds, samples=keys.samples).items():
            work = flops * (1.0 if passed == "forward" else 3.5)
            yield {
                "name": f"{tokens}",
                "implementation": who,
                "pass": passed,
                "tokens": tokens,
                "dtype": "bfloat16",
                **timing.rounded(4),
                "tflops": round(work / timing.ms / 1e9, 5),
                "peak_bytes": candidates[who].peak_bytes[passed],
            }


def _decode(slots: int, size: Size, keys: Any) -> Iterator[Row]:
    """Time one query for each of 8 rows over a cache as generation stores it: [batch, heads, slots, dim]."""
    rows, heads = 8, size.heads
    grouped = {"heads": (heads["kv_heads"], heads["group"]), "dims": (heads["head_dim"], heads["value_dim"])}
    for kind, heads, dims in (("grouped", *grouped.values()), ("latent", (1, 128), (576, 576))):
        draw = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
        shapes = (rows, 1, *heads, dims[0]), (rows, heads[0], slots, dims[0])
        q, k = (jax.device_put(draw(shape).astype(jnp.bfloat16)) for shape in shapes)
        # A latent's keys are its values.
        v = k if kind == "latent" else jax.device_put(draw((*k.shape[:3], dims[1])).astype(jnp.bfloat16))
        at = Coordinates(*(jnp.full((rows, 1), n, jnp.int32) for n in (slots, 1)))
        key_at = Coordinates(*(jnp.broadcast_to(x, (rows, slots)) for x in (jnp.arange(slots), jnp.int32(1))))
        calling = {name: partial(_one_query, name) for name in ("one_query", "reference")}
        programs = {name: jax.jit(call).lower(q, k, v, at, key_at).compile() for name, call in calling.items()}
        calls = {name: call_of(program, q, k, v, at, key_at) for name, program in programs.items()}
        for name, timing in measure(calls, seconds=keys.seconds, samples=keys.samples).items():
            memory = memory_of(programs[name])
            tflops = 2 * rows * math.prod(heads) * slots * sum(dims) / timing.ms / 1e9
            read = k.nbytes + (0 if kind == "latent" else v.nbytes)
            yield {
                "name": f"{slots} {kind}",
                "implementation": f"moezoo {name}",
                "pass": "decode",
                "tokens": slots,
                "dtype": "bfloat16",
                **timing.rounded(4),
                "tflops": round(tflops, 5),
                "gigabytes_per_second": round(read / timing.ms / 1e6, 3),
                "peak_bytes": None if memory is None else memory.peak,
            }


def _one_query(name: str, q: Any, k: Any, v: Any, at: Coordinates, key_at: Coordinates) -> Any:
    operands = Operands(q, k.swapaxes(1, 2), v.swapaxes(1, 2), at, key_at, None)
    return attend(operands, 0.1, implementation=name).result


def _step(size: Size, target: Target, keys: Any) -> Iterator[Row]:
    cfg = compose(*f"model={size.model} {size.step} {_ONE}".split())
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    running = Running(cfg)
    call = partial(running.run, random_batch(running))
    timing = measure({"step": call}, seconds=keys.seconds, samples=keys.samples)["step"]
    flops, tokens = model_flops(cfg), cfg.batch_size * cfg.seq_len
    tflops = flops / timing.ms / 1e9
    peak = peak_of(jax.devices()[0].device_kind)
    yield {
        "implementation": "moezoo",
        "settings": f"model={size.model} {size.step} {_ONE}",
        **timing.rounded(3),
        "tokens_per_second": round(tokens / timing.ms * 1e3, 1),
        "tflops": round(tflops, 5),
        "utilisation": round(tflops / peak, 4) if peak else None,
        "peak_bytes": running.peak,
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    if target.platform not in ("cpu", "cuda"):
        log(f"no profile: traces of {target.platform} are not read")
        return
    whole, parts = profile(call, 3, str(running.compiled.as_text()))
    for name in ORDER:
        if name in parts:
            ms = sum(parts[name].values())
            yield {"implementation": "profile", "scope": name, "ms": round(ms, 4), "share": round(ms / whole, 5)}


def _generate(size: Size, keys: Any) -> Sequence[Row]:
    called = keys.generation(model=(size.model,), call=size.calls, layout=("mesh=single",), dtype="bfloat16")
    return [{**row, "implementation": "moezoo"} for row in generate.run(called).rows]


def report(rows: Sequence[Row]) -> Report:
    """Return a table per part; the picture has TFLOP/s of products and layers, times of attention, and the profile."""
    by = split([row for row in rows if "error" not in row], "part")
    timed = [Column("ms", "ms", ".4g"), Column("spread", "ms_spread", ".2g"), Column("TFLOP/s", "tflops", ".3f")]
    memory = Column("peak GB", "peak_bytes", ".2f", 1e9)
    cache = Column("GB/s of the cache", lambda row: row.get("gigabytes_per_second"), ".1f")
    who = Column("implementation", "implementation")
    case = [Column("size", "name"), Column("pass", "pass"), who]
    steps = [row for row in by.get("step", []) if "scope" not in row]
    scopes = [row for row in by.get("step", []) if "scope" in row]
    share = Column("of matmul", "share_of_matmul", ".0%")
    columns: list[tuple[str, list[Row], list[Column]]] = [
        ("parity", by.get("parity", []), [who, Column("result", "result"), Column("dtype", "dtype")]),
        ("tune", by.get("tune", []), [who, Column("sizes", lambda row: str(row["sizes"])), Column("ms", "ms", ".4g")]),
        *((part, by.get(part, []), [*case, *timed, share, memory]) for part in ("products", "layers")),
        ("attention", by.get("attention", []), [*case, *timed, cache, memory]),
        ("step", steps, [*timed, Column("tokens/s", "tokens_per_second", ",.0f")]),
        ("profile of the step", scopes, [Column("scope", "scope"), Column("ms", "ms", ".2f")]),
    ]
    columns[0][2].extend([Column("roundings", "roundings", ".2f"), Column("bound", "bound", ".0f")])
    columns[0][2].append(Column("agrees", lambda row: "yes" if row["agrees"] else "NO"))
    columns[5][2].extend([Column("of peak", "utilisation", ".1%"), memory])
    columns[6][2].append(Column("share", "share", ".1%"))
    tables = [Table(title, some, lines) for title, lines, some in columns if lines]
    tables += generate.report(by["generate"], "layout").tables if "generate" in by else []
    if failures := [row for row in rows if "error" in row]:
        wide = [Column("part", "part"), Column("unit", "unit"), who, Column("error", "error")]
        tables.append(Table("failed", wide, failures))
    panels = [
        Panel(f"{part}, {passed}, TFLOP/s", points(some, "name", "implementation", "tflops"))
        for part in ("products", "layers", "attention")
        for passed, some in split(by.get(part, []), "pass").items()
    ]
    if scopes:
        panels.append(Panel("ms per step", {row["scope"]: {"": row["ms"]} for row in scopes}))
    kind = rows[0]["device"] if rows else ""
    return Report(rows, tables, [[panel] for panel in panels], f"accelerator: {kind}, bfloat16")
