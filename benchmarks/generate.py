"""`generate`: greedy generation of random models, alternately in one process.

Against: transformers with the same folder and prompts, whose figures are empty where it is not installed; or, with
`layout=`, the first layout.
"""

import dataclasses
import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Column, Panel, Report, Row, Table, log, points, split, spread
from benchmarks.steps import overrides
from benchmarks.timing import Call, Timing, call_of, measure
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.generation.generate import generate, round_up
from moezoo.hub.saving import save_pretrained
from moezoo.models import build_model
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.mesh import start
from moezoo.parallel.mesh_execution import place
from moezoo.tools.parity.peer import load_peer
from moezoo.tools.sharding.describe import describe

OURS, THEIRS = "moezoo", "transformers"
# How often calls are timed, each time with twice the samples, until a longer one takes longer than a shorter one.
_TRIES = 3


class Shape(NamedTuple):
    """Rows, prompt tokens per row and new tokens per row of a call."""

    rows: int
    prompt: int
    new: int


def run(keys: Any) -> Report:
    """Time greedy calls of random models in all shapes: next to transformers in float32, or under layouts.

    Raises `UserError` where words do not compose or fit together, or a call is too long or too short. Nothing has run
    then.
    """
    shapes = [Shape(*numbers) for numbers in keys.calls]
    dtype = [f"execution.dtype={keys.dtype}"] if keys.dtype else []
    configs = {
        (name, layout): compose(*overrides("model", words), *layout.split(), *dtype)
        for name, words in keys.models.items()
        for layout in keys.layout or [""]
    }
    for ((name, _), cfg), shape in itertools.product(configs.items(), shapes):
        called = f"call={'x'.join(map(str, shape))}: "
        if shape.prompt + shape.new > cfg.model.longest.tokens:
            tokens = f"{shape.prompt + shape.new} tokens exceed {cfg.model.longest} of {name}"
            raise UserError(f"{called}{tokens}; choose fewer tokens")
        if keys.layout and shape.new < 2:
            raise UserError(f"{called}needs two or more new tokens; choose other numbers, such as {shape.rows}x32x64")
    start(max(cfg.mesh.devices for cfg in configs.values()))
    executions = {key: build_execution(cfg, batches="any") for key, cfg in configs.items()}
    rows: list[Row] = []
    for name in keys.models:
        log(f"{name}: making the model")
        # Random weights: logits are far apart, so that rounding hardly ever decides a token.
        model = build_model(configs[name, (keys.layout or [""])[0]].model, key=jax.random.key(0))
        if keys.layout:
            ways = {one: executions[name, one] for one in keys.layout}
            placed = {one: (configs[name, one], execution, place(model, execution)) for one, execution in ways.items()}
            compare: Any = partial(_compare_layouts, placed)
        else:
            compare = partial(_compare_peer, model, _load_peer(model))
        for shape in shapes:
            log(f"{name}: {shape.rows} x {shape.prompt} + {shape.new}")
            rows += compare({"model": name, **shape._asdict()}, shape, keys)
    return report(rows, "layout" if keys.layout else "implementation")


