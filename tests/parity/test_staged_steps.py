"""Steps over pipeline stages against the oracle, which knows no stages.

What is compared, and how exactly, is that of `test_step_parity`: three steps in float32 against the oracle's in
float64. A micro-batch of a pipeline is one of the oracle's micro-steps.
"""

from functools import partial
from typing import Any

import equinox as eqx
import numpy as np
import pytest
from blueprints import as_blueprint
from cover import STAGED_CASES, UNUSED, Case, model
from jax.tree_util import tree_leaves_with_path
from oracle_deepseek import DeepSeek
from oracle_grouped import Grouped
from running import CompiledStep, GradientRecorder, expected, run_case, worst_error
from test_step_parity import TOLERANCE, tolerance_of

from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.containers import store
from moezoo.nn.few_bits import cut_pieces
from moezoo.optim import SGD, Constant
from moezoo.parallel.pipeline import Circular

# What CI runs with jax 0.12, which takes twice as long to compile it: four stages with offloading, which gather weights
# in each tick.
NEWER = STAGED_CASES[2]
# What the suite has: two stages and four, each other axis of a mesh but `expert` alone, each strategy but `capacity`
# (which `NEWER` has), each way to gather, and each update rule. The others run each week.
IN_SUITE = [STAGED_CASES[at] for at in (0, 1, 6, 7, -1)]


def largest_error(case: Case) -> float:
    """Run a case, assert what must be equal, and return the largest relative error of the rest."""
    found, wanted = run_case(case), expected(case.family, case.balance, case.micro_batches, case.optimizer)
    errors = []
    for metrics, gradient, outcome in zip(found.metrics, found.gradients, wanted.outcomes, strict=True):
        np.testing.assert_array_equal(metrics.load, outcome.load)
        assert metrics.load[0, UNUSED] == 0
        assert not metrics.dropped.any()
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            figure = getattr(outcome, name)
            errors.append(abs(float(getattr(metrics, name)) - figure) / figure)
        errors += [abs(float(getattr(metrics.balance, name)) - x) / x for name, x in outcome.balance.items()]
        errors.append(worst_error(gradient, outcome.gradients))
    if found.bias is not None:
        assert isinstance(wanted.family, DeepSeek | Grouped)
        np.testing.assert_array_equal(found.bias, wanted.family.bias)
    moments = {name: found.moments[name] for name in wanted.moments}
    return max(*errors, worst_error(found.parameters, wanted.parameters), worst_error(moments, wanted.moments))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in IN_SUITE else pytest.mark.newer if case == NEWER else pytest.mark.weekly)
        for case in STAGED_CASES
    ],
    ids=str,
)
def test_staged_step(case):
    assert largest_error(case) < tolerance_of(case)


def learns(path: str) -> bool:
    """Return whether an array is trained: some before the stages, in them, in layers that are left, and after."""
    return path.endswith(("query_up", "router.weight", "experts.gate", "shared.up", "unembedding.weight"))


def frozen_in_few_bits() -> Any:
    """Return the deep DeepSeek with arrays that are not trained in few bits: in stages, before and after them."""
    ends = ("experts.up", "shared.down", "attention.out")
    return store(model("deepseek_deep"), lambda path: path.endswith(ends), partial(BlockFP8.rounded, size=(4, 4)))


def test_frozen_weights_in_few_bits_and_trained_patterns():
    one = Case("ring", "single", "fsdp_ep", "full", 4, "batch", "deepseek_deep")
    staged = Case("ring", "stage2_fsdp2_ep2", "fsdp_ep", "full", 1, "batch", "deepseek_deep", pipeline=Circular(4))
    found = []
    for case in (one, staged):
        start = cut_pieces(frozen_in_few_bits(), case.execution)
        chosen = eqx.filter(case.execution.placements(start), as_blueprint(start, learns).mask)
        recorder = GradientRecorder(SGD(0.1), Constant(), 1, chosen)
        steps = CompiledStep(case, recorder, start=start, trained=learns)
        metrics = steps(0)
        found.append((metrics, {path: np.asarray(x) for path, x in tree_leaves_with_path(steps.gradients)}))
    (metrics, gradients), (staged_metrics, staged_gradients) = found
    for name in ("loss", "gradient_norm", "load_balance_loss"):
        assert float(getattr(staged_metrics, name)) == pytest.approx(float(getattr(metrics, name)), rel=TOLERANCE)
    assert len(gradients) == 6
    assert worst_error(staged_gradients, gradients) < TOLERANCE
