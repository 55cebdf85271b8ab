"""Measurements of `grouped_matmul`, `moe_layer` and `train_step`, as JSON, as a table and as a picture.

| column | meaning |
|---|---|
| `ms`, `spread` | milliseconds per call: median and interquartile range of the samples |
| `TFLOP/s` | 10^12 FLOPs per second; `WORK` and `moezoo.bench.shapes` define the FLOPs |
| `of matmul` | speed divided by that of one product of all rows with one matrix, in the same pass |
| `of batched` | speed divided by that of one batched product of E equal groups, in the same pass |
| `peak MB` | arguments, results and temporaries of the compiled program, on one device |
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from moezoo.bench.candidates import WORK, Candidate, Pass
from moezoo.bench.parts import BATCHED, MATMUL
from moezoo.bench.timing import Timing, measure

Measurement = TypedDict(
    "Measurement",
    {
        "part": str,
        "shape": dict[str, int],
        "implementation": str,
        "pass": Pass,
        "routing": str,
        "dtype": str,
        "device": str,
        "ms": float,
        "ms_spread": float,
        "tflops": float,
        "share_of_matmul": float | None,
        "share_of_batched": float | None,
        "peak_bytes": int | None,
    },
)


def make_measurement(
    *,
    part: str,
    shape: dict[str, int],
    implementation: str,
    pass_: Pass,
    routing: str,
    dtype: str,
    timing: Timing,
    flops: float,
    matmul: float | None,
    batched: float | None,
    peak: int | None,
) -> Measurement:
    """Return one result; `matmul` and `batched` are the yardsticks' speeds in FLOPs per millisecond."""
    speed = flops / timing.ms
    return {
        "part": part,
        "shape": shape,
        "implementation": implementation,
        "pass": pass_,
        "routing": routing,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "ms": round(timing.ms, 4),
        "ms_spread": round(timing.spread, 4),
        "tflops": round(speed / 1e9, 5),
        "share_of_matmul": round(speed / matmul, 4) if matmul else None,
        "share_of_batched": round(speed / batched, 4) if batched else None,
        "peak_bytes": peak,
    }


def compare(
    candidates: dict[str, Candidate],
    passes: Iterable[Pass],
    *,
    part: str,
    shape: dict[str, int],
    routing: str,
    dtype: str,
    forward_flops: float,
    seconds: float,
    samples: int,
) -> Iterator[Measurement]:
    """Time all candidates alternately, pass by pass; shares are of the yardsticks' speed in the same pass."""
    for name in passes:
        timings = measure({who: c.calls[name] for who, c in candidates.items()}, seconds=seconds, samples=samples)
        flops = forward_flops * WORK[name]
        yardsticks = [flops / timings[y].ms if y in timings else None for y in (MATMUL, BATCHED)]
        for who, timing in timings.items():
            yield make_measurement(
                part=part,
                shape=shape,
                implementation=who,
                pass_=name,
                routing=routing,
                dtype=dtype,
                timing=timing,
                flops=flops,
                matmul=yardsticks[0],
                batched=yardsticks[1],
                peak=candidates[who].peak_bytes[name],
            )


def to_json(results: Sequence[Any]) -> str:
    """Return the results as a JSON list, one result per line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in results) + "\n]"


def print_table(results: list[Measurement], console: Console) -> None:
    """Print one table per shape, routing and pass."""
    for case in dict.fromkeys(_case(row) for row in results):
        table = Table(
            "implementation",
            "ms",
            "spread",
            "TFLOP/s",
            "of matmul",
            "of batched",
            "peak MB",
            title=case,
            box=box.SIMPLE,
        )
        table.columns[0].no_wrap = True
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for row in results:
            if _case(row) == case:
                table.add_row(
                    row["implementation"],
                    f"{row['ms']:.4g}",
                    f"{row['ms_spread']:.2g}",
                    f"{row['tflops']:.3f}",
                    _percent(row["share_of_matmul"]),
                    _percent(row["share_of_batched"]),
                    "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
                )
        console.print(table)


def _case(row: Measurement) -> str:
    sizes = " ".join(f"{letter}={size}" for letter, size in row["shape"].items())
    return f"{row['part']}, {sizes}, {row['routing']}, {row['dtype']}, {row['pass']}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def picture(results: list[Measurement], path: Path) -> None:
    """Plot the speed of every implementation: one panel per pass, one group of bars per shape and routing."""
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(row["pass"] for row in results))
    who = list(dict.fromkeys(row["implementation"] for row in results))
    cases = list(dict.fromkeys((tuple(row["shape"].items()), row["routing"]) for row in results))
    figure = Figure(figsize=(max(6.0, 1.5 + 1.1 * len(cases)), 2.8 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), 1, squeeze=False, sharex=True)[:, 0]
    width = 0.85 / len(who)
    for axes, name in zip(panels, passes, strict=True):
        for i, implementation in enumerate(who):
            speed = {
                (tuple(row["shape"].items()), row["routing"]): row["tflops"]
                for row in results
                if row["pass"] == name and row["implementation"] == implementation
            }
            at = [j + (i - (len(who) - 1) / 2) * width for j, case in enumerate(cases) if case in speed]
            axes.bar(at, [speed[case] for case in cases if case in speed], width, label=implementation, color=f"C{i}")
        axes.set_ylabel(f"{name}, TFLOP/s")
        axes.grid(axis="y", alpha=0.3)
    labels = [f"E={dict(s)['E']} K={dict(s)['K']}\nT={dict(s)['T']}\n{routing}" for s, routing in cases]
    panels[-1].set_xticks(range(len(cases)), labels, fontsize=8)
    panels[0].legend(fontsize=8, ncols=min(3, len(who)), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(f"{results[0]['part']} on {results[0]['device']}, {results[0]['dtype']}", fontsize=10)
    figure.savefig(path, dpi=120)
