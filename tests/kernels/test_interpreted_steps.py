"""Whole training steps by the kernels for Hopper and for TPUs, interpreted on a CPU, beside the portable backends."""

import functools
import importlib
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import steps_only

import moezoo
from moezoo.kernels.attention import api as attention
from moezoo.kernels.grouped_matmul import api as products
from moezoo.parallel.kernels import anywhere
from moezoo.training.evaluate import Evaluation
from moezoo.training.loop import Loop

pytestmark = pytest.mark.interpreted
WORDS = (
    *("model=mixtral", "model.embed=64", "model.expert_mlp=64", "model.layers=1", "model.experts=4", "seq_len=16"),
    *("batch_size=2", "data=synthetic", "data.eval_sequences=4", "execution.dtype=bfloat16", "steps=2"),
    *("eval_every=0", "log_every=1"),
)
# Two blocks per row, and windows and documents that begin in both.
BLOCKS = (
    *("execution.dtype=float32", "seq_len=256", "batch_size=1", "model.window=50"),
    *("data.document_length=90", "data.eval_sequences=1"),
)
RING = ("mesh.context=2", "execution.context_parallel=ring")


@pytest.fixture
def _hopper(monkeypatch):
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    named = (attention.BACKENDS, "hopper"), (products.BACKENDS, "hopper"), (products.BACKENDS, "hopper_persistent")
    for backends, name in named:
        monkeypatch.setitem(backends, name, backends[name]._replace(runs_on=anywhere))
    # Rematerialisation takes no interpreted kernel.
    monkeypatch.setattr("moezoo.parallel.execution.rematerialise", lambda layer, remat: layer)
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield


@pytest.fixture
def splash_calls(monkeypatch):
    """Let splash run on a CPU; return the keys of each of its calls."""
    from moezoo.kernels.attention import splash

    monkeypatch.setitem(attention.BACKENDS, "splash", attention.BACKENDS["splash"]._replace(runs_on=anywhere))
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "INTERPRET", True)
    calls = []
    for name in ("part", "part_gradients"):
        kernels = getattr(splash, name)
        monkeypatch.setattr(splash, name, lambda *given, run=kernels: calls.append(given[1].shape[1]) or run(*given))
    yield calls
    jax.clear_caches()


@functools.cache
def run(grouped_matmul: str, attention: str, *words: str) -> list[float]:
    """Return the losses of two steps and the gradient norms of a tiny run, in bfloat16 unless `words` differ.

    The validation at its end is left out: its program has no kernel that a step has not.
    """
    kernels = f"execution.grouped_matmul=[{grouped_matmul}]", f"execution.attention=[{attention}]"
    folder = f"run_dir={grouped_matmul}-{attention}-{len(words)}"
    with steps_only(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_evaluate", lambda *_: Evaluation(0.0, 1, 0, "token", 1, 1))
        history = moezoo.train(moezoo.compose(*WORDS, *kernels, folder, *words)).history
    return [row[name] for row in history for name in ("loss", "grad_norm")]


def check(found: list[float], wanted: list[float], most: int, rounding: float) -> None:
    """Compare numbers within so many roundings of the dtype; print the largest error."""
    print("roundings", np.abs(np.divide(found, wanted) - 1).max() / rounding)
    np.testing.assert_allclose(found, wanted, rtol=most * rounding)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("experts", "attention"),
    [pytest.param("hopper", "reference", marks=pytest.mark.weekly), ("hopper_persistent", "hopper")],
    ids=["experts", "experts by programs that stay, and attention"],
)
def test_steps_of_training(experts, attention):
    """Kernels run inside the step's shard_map and scan. Sums of a few roundings differ."""
    found, wanted = run(experts, attention), run("blocked", "reference")
    assert found != wanted
    check(found, wanted, 2, 2.0**-8)


@pytest.mark.parametrize(
    ("words", "keys"), [pytest.param((), 256, marks=pytest.mark.weekly), (RING, 128)], ids=["whole rows", "ring"]
)
def test_steps_of_training_by_splash(splash_calls, words, keys):
    """In float32, also by parts of the keys that travel between two devices. Roundings differ, those of sums too."""
    found, wanted = run("blocked", "splash", *BLOCKS, *words), run("blocked", "reference", *BLOCKS)
    assert splash_calls.count(keys) >= 2
    check(found, wanted, 16, 2.0**-24)
