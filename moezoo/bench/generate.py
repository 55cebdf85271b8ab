"""Benchmark of generation next to transformers: the same folder, prompts and greedy tokens, alternately in one process.

| column | meaning |
|---|---|
| `ms`, `spread` | milliseconds per call: median and interquartile range of the samples |
| `per token` | milliseconds per new token of every row, next to a shorter call of the same program; empty if none |
| `prompt` | milliseconds up to the first new token |
| `first s` | seconds of the first call, which compiles |
| `MB read` | the weights that one more token reads at most: no embedding, and as many experts as the rows can choose |
| `floor` | milliseconds for reading as many bytes once |
| `ratio` | transformers' milliseconds divided by these |
| `same` | rows with transformers' tokens; two experts that tie within rounding can end that for a row |
"""

import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.timing import Call, measure
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.generation.generate import generate, round_up
from moezoo.hub.folders import save_pretrained
from moezoo.hub.peer import load_peer
from moezoo.models import build_model
from moezoo.parallel.axes import count_parameters
from moezoo.parallel.mesh import start

OURS, THEIRS = "moezoo", "transformers"


class Shape(NamedTuple):
    """Rows, prompt tokens per row and new tokens per row of a call."""

    rows: int
    prompt: int
    new: int


class GenerateRow(TypedDict):
    """One implementation in one shape. What transformers alone would give is None where it is not installed."""

    model: str
    rows: int
    prompt: int
    new: int
    implementation: str
    ms: float
    ms_spread: float
    ms_per_token: float | None
    ms_prompt: float | None
    first_seconds: float
    read_bytes: int
    ms_floor: float
    ratio: float | None
    same_rows: int | None
    device: str


def compare_generation(
    models: dict[str, str], shapes: Sequence[Shape], seconds: float, samples: int, log: Callable[[str], None]
) -> Iterator[GenerateRow]:
    """Time greedy calls of random models of all `models` (name -> overrides) in all shapes, in float32."""
    configs = {name: compose(f"model={words.split()[0]}", *words.split()[1:]) for name, words in models.items()}
    for (name, cfg), shape in itertools.product(configs.items(), shapes):
        if shape.prompt + shape.new > cfg.model.longest.tokens:
            raise UserError(
                f"--calls {'x'.join(map(str, shape))}: {shape.prompt + shape.new} tokens exceed "
                f"{cfg.model.longest} of {name}; choose fewer tokens"
            )
    start(1)
    for name, cfg in configs.items():
        log(f"{name}: making the model")
        # Random weights: logits are far apart, so that rounding hardly ever decides a token.
        model = build_model(cfg.model, key=jax.random.key(0))
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, Path(folder))
            theirs = _load(Path(folder))
        for shape in shapes:
            log(f"{name}: {shape.rows} x {shape.prompt} + {shape.new}")
            yield from _compare(name, model, theirs, shape, seconds, samples)


def _load(folder: Path) -> Any:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    model = load_peer(folder, attention="sdpa", experts="grouped_mm")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _compare(name: str, model: Any, theirs: Any, shape: Shape, seconds: float, samples: int) -> Iterator[GenerateRow]:
    ids = np.random.default_rng(0).integers(0, model.vocab, (shape.rows, shape.prompt)).astype(np.int32)
    run: dict[str, Callable[[int], np.ndarray]] = {OURS: lambda new: generate(model, ids, max_new_tokens=new)}
    if theirs is not None:
        run[THEIRS] = lambda new: _continue(theirs, ids, new)
    jax.clear_caches()
    first, tokens = {}, {}
    for who, call in run.items():
        began = time.perf_counter()
        tokens[who] = call(shape.new)
        first[who] = time.perf_counter() - began
    short = next(new for new in range(1, shape.new + 1) if round_up(new) == round_up(shape.new))
    read = _read_bytes(model, shape.rows)
    calls: dict[str, Call] = {"floor": _reading(read)}
    for who, call in run.items():
        calls[who] = lambda call=call: call(shape.new)
        calls[f"{who} short"] = lambda call=call: call(short)
    taken = measure(calls, seconds=seconds, samples=samples)
    for who in run:
        difference = taken[who].ms - taken[f"{who} short"].ms
        each = difference / (shape.new - short) if short < shape.new else None
        yield {
            "model": name,
            "rows": shape.rows,
            "prompt": shape.prompt,
            "new": shape.new,
            "implementation": who,
            "ms": round(taken[who].ms, 3),
            "ms_spread": round(taken[who].spread, 3),
            "ms_per_token": None if each is None else round(each, 3),
            "ms_prompt": None if each is None else round(taken[who].ms - (shape.new - 1) * each, 3),
            "first_seconds": round(first[who], 3),
            "read_bytes": read,
            "ms_floor": round(taken["floor"].ms, 3),
            "ratio": round(taken[THEIRS].ms / taken[who].ms, 3) if theirs is not None else None,
            "same_rows": int((tokens[who] == tokens[THEIRS]).all(1).sum()) if theirs is not None else None,
            "device": jax.devices()[0].device_kind,
        }


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
    return lambda: jax.block_until_ready(add(numbers))


def print_table(rows: Sequence[GenerateRow], console: Console) -> None:
    """Print one table per model."""
    titles = ("rows x prompt + new", "", "ms", "per token", "prompt", "first s", "MB read", "floor", "ratio", "same")
    for model in dict.fromkeys(row["model"] for row in rows):
        table = Table(*titles, title=f"generate, {model}, float32", box=box.SIMPLE)
        for column in table.columns[2:]:
            column.justify, column.no_wrap = "right", True
        for row in rows:
            if row["model"] == model:
                table.add_row(
                    f"{row['rows']} x {row['prompt']} + {row['new']}",
                    row["implementation"],
                    f"{row['ms']:.1f} ± {row['ms_spread']:.1f}",
                    "" if row["ms_per_token"] is None else f"{row['ms_per_token']:.2f}",
                    "" if row["ms_prompt"] is None else f"{row['ms_prompt']:.1f}",
                    f"{row['first_seconds']:.2f}",
                    f"{row['read_bytes'] / 1e6:.0f}",
                    f"{row['ms_floor']:.2f}",
                    "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                    "" if row["same_rows"] is None else f"{row['same_rows']} of {row['rows']}",
                )
        console.print(table)


def picture(rows: Sequence[GenerateRow], path: Path) -> None:
    """Plot the milliseconds of a call: one group of bars per model and shape."""
    plot_bars(rows, path, by="implementation", value="ms", label="ms per call")


def plot_bars(rows: Sequence[Any], path: Path, *, by: str, value: str, label: str) -> None:
    """Plot one figure of the rows: a group of bars per model and shape, a bar for each value of the key `by`."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row["model"], row["rows"], row["prompt"], row["new"]) for row in rows))
    names = list(dict.fromkeys(row[by] for row in rows))
    figure = Figure(figsize=(max(6.0, 1.5 + 1.3 * len(cases)), 3.6), layout="constrained")
    axes, width = figure.subplots(), 0.85 / len(names)
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(cases))]
        axes.bar(at, [row[value] for row in rows if row[by] == name], width, label=name, color=f"C{i}")
    axes.set_ylabel(label)
    axes.set_xticks(range(len(cases)), [f"{m}\n{r} x {p} + {n}" for m, r, p, n in cases], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
