"""`load`: a Mixtral in bfloat16, loaded from a Hugging Face folder, by turns in processes of their own.

Measures: `moezoo.from_pretrained`, on one device or laid out over a mesh; files are in the system's cache.
Against: the floor on one device: safetensors' `load_file`, a transpose of every matrix, `jax.device_put`.
"""

import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import moezoo.interrupts as interrupts
from benchmarks import one_load
from benchmarks.results import Column, Report, Row, Table, log, new_folder, ratio
from moezoo.config.build import build_execution
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.host.machine import check_host
from moezoo.parallel.mesh import abstract_mesh


def run(keys: Any) -> Report:
    """Write a folder of each size, and load it under each layout and as the floor, by turns.

    Raises `UserError` where words do not compose or fit together, or memory is too small. Nothing has run then.
    """
    if not Path("/proc/self/status").exists():
        raise UserError("load reads the memory of a process from /proc/self/status, which only Linux has")
    models = {gb: _describe_model(gb * 1e9) for gb in dict.fromkeys(keys.gb)}
    for gb, model in models.items():
        check_host(f"gb={gb:g}: the floor, with every array twice,", int(2e9 * gb), "choose a smaller size")
        for layout in keys.layout:
            cfg = compose(*model, *layout.split())
            build_execution(cfg, abstract_mesh(cfg.mesh), batches="any")
    with (
        new_folder(keys.folder, "folder"),
        tempfile.TemporaryDirectory() as temporary,
        interrupts.undoing(partial(shutil.rmtree, temporary, ignore_errors=True)),
    ):
        parent = Path(keys.folder or temporary)
        rows = [row for gb, model in models.items() for row in _load(parent / f"{gb:g}", model, keys)]
    columns = [Column("GB", "file_bytes", ".2f", 1e9), Column("layout", "layout"), Column("s", "seconds", ".2f")]
    columns += [Column("floor s", "floor_seconds", ".2f"), Column("ratio", ratio("seconds", "floor_seconds"), ".2f")]
    titles = {"rest_bytes": "arrays MB", "peak_bytes": "peak MB", "floor_peak_bytes": "floor peak MB"}
    columns += [Column(title, key, ",.0f", 1e6) for key, title in titles.items()]
    return Report(rows, [Table(f"load, bfloat16, {rows[0]['device']}", columns, rows)])


def _describe_model(size: float) -> list[str]:
    """Return overrides of a model of about `size` bytes, with the proportions of Mixtral 8x7B."""
    # In multiples of embed^2, each of 4 layers has 2.5 numbers of attention, and 24 matrices of experts, 3.5 each.
    embed = 64 * max(round(math.sqrt(size / 2 / 4 / 86.5) / 64), 1)
    mlp = 8 * max(round((size / 2 / 4 - 2.5 * embed**2) / (24 * embed) / 8), 1)
    sizes = {"layers": 4, "embed": embed, "heads": 8, "kv_heads": 2, "head_dim": embed // 8, "expert_mlp": mlp}
    return ["model=mixtral", *(f"model.{key}={value}" for key, value in sizes.items())]


def _load(folder: Path, model: Sequence[str], keys: Any) -> Iterator[Row]:
    """Write a folder and measure its loads; seconds are the median of all, and the peak is the largest."""
    log(f"writing {folder}")
    written = _run("write", folder, *model)
    found: dict[str, list[Row]] = {name: [] for name in ("floor", *keys.layout)}
    for turn, name in itertools.product(range(keys.samples), found):
        log(f"load {turn + 1}/{keys.samples} of {folder}: {name}")
        words = [] if name == "floor" else [*model, *name.split()]
        found[name].append(_run("load" if words else "floor", folder, *words))
    seconds = {name: round(statistics.median(row["seconds"] for row in some), 4) for name, some in found.items()}
    peaks = {name: max(row["peak_bytes"] for row in some) for name, some in found.items()}
    for layout in keys.layout:
        yield {
            "layout": layout,
            **written,
            "seconds": seconds[layout],
            "floor_seconds": seconds["floor"],
            **{key: found[layout][0][key] for key in ("rest_bytes", "device", "devices")},
            "peak_bytes": peaks[layout],
            "floor_peak_bytes": peaks["floor"],
        }


def _run(what: str, folder: Path, *words: str) -> Row:
    """Return the figures of a process of `one_load`. Raises `UserError` with its last line if it fails."""
    # -P: without the folder of the script, where modules have names of the standard library's.
    command = [sys.executable, "-P", one_load.__file__, what, str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, interrupts.undoing(process.kill):
        out, err = process.communicate()
    if process.returncode:
        reason = (err.splitlines() or ["nothing printed"])[-1].removeprefix("error: ")
        raise UserError(f"{folder}: {what} ended with code {process.returncode} ({reason})")
    return json.loads(out.splitlines()[-1])
