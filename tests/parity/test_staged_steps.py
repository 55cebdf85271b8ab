"""Steps over pipeline stages against the oracle, which knows no stages.

What is compared, and how exactly, is that of `test_step_parity`: three steps in float32 against the oracle's in
float64. A micro-batch of a pipeline is one of the oracle's micro-steps.
"""

import numpy as np
import pytest
from cover import STAGED_CASES, UNUSED, Case
from oracle_deepseek import DeepSeek
from oracle_grouped import Grouped
from running import expected, run_case, worst_error
from test_step_parity import tolerance_of


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


@pytest.mark.parametrize("case", STAGED_CASES, ids=str)
def test_staged_step(case):
    assert largest_error(case) < tolerance_of(case)
