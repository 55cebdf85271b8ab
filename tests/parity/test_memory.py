"""A gathered weight exists only while its layer runs: no remat policy saves one for the backward pass."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import pytest
from cover import Case, config
from running import RATE, STEPS, batch_shapes

from moezoo.models import model_shapes
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import equations
from moezoo.training.step import Step

# Weights are large and there are few tokens, so every large array is a weight. A device has two rows of eight tokens.
LAYERS, EMBED, MLP, EXPERTS = 8, 64, 256, 8
FLOAT = 4  # bytes per float32
ONE_LAYER = 3 * EXPERTS * EMBED * MLP * FLOAT  # bytes of the gathered expert weights of a layer


@functools.cache
def step_with_large_weights(case: Case) -> Step:
    """Return the step of a case, not compiled, for a model with large weights."""
    model = model_shapes(config(layers=LAYERS, embed=EMBED, expert_mlp=MLP))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, case.execution.placements(model))
    return Step(model, optimizer, case.execution, batch_shapes(1))


CASES = [
    Case(strategy, mesh, "fsdp_ep", remat, 1, "batch")
    for strategy, mesh in (("ring", "fsdp8"), ("gather", "ep8"), ("gather", "fsdp2_ep4"))
    for remat in ("full", "dots", "none")
]
COMPILED = {("gather", "ep8", "full"), ("ring", "fsdp8", "dots"), ("gather", "ep8", "none")}


def arrays_kept_per_layer(case: Case) -> list[Any]:
    """Return the types of the arrays that scans over layers stack: gradients, and what the backward pass reads."""
    kept = []
    for equation, *_ in equations(step_with_large_weights(case).traced.jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == LAYERS:
            body = equation.params["jaxpr"]
            results: Any = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            # A carry leaves the scan in the shape it has in the body. A stacked array gains a dimension.
            kept += [inner.aval for outer, inner in results if outer.aval.shape != inner.aval.shape]
    return kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_scan_returns_gathered_weights(case):
    """The scan over layers returns what it saves for the backward pass; no weight may be among these arrays."""
    kept = [math.prod(array.shape) for array in arrays_kept_per_layer(case)]
    # A layer returns its gradients, of which each device has an eighth, as of the parameters, and activations. The
    # largest activation has MLP numbers for each of the device's tokens and each of its K = 2 experts.
    tokens = 16
    assert max(kept) <= max(EXPERTS * EMBED * MLP // 8, 2 * tokens * MLP)
    assert max(kept) < EXPERTS * EMBED * MLP // 4  # far less than one gathered weight


def test_offload_moves_layer_inputs_to_the_host_only():
    """`offload` saves the same arrays as `full`; only the layer's input is in host memory."""
    full, offload = (
        [(array.shape, array.memory_space) for array in arrays_kept_per_layer(replace(CASES[0], remat=remat))]
        for remat in ("full", "offload")
    )
    rows = (2, 8, EMBED)
    assert [where for shape, where in full if shape == rows] == [jax.memory.Space.Device]
    assert [where for shape, where in offload if shape == rows] == [jax.memory.Space.Host]
    assert sorted(shape for shape, _ in full) == sorted(shape for shape, _ in offload)
    assert [where for _, where in offload].count(jax.memory.Space.Host) == 1


# The three policies, with weights gathered over `fsdp` and over `expert`.
@pytest.mark.parametrize("case", [c for c in CASES if (c.strategy, c.mesh, c.remat) in COMPILED], ids=str)
def test_compiled_step_holds_few_gathered_layers(case):
    """XLA's temporary memory, without arguments and results, is that of few layers."""
    analysis: Any = step_with_large_weights(case).compile().memory_analysis()
    temporary = analysis.temp_size_in_bytes
    # A layer needs its three gathered weights, their gradients before they are scattered, and transposed copies for the
    # products: less than 4 * ONE_LAYER. The device's eighth of all gradients, `gradient`, may exist twice.
    # Activations are small. If the backward pass read saved weights, there would be at least LAYERS * ONE_LAYER.
    gradient = LAYERS * ONE_LAYER // 8
    assert ONE_LAYER < temporary < 4 * ONE_LAYER + 2 * gradient < LAYERS * ONE_LAYER
