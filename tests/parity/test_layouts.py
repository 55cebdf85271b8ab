"""Shipped rule sets against each other, and one against the oracle: the same updates in any layout."""

from typing import Any

import jax
import numpy as np
import oracle
import oracle_deepseek
import pytest
from cover import Case, batch, model
from running import RATE, CompiledStep, oracle_family, parameters_of, worst_error

import moezoo
from moezoo.moe.dispatch import STRATEGIES
from moezoo.nn.context_parallel import CONTEXT_PARALLEL
from moezoo.optim import AdamW, Cosine, Optimizer
from moezoo.parallel.mesh_execution import MeshExecution, on_mesh
from moezoo.training.step import Metrics

# As in `test_step_parity`, where it is explained.
TOLERANCE = 1e-5
MIXTRAL = Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch")
DEEPSEEK = Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch", "deepseek")


def execution(rules: str, strategy: str, context_parallel: str = "gather", **axes: Any) -> MeshExecution:
    """Return an execution under shipped rules, which replaces that of a `Case`; with `ring` in balanced order."""
    mesh, layout = moezoo.make_mesh(moezoo.MeshShape(**axes)), moezoo.compose(f"rules={rules}").rules
    how = moezoo.Execution(
        mesh,
        layout,
        STRATEGIES[strategy]().exact,
        remat="none",
        context_parallel=CONTEXT_PARALLEL[context_parallel](),
        sequence_order="balanced" if context_parallel == "ring" else "contiguous",
    )
    return on_mesh(how)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return every array of a tree by its path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.weekly
def test_ten_updates_with_experts_stored_over_two_axes():
    """`shard_exp_on_fsdp` stores whole experts over (expert, fsdp), and `fsdp_ep` parts of them over fsdp.

    Both gather the same weights and sum each number's gradient over the same two devices, and AdamW works number by
    number. So routing is equal, and parameters, moments and losses are but for what XLA fuses with the backward pass
    of experts, which it does differently for another layout of the same weights: a digit of float32 per update, of the
    largest number. The norm differs more: each device first adds the squares of its own numbers, and these are others.
    Adding a few hundred positive numbers rounds by about the root of their number times 6e-8, which is 1e-6.
    """

    def ten_updates(rules: str) -> list[dict[str, np.ndarray]]:
        how = execution(rules, "ring", fsdp=2, expert=4)
        optimizer = Optimizer(AdamW(clip_norm=None), Cosine(warmup_steps=2), 10, how.placements(model()))
        step = CompiledStep(MIXTRAL, optimizer, execution=how)
        return [arrays({"metrics": step(number), "state": step.state}) for number in range(10)]

    for one, other in zip(ten_updates("fsdp_ep"), ten_updates("shard_exp_on_fsdp"), strict=True):
        assert set(one) == set(other)
        for name, array in one.items():
            if name.endswith("norm"):  # the metric, and the guard's mean of it
                np.testing.assert_allclose(array, other[name], rtol=2e-6)
            elif array.dtype == np.float32:
                digit = 2.0**-23 * np.abs(array).max(initial=0)
                np.testing.assert_allclose(array, other[name], rtol=0, atol=10 * digit, err_msg=name)
            else:
                np.testing.assert_array_equal(array, other[name], name)


def compare_metrics(found: Metrics, wanted: oracle.Outcome) -> None:
    """Require equal counts, and figures within the tolerance."""
    np.testing.assert_array_equal(found.load, wanted.load)
    for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=TOLERANCE, err_msg=name)
    np.testing.assert_allclose(found.balance, [wanted.balance[name] for name in found.balance._fields], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("rules", "strategy", "context_parallel", "axes"),
    [
        ("cp_as_ep", "ragged", "gather", {"fsdp": 2, "context": 4}),
        pytest.param("ep_as_cp", "ring", "ring", {"fsdp": 2, "expert": 4}, marks=pytest.mark.weekly),
    ],
)
def test_two_sequences_on_eight_devices(rules, strategy, context_parallel, axes):
    """Each device has a quarter of one sequence: against the oracle."""
    how = execution(rules, strategy, context_parallel, **axes)
    step = CompiledStep(DEEPSEEK, execution=how, rows=2)
    parameters, settings = parameters_of("deepseek", model("deepseek")), oracle_family("deepseek", "batch")
    for number in range(2):
        outcome = oracle.differentiate(parameters, {n: x[:2] for n, x in batch(number).items()}, 1, settings)
        metrics = step(number)
        compare_metrics(metrics, outcome)
        assert not metrics.dropped.any()
        assert worst_error(parameters_of("deepseek", step.gradients), outcome.gradients) < TOLERANCE
        parameters = oracle.sgd(parameters, outcome.gradients, RATE)
        settings = settings.after_step(outcome.load)
        assert worst_error(parameters_of("deepseek", step.state.model), parameters) < TOLERANCE
    assert isinstance(settings, oracle_deepseek.DeepSeek)
    np.testing.assert_array_equal(oracle_deepseek.bias_of(step.state.model), settings.bias)