def _load_peer(model: Any) -> Any:
    """Return transformers' model with the same weights; None where it is not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, Path(folder))
        theirs = load_peer(Path(folder), attention="sdpa", experts="grouped_mm")
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    return theirs


def _prompts(model: Any, shape: Shape) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.vocab, (shape.rows, shape.prompt)).astype(np.int32)


def _compare_peer(model: Any, theirs: Any, labels: Row, shape: Shape, keys: Any) -> Iterator[Row]:
    ids = _prompts(model, shape)
    calls_of: dict[str, Callable[[int], np.ndarray]] = {OURS: lambda new: generate(model, ids, max_new_tokens=new)}
    if theirs is not None:
        calls_of[THEIRS] = partial(_continue, theirs, ids)
    jax.clear_caches()
    first, tokens = {}, {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        for who, call in calls_of.items():
            began = time.perf_counter()
            tokens[who] = call(shape.new)
            first[who] = time.perf_counter() - began
        jax.clear_caches()  # as in a new process
        began = time.perf_counter()
        calls_of[OURS](shape.new)
        loaded = round(time.perf_counter() - began, 3)
    short = next(new for new in range(1, shape.new + 1) if round_up(new) == round_up(shape.new))
    read = _read_bytes(model, shape.rows)
    calls: dict[str, Call] = {"floor": _reading(read)}
    for who, call in calls_of.items():
        calls |= {who: partial(call, shape.new), f"{who} short": partial(call, short)}
    differ = [(who, f"{who} short") for who in calls_of if short < shape.new]
    taken = _measure(calls, differ, keys)
    for who in calls_of:
        each = _per_token(taken, who, f"{who} short", shape.new - short) if differ else None
        prompt = 0 if each is None else taken[who].ms - (shape.new - 1) * each
        yield {
            **labels,
            "implementation": who,
            **taken[who].rounded(3),
            "cpu_ms": round(taken[who].cpu_ms, 3),
            "ms_per_token": None if each is None else round(each, 3),
            "ms_prompt": round(prompt, 3) if prompt > 0 else None,
            "first_seconds": round(first[who], 3),
            "loaded_seconds": loaded if who == OURS else None,
            "read_bytes": read,
            "ms_floor": round(taken["floor"].ms, 3),
            "ratio": round(taken[THEIRS].ms / taken[who].ms, 3) if theirs is not None else None,
            "cpu_ratio": round(taken[THEIRS].cpu_ms / taken[who].cpu_ms, 3) if theirs is not None else None,
            "same_rows": int((tokens[who] == tokens[THEIRS]).all(1).sum()) if theirs is not None else None,
            "device": jax.devices()[0].device_kind,
        }


def _measure(calls: dict[str, Call], differ: Sequence[tuple[str, str]], keys: Any) -> dict[str, Timing]:
    """Time calls, and again with more samples while noise hides that the first of a pair does more than the second."""
    for turn in range(_TRIES):
        taken = measure(calls, seconds=keys.seconds * 2**turn, samples=keys.samples * 2**turn)
        if all(taken[longer].ms > taken[shorter].ms for longer, shorter in differ):
            break
    return taken


def _per_token(taken: dict[str, Timing], longer: str, shorter: str, tokens: int) -> float | None:
    """Return the milliseconds of each of `tokens`, which one call makes more than the other; None if noise is more."""
    difference = taken[longer].ms - taken[shorter].ms
    return difference / tokens if difference > 0 else None


def _continue(model: Any, ids: np.ndarray, new: int) -> np.ndarray:
    import torch

    tokens = torch.tensor(ids.astype(np.int64))
    with torch.no_grad():
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
    return found.numpy()


def _read_bytes(model: Any, rows: int) -> int:
    """Return the bytes of the weights that one more token of each row reads, if all rows choose different experts."""
    c = model.config
    _, active = count_parameters(model, min(c.experts, rows * c.experts_per_token))
    return 4 * (active - c.looked_up)


def _reading(size: int) -> Call:
    """Return a call that reads `size` bytes with all cores and writes a sixteenth."""
    numbers = jnp.ones((16, size // 64), jnp.float32)
    add = jax.jit(lambda x: sum(x[1:], start=x[0])).lower(numbers).compile()
    return call_of(add, numbers)


def _compare_layouts(placed: dict[str, Any], labels: Row, shape: Shape, keys: Any) -> Iterator[Row]:
    """Time calls of a model in several layouts: name -> configuration, execution and model."""
    first, calls, half = next(iter(placed)), {}, shape.new // 2
    ids = _prompts(placed[first][2], shape)
    for layout, (_, execution, model) in placed.items():
        call = partial(generate, model, ids, execution=execution)
        calls |= {layout: partial(call, max_new_tokens=shape.new), f"{layout} half": partial(call, max_new_tokens=half)}
    tokens = {layout: calls[layout]() for layout in placed}
    taken = _measure(calls, [(layout, f"{layout} half") for layout in placed], keys)
    per_token = {layout: _per_token(taken, layout, f"{layout} half", shape.new - half) for layout in placed}
    base = per_token[first]
    for layout, (cfg, _, _) in placed.items():
        each = per_token[layout]
        described = describe(dataclasses.replace(cfg, batch_size=shape.rows, seq_len=shape.prompt), "decode")
        yield {
            **labels,
            "layout": layout,
            **taken[layout].rounded(3),
            "ms_per_token": None if each is None else round(each, 3),
            "speed": round(base / each, 3) if base and each else None,
            "stored_bytes": sum(row.bytes_per_device for row in described.parameters),
            "received_bytes": sum(row.bytes for row in described.collectives),
            "same_rows": int((tokens[layout] == tokens[first]).all(1).sum()),
            "device": jax.devices()[0].device_kind,
        }


def _shape(row: Row) -> str:
    return f"{row['rows']} x {row['prompt']} + {row['new']}"


def report(rows: Sequence[Row], by: str) -> Report:
    """Return one table per model. The picture has the milliseconds of a call, or those per new token of each layout."""
    columns = [
        Column("rows x prompt + new", _shape),
        Column("layout" if by == "layout" else "", by),
        Column("ms", spread(".1f"), ">"),
        Column("per token", "ms_per_token", ".2f"),
    ]
    if by == "layout":
        columns += [Column("speed", "speed", ".2f"), Column("stored MB", "stored_bytes", ".1f", 1e6)]
        columns.append(Column("received kB", "received_bytes", ".1f", 1e3))
    else:
        columns += [Column("prompt", "ms_prompt", ".1f"), Column("first s", "first_seconds", ".2f")]
        columns.append(Column("loaded s", "loaded_seconds", ".2f"))
        columns += [Column("MB read", "read_bytes", ".0f", 1e6), Column("floor", "ms_floor", ".2f")]
        columns += [Column("ratio", "ratio", ".2f"), Column("CPU ratio", "cpu_ratio", ".2f")]
    columns.append(Column("same", "same_rows", "d"))
    unknown = any(row["ms_per_token"] is None for row in rows)
    note = "empty: not measured, the call is too short or noise exceeds its difference to a shorter one" * unknown
    tables = [
        Table(f"generate, {model}" + ", float32" * (by != "layout"), columns, some, note or None)
        for model, some in split(rows, "model").items()
    ]
    value, label = ("ms_per_token", "ms per new token") if by == "layout" else ("ms", "ms per call")
    values = points(rows, lambda row: f"{row['model']}\n{_shape(row)}", by, value)
    return Report(rows, tables, [[Panel(label, values)]], f"generate on {rows[0]['device']}")
