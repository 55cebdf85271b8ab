"""A gathered weight lives for its layer only: no memory policy keeps one for the backward pass."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import pytest
from cover import Case, config
from running import RATE, STEPS, shapes

from moezoo.models import model_shapes
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import equations
from moezoo.training.step import Step

# Weights are large and tokens few: whatever is large is a weight. Each device has two rows of eight tokens.
LAYERS, EMBED, MLP, EXPERTS = 8, 64, 256, 8
FLOAT = 4  # bytes
ONE_LAYER = 3 * EXPERTS * EMBED * MLP * FLOAT  # of gathered expert weights


class Large(NamedTuple):
    """A case with large weights, its step, and the model's shapes."""

    case: Case
    step: Step
    model: Any


@functools.cache
def large(case: Case) -> Large:
    """Traced for every policy, compiled for some."""
    model = model_shapes(config(layers=LAYERS, embed=EMBED, expert_mlp=MLP))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, case.execution.placements(model))
    return Large(case, Step(model, optimizer, case.execution, shapes(1)), model)


CASES = [
    Case(strategy, mesh, "fsdp_ep", remat, 1, "batch")
    for strategy, mesh in (("ring", "fsdp8"), ("gather", "ep8"), ("gather", "fsdp2_ep4"))
    for remat in ("full", "dots", "none")
]
COMPILED = {("gather", "ep8", "full"), ("ring", "fsdp8", "dots"), ("gather", "ep8", "none")}


def kept_of_a_layer(case: Case) -> list[Any]:
    """The types of what a layer leaves for the backward pass, and of its gradients."""
    kept = []
    for equation, *_ in equations(large(case).step.traced.jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == LAYERS:
            body = equation.params["jaxpr"]
            results: Any = zip(equation.outvars, getattr(body, "jaxpr", body).outvars, strict=True)
            # A carry leaves the scan in the shape its body gives it; what is stacked gains a dimension.
            kept += [inner.aval for outer, inner in results if outer.aval.shape != inner.aval.shape]
    return kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_scan_returns_gathered_weights(case):
    """What a layer leaves for the backward pass, the scan over layers returns stacked: no weight may be among it."""
    kept = [math.prod(array.shape) for array in kept_of_a_layer(case)]
    # Of a layer there are returned: gradients, which lie as the parameters do, an eighth each; and activations, of
    # which the largest are an expert's inner values, MLP for each of this device's tokens, twice over for K = 2.
    tokens = 16
    assert max(kept) <= max(EXPERTS * EMBED * MLP // 8, 2 * tokens * MLP)
    assert max(kept) < EXPERTS * EMBED * MLP // 4  # which is far below one gathered weight


def test_offloaded_inputs_lie_on_the_host_and_nowhere_else():
    """A layer keeps what `full` keeps; the array that is as large as its input is on the host."""
    full, offload = (
        [(array.shape, array.memory_space) for array in kept_of_a_layer(replace(CASES[0], remat=remat))]
        for remat in ("full", "offload")
    )
    rows = (2, 8, EMBED)
    assert [where for shape, where in full if shape == rows] == [jax.memory.Space.Device]
    assert [where for shape, where in offload if shape == rows] == [jax.memory.Space.Host]
    assert sorted(shape for shape, _ in full) == sorted(shape for shape, _ in offload)
    assert [where for _, where in offload].count(jax.memory.Space.Host) == 1


# Every policy, and both strategies' ways to bring weights.
@pytest.mark.parametrize("case", [c for c in CASES if (c.strategy, c.mesh, c.remat) in COMPILED], ids=str)
def test_compiled_step_holds_few_gathered_layers(case):
    """What XLA sets aside beside arguments and results."""
    found = large(case)
    analysis: Any = found.step.compile().memory_analysis()
    temporary = analysis.temp_size_in_bytes
    # Needed at a time: one layer's three gathered weights and the gradients of them before they are scattered, and
    # transposed copies for the products; the gradient itself, an eighth of all layers; activations are small. With
    # residuals of all layers it would be LAYERS of them at least.
    gradient = LAYERS * ONE_LAYER // 8
    assert ONE_LAYER < temporary < 4 * ONE_LAYER + 2 * gradient < LAYERS * ONE_LAYER
