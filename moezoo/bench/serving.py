"""Benchmark of generation under several layouts: the same model and prompts, greedy, alternately in one process.

| column | meaning |
|---|---|
| `ms`, `spread` | milliseconds per call: median and interquartile range of the samples |
| `per token` | milliseconds per new token of every row: the call next to one of half as many new tokens |
| `speed` | the first layout's `per token` divided by this one's |
| `stored`, `received` | MB of parameters that a device stores; kB that it receives per new token, by the trace |
| `same` | rows with the tokens of the first layout; two experts that tie within rounding can end that for a row |
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.analysis.sharding import describe
from moezoo.bench.generate import Shape, plot_bars
from moezoo.bench.timing import Call, measure
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.config.settings import TrainConfig
from moezoo.errors import UserError
from moezoo.generation.generate import generate
from moezoo.models import build_model
from moezoo.parallel.execution import Execution, place
from moezoo.parallel.mesh import start


class ServingRow(TypedDict):
    """One layout in one shape; `received_bytes` are per new token of every row, on one device."""

    model: str
    layout: str
    rows: int
    prompt: int
    new: int
    ms: float
    ms_spread: float
    ms_per_token: float
    speed: float
    stored_bytes: int
    received_bytes: int
    same_rows: int
    device: str


class _Served(NamedTuple):
    cfg: TrainConfig
    execution: Execution
    model: Any


def compare_serving(
    layouts: Sequence[str],
    models: dict[str, str],
    shapes: Sequence[Shape],
    seconds: float,
    samples: int,
    log: Callable[[str], None],
) -> Iterator[ServingRow]:
    """Time greedy calls of random models (name -> overrides) under all `layouts` (overrides), in all shapes.

    Raises:
        UserError: The words do not compose or fit together, or a call is too long or too short. Nothing has run then.
    """
    words = {
        (name, layout): [f"model={first.split()[0]}", *first.split()[1:], *layout.split()]
        for name, first in models.items()
        for layout in layouts
    }
    configs = {key: compose(*some) for key, some in words.items()}
    for ((name, _), cfg), shape in itertools.product(configs.items(), shapes):
        if shape.new < 2 or shape.prompt + shape.new > cfg.model.longest.tokens:
            raise UserError(
                f"--calls {'x'.join(map(str, shape))}: needs two or more new tokens, which with the prompt are at most "
                f"{cfg.model.longest} of {name}; choose other numbers, such as {shape.rows}x32x64"
            )
    start(max(cfg.mesh.devices for cfg in configs.values()))
    executions = {key: build_execution(cfg, batches="any") for key, cfg in configs.items()}
    for name in models:
        log(f"{name}: making the model")
        whole = build_model(configs[name, layouts[0]].model, key=jax.random.key(0))
        served = {
            layout: _Served(configs[name, layout], executions[name, layout], place(whole, executions[name, layout]))
            for layout in layouts
        }
        for shape in shapes:
            log(f"{name}: {shape.rows} x {shape.prompt} + {shape.new}")
            yield from _compare(name, served, shape, seconds, samples)


def _compare(name: str, served: dict[str, _Served], shape: Shape, seconds: float, samples: int) -> Iterator[ServingRow]:
    vocab = next(iter(served.values())).model.vocab
    ids = np.random.default_rng(0).integers(0, vocab, (shape.rows, shape.prompt)).astype(np.int32)
    calls: dict[str, Call] = {}
    for layout, one in served.items():
        for key, new in ((layout, shape.new), (f"{layout} half", shape.new // 2)):
            calls[key] = lambda one=one, new=new: generate(one.model, ids, max_new_tokens=new, execution=one.execution)
    tokens: dict[str, Any] = {layout: calls[layout]() for layout in served}
    taken = measure(calls, seconds=seconds, samples=samples)
    more = shape.new - shape.new // 2
    per_token = {layout: (taken[layout].ms - taken[f"{layout} half"].ms) / more for layout in served}
    first = next(iter(served))
    for layout, one in served.items():
        cfg = dataclasses.replace(one.cfg, batch_size=shape.rows, seq_len=shape.prompt)
        described = describe(cfg, "decode")
        yield {
            "model": name,
            "layout": layout,
            "rows": shape.rows,
            "prompt": shape.prompt,
            "new": shape.new,
            "ms": round(taken[layout].ms, 3),
            "ms_spread": round(taken[layout].spread, 3),
            "ms_per_token": round(per_token[layout], 3),
            "speed": round(per_token[first] / per_token[layout], 3),
            "stored_bytes": sum(row.bytes_per_device for row in described.parameters),
            "received_bytes": sum(row.bytes for row in described.collectives),
            "same_rows": int((tokens[layout] == tokens[first]).all(1).sum()),
            "device": jax.devices()[0].device_kind,
        }


def print_table(rows: Sequence[ServingRow], console: Console) -> None:
    """Print one table per model."""
    titles = ("rows x prompt + new", "layout", "ms", "per token", "speed", "stored MB", "received kB", "same")
    for model in dict.fromkeys(row["model"] for row in rows):
        table = Table(*titles, title=f"generate, {model}", box=box.SIMPLE)
        for column in table.columns[2:]:
            column.justify, column.no_wrap = "right", True
        for row in rows:
            if row["model"] == model:
                table.add_row(
                    f"{row['rows']} x {row['prompt']} + {row['new']}",
                    row["layout"],
                    f"{row['ms']:.1f} ± {row['ms_spread']:.1f}",
                    f"{row['ms_per_token']:.2f}",
                    f"{row['speed']:.2f}",
                    f"{row['stored_bytes'] / 1e6:.1f}",
                    f"{row['received_bytes'] / 1e3:.1f}",
                    f"{row['same_rows']} of {row['rows']}",
                )
        console.print(table)


def picture(rows: Sequence[ServingRow], path: Path) -> None:
    """Plot the milliseconds per new token: one group of bars per model and shape."""
    plot_bars(rows, path, by="layout", value="ms_per_token", label="ms per new token")
