"""`few_bits`: folders whose weights have few bits, loaded and used kept (dtype=stored) and widened, by turns.

Measures: bytes of the arrays, seconds of `moezoo.from_pretrained`, milliseconds of `moezoo.generate`; on one device.
Against: the same folder, widened to bfloat16.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.results import Column, Report, Row, Table, log
from benchmarks.timing import by_turns, call_of, measure
from moezoo.config.compose import compose
from moezoo.generation.generate import generate
from moezoo.hub.loading import from_pretrained
from moezoo.hub.saving import save_pretrained
from moezoo.models import build_model
from moezoo.parallel.mesh import start

# A model by the format of its folder: wide enough that reading it takes longer than opening it.
_WIDE = "model.embed=512 model.layers=8 model.heads=8 model.vocab=8192"
MODELS = {
    "mxfp4": f"model=gpt_oss {_WIDE} model.kv_heads=4 model.head_dim=64 model.expert_mlp=512 model.experts=16",
    "fp8": f"model=deepseek {_WIDE} model.q_lora=256 model.kv_lora=128 model.mlp=2048 model.expert_mlp=512",
}
WAYS = ("stored", "bfloat16")


def run(keys: Any) -> Report:
    """Write a folder in each format; load it and generate with it in both ways, by turns."""
    start()
    rows = [row for name in keys.format for row in _compare(name, keys)]
    columns = [Column("format", "format"), Column("dtype", "dtype"), Column("arrays MB", "rest_bytes", ",.1f", 1e6)]
    columns += [Column("load s", "load_seconds", ".2f"), Column("generate ms", "ms", ",.1f")]
    columns += [Column("spread", "ms_spread", ",.1f"), Column("ms per token", "ms_per_token", ".2f")]
    return Report(rows, [Table(f"weights of few bits, {jax.devices()[0].device_kind}", columns, rows)])


def _compare(name: Literal["fp8", "mxfp4"], keys: Any) -> list[Row]:
    model = build_model(compose(*MODELS[name].split()).model, key=jax.random.key(0), dtype="bfloat16")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        save_pretrained(model, folder, format=name)
        del model

        def load(way: str) -> float:
            began = time.perf_counter()
            jax.block_until_ready(from_pretrained(folder, dtype=way))
            return time.perf_counter() - began

        log(f"{name}: loading")
        load(WAYS[0])  # compiles what transposes
        loads = by_turns({way: partial(load, way) for way in WAYS}, keys.samples, keys.seconds)
        models = {way: from_pretrained(folder, dtype=way) for way in WAYS}
    ids = np.random.default_rng(0).integers(0, 8192, (1, keys.prompt), np.int32)
    log(f"{name}: generating")
    calls = {way: call_of(partial(generate, model, ids, max_new_tokens=keys.new)) for way, model in models.items()}
    timed = measure(calls, seconds=keys.seconds, samples=keys.samples)
    return [
        {
            "format": name,
            "dtype": way,
            "rest_bytes": sum(array.nbytes for array in jax.tree.leaves(models[way])),
            "load_seconds": round(float(np.median(loads[way])), 3),
            **timed[way].rounded(1),
            "ms_per_token": round(timed[way].ms / keys.new, 3),
        }
        for way in WAYS
    ]
