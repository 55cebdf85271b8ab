"""Steps in which parameters are frozen, against the oracle's steps that update the other parameters alone.

Five updates of a tiny DeepSeek on one and on eight devices. Some arrays of every part of the model are frozen: they end
equal to the bit, and all else is the oracle's.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from cover import OPTIMIZERS, Case, batch, config, model
from running import (
    CompiledStep,
    GradientRecorder,
    batch_shapes,
    moments_of,
    oracle_family,
    oracle_optimizer,
    parameters_of,
    worst_error,
)
from traffic_oracle import step_traffic

from moezoo.models.blueprint import Blueprint
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import collective_traffic
from moezoo.training.step import Step

STEPS, FAMILY = 5, "deepseek"
# The oracle's name of an array that is frozen -> its pattern. Queries and experts are frozen in part.
FROZEN = {
    "embedding": ".embedding.weight",
    "attention_norm": "*.attention_norm.scale",
    "query_up": "*.query_up",
    "kv_down": "*.kv_down",
    "dense_up": ".stacks[0].*.feed_forward.up",
    "router": "*.router.weight",
    "gate": "*.experts.gate",
    "down": "*.experts.down",
    "shared_down": "*.shared.down",
    "final_norm": ".unembedding.norm.scale",
}
CASES = [
    Case("gather", "single", "fsdp_ep", "full", 2, "batch", FAMILY),
    Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", FAMILY),
]
# Those of `test_step_parity`: orthogonalising enlarges roundings.
TOLERANCES = {"adamw": 1e-5, "muon": 5e-4}


def learns(path: str) -> bool:
    """Return whether the array at a path is trained."""
    frozen = (re.escape(pattern).replace(r"\*", ".*") for pattern in FROZEN.values())
    return not path.endswith("choice_bias") and not any(re.fullmatch(each, path) for each in frozen)


def trained(parameters: oracle.Parameters) -> oracle.Parameters:
    """Return the trained ones of the oracle's parameters or gradients."""
    assert set(FROZEN) < set(parameters)
    return {name: x for name, x in parameters.items() if name not in FROZEN}


@functools.cache
def oracle_steps(optimizer: str, micro_steps: int) -> tuple[list[oracle.Outcome], oracle.Parameters, oracle.Parameters]:
    """Return the outcomes of the oracle's steps, with the gradients of what is trained; its parameters and moments."""
    settings, parameters = oracle_family(FAMILY, "batch"), parameters_of(FAMILY, model(FAMILY))
    rule, outcomes = oracle_optimizer(optimizer, FAMILY, trained(parameters)), []
    for number in range(STEPS):
        whole = oracle.differentiate(parameters, batch(number), micro_steps, settings)
        outcomes.append(dataclasses.replace(whole, gradients=trained(whole.gradients)))
        rate = oracle.cosine_rate(OPTIMIZERS[optimizer][0].learning_rate, 1, STEPS, 0.1, number)
        parameters = parameters | rule.update(trained(parameters), outcomes[-1], rate)
        settings = settings.after_step(whole.load)
    return outcomes, parameters, rule.moments()


# Muon also has moments of AdamW.
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [pytest.param(CASES[0], "adamw", marks=pytest.mark.weekly), (CASES[1], "muon")],
    ids=str,
)
def test_frozen_arrays_stay_and_the_others_are_the_oracles(case, optimizer):
    case, start = dataclasses.replace(case, optimizer=optimizer), model(FAMILY)
    outcomes, parameters, moments = oracle_steps(optimizer, case.microbatches)
    rule, schedule = OPTIMIZERS[optimizer]
    run = CompiledStep(case, GradientRecorder(rule, schedule, STEPS, case.execution.placements(start)), trained=learns)
    assert collective_traffic(run.step.traced.jaxpr).outline(2) == step_traffic(case.settings, start, trained=learns)
    tolerance = TOLERANCES[optimizer]
    for number, outcome in enumerate(outcomes):
        metrics = run(number)
        for name in ("loss", "gradient_norm"):
            assert float(getattr(metrics, name)) == pytest.approx(getattr(outcome, name), rel=tolerance)
        assert worst_error(parameters_of(FAMILY, run.gradients), outcome.gradients) < tolerance
    after: Any = run.state.model
    found, before = parameters_of(FAMILY, after), parameters_of(FAMILY, start)
    for name in FROZEN:
        np.testing.assert_array_equal(found[name], before[name])
    assert worst_error(trained(found), trained(parameters)) < tolerance
    assert min(abs(found[name] - x).max() for name, x in trained(before).items()) > 1e-4  # all others have moved
    state = run.state.optimizer.optimizer
    kept = moments_of(case, state, after)
    assert worst_error({name: kept[name] for name in moments}, moments) < tolerance
    arrays = sum(len(work.paths) * (1 if work.group.name == "muon" else 2) for work in run.step.update_work)
    assert sum(x.ndim > 0 for x in jax.tree.leaves(state)) == arrays
    assert all(map(learns, (path for work in run.step.update_work for path in work.paths)))


def test_frozen_arrays_travel_as_they_are_stored():
    """Stored in bfloat16 for layers in float32, they make half the traffic; so do those that are trained."""
    case = CASES[1]
    blueprint = Blueprint(config(FAMILY), "bfloat16", frozen=tuple(FROZEN.values()))
    optimizer = Optimizer(SGD(0.1), Constant(), STEPS, case.execution.placements(blueprint.shapes))
    step = Step(blueprint, optimizer, case.execution, batch_shapes(case.microbatches))
    found = collective_traffic(step.traced.jaxpr).outline(2)
    assert found == step_traffic(case.settings, blueprint.shapes, trained=learns)
    gathered = [
        sum(size for row, (_, size) in table.items() if row[0] == "layers/weights" and row[2] == "all_gather")
        for table in (found, step_traffic(case.settings, model(FAMILY), trained=learns))
    ]
    assert 2 * gathered[0] == gathered[1]
