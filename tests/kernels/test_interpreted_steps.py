"""Whole training steps by the kernels for Hopper, interpreted on a CPU, beside the portable backends."""

import functools
import importlib
from typing import Any

import numpy as np
import pytest

import moezoo
from moezoo.kernels.attention import api as attention
from moezoo.kernels.grouped_matmul import api as products
from moezoo.parallel.kernels import anywhere

pytestmark = pytest.mark.interpreted
ROUNDING = 2.0**-8  # of bfloat16
WORDS = (
    *("model=mixtral", "model.embed=64", "model.expert_mlp=64", "model.layers=1", "model.experts=4", "seq_len=16"),
    *("batch_size=4", "data=synthetic", "data.eval_sequences=4", "execution.dtype=bfloat16", "steps=2"),
    *("eval_every=0", "log_every=1"),
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    for backends in (attention.BACKENDS, products.BACKENDS):
        monkeypatch.setitem(backends, "hopper", backends["hopper"]._replace(runs_on=anywhere))
    # Rematerialisation takes no interpreted kernel.
    monkeypatch.setattr("moezoo.parallel.execution.rematerialise", lambda layer, remat: layer)
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield


@functools.cache
def run(grouped_matmul: str, attention: str) -> list[float]:
    """Return the losses of two steps and the gradient norms of a tiny run, in bfloat16."""
    kernels = f"execution.grouped_matmul=[{grouped_matmul}]", f"execution.attention=[{attention}]"
    history = moezoo.train(moezoo.compose(*WORDS, *kernels, f"run_dir={grouped_matmul}-{attention}")).history
    return [row[name] for row in history for name in ("loss", "grad_norm")]


@pytest.mark.parametrize("kernels", [("hopper", "reference"), ("blocked", "hopper")], ids=["experts", "attention"])
def test_steps_of_training(kernels):
    """Kernels run inside the step's shard_map and scan. Sums of a few roundings differ."""
    found, wanted = run(*kernels), run("blocked", "reference")
    assert found != wanted
    np.testing.assert_allclose(found, wanted, rtol=2 * ROUNDING)
