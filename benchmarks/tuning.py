"""Measure sizes of blocks on this GPU: `accelerator tune=true`. The table of the fastest is what backends read.

Each field of a backend's sizes is varied alone, in the order of the fields, around the fastest of the fields before it.
A choice's time is the geometric mean over shapes of a layer's forward and backward pass in one program; for `chunked`,
of causal attention to the tokens of the shape.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks import attention
from benchmarks.kernels import layer_operands, products_for, run_layer
from benchmarks.results import Row, log
from benchmarks.shapes import SHAPES
from benchmarks.timing import call_of, measure, passes_of
from moezoo.errors import UserError
from moezoo.kernels import blocks
from moezoo.kernels.attention import chunked
from moezoo.kernels.grouped_matmul import chips, persistent
from moezoo.kernels.grouped_matmul.blocked import ON_GPUS
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Kernels, Target

# Not the depth: two steps of 128 leave no room for a second program on a multiprocessor.
_TILES = {
    "rows": (64, 128),
    "columns": (64, 128),
    "buffers": (2**16, 3 * 2**15, 2**17),
    "snake": (1, 2, 4, 8),
}
# Sizes in the files of backends, and what is tried for each field.
TRIED: dict[str, tuple[Any, dict[str, Sequence[Any]]]] = {
    "blocked": (
        ON_GPUS,
        {
            "products": [(256, 64), (512, 128), (1024, 256), (2048, 512)],
            "experts": [(256, 64), (512, 128), (1024, 256), (2048, 512), (2048, 512, 128)],
        },
    ),
    "chunked": (chunked.ON_GPUS, {"queries": (256, 512, 1024), "keys": (256, 512, 1024, 2048)}),
    "hopper": (chips.HOPPER.tiles, _TILES),
    "hopper_persistent": (
        persistent.Sizes(),
        {"programs": (114, 132), "columns": (128, 192, 256), "slots": (3, 4), "snake": (1, 2, 4, 8, 16)},
    ),
    "blackwell": (chips.BLACKWELL.tiles, _TILES),
}


def tune(target: Target, names: Sequence[str], keys: Any) -> Iterator[Row]:
    """Yield what is measured of each choice of sizes for this GPU, on the shapes of these names.

    Raises:
        UserError: This device is no GPU.
    """
    if target.capability is None:
        raise UserError(f"tune=true measures sizes for GPUs, and this is {target.platform}; leave it out")
    for backend in dict.fromkeys((*products_for(target), "blocked", "chunked")):
        if backend in TRIED:
            yield from _tune(backend, target.capability, names, keys)


def _tune(backend: str, capability: str, names: Sequence[str], keys: Any) -> Iterator[Row]:
    sizes, choices = TRIED[backend]
    best = sizes
    for field, values in choices.items():
        found = {}
        for value in dict.fromkeys((getattr(best, field), *values)):
            tried = best._replace(**{field: value})
            try:
                times = _times(backend, {capability: {backend: tried._asdict()}}, names, keys)
            except Exception as error:  # sizes that the compiler or the device refuses
                log(f"{backend} {tried}: {error}")
                continue
            found[value] = float(np.exp(np.log(list(times.values())).mean()))
            log(f"{backend} {field}={value}: {found[value]:.3f} ms")
            labels = {"part": "tune", "implementation": backend, "capability": capability}
            yield {**labels, "sizes": tried._asdict(), "ms": round(found[value], 4), "ms_by_shape": times}
        if found:
            best = best._replace(**{field: min(found, key=found.__getitem__)})


def _times(backend: str, table: blocks.Table, names: Sequence[str], keys: Any) -> dict[str, float]:
    """Return the milliseconds of a layer or of attention for each shape, with sizes from `table`."""
    times = {}
    for name in names:
        function, operands = _case(backend, name)
        jax.clear_caches()  # of traces with other sizes
        with blocks.trying(table):
            ready = jax.jit(passes_of(function)["both"]).lower(*operands).compile()
        call = call_of(ready, *operands)
        times[name] = measure({name: call}, seconds=keys.seconds, samples=keys.samples)[name].ms
    return times


def _case(backend: str, name: str) -> tuple[Callable[..., Any], Any]:
    """Return a function, and what it is differentiated by, its other operands and a cotangent."""
    if backend == "chunked":
        heads = {"kv_heads": 8, "group": 4, "head_dim": 128, "value_dim": 128}
        sizes = SimpleNamespace(**heads, documents=1, dtype="bfloat16")
        call = partial(attention.call, scale=128**-0.5, window=None, implementation=backend)
        return call, jax.device_put(attention.operands_of(SHAPES[name].tokens, sizes))
    execution = Execution(dtype="bfloat16", remat="none", kernels=Kernels(grouped_matmul=(backend,)))
    return partial(run_layer, execution), layer_operands(SHAPES[name], "uniform", "bfloat16")


def table_of(rows: Sequence[Row]) -> blocks.Table:
    """Return the fastest sizes of each backend and capability."""
    table: dict[str, dict[str, Any]] = {}
    measured = [row for row in rows if row["part"] == "tune" and "error" not in row]
    for row in sorted(measured, key=lambda row: -row["ms"]):
        table.setdefault(row["capability"], {})[row["implementation"]] = row["sizes"]
    return table


def write(table: blocks.Table, folder: Path) -> None:
    """Write a table beside the kernels, together with what is there for other capabilities, and to `folder`.

    Nothing is written of an empty one.
    """
    if not table:
        return
    merged = json.dumps({**blocks.read(), **table}, indent=1) + "\n"
    (folder / blocks.TABLE.name).write_text(merged)
    try:
        blocks.TABLE.write_text(merged)
        log(f"wrote {blocks.TABLE}")
    except OSError as error:
        log(f"{blocks.TABLE} cannot be written ({error}); copy {folder / blocks.TABLE.name} there to use it")
