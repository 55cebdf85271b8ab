"""The training step against the oracle: every strategy, mesh, layout and memory policy gives the same numbers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import oracle
import pytest
from cover import LAYERS, UNUSED, Case, batch, cover, model, product
from running import STEPS, Running, expected, observe, oracle_sizes, worst

from moezoo.settings import AdamW, Cosine
from moezoo.train.optimizer import Optimizer

# float32 rounds at 6e-8. Sums here have at most some hundred terms, in a chain of about forty operations forward and
# back, which adds up to some 1e-6 of an array's largest value; what is wrong is wrong by far more than ten times that.
TOLERANCE = 1e-5
TABLE = Path(__file__).parents[2] / "docs" / "parity.md"


class Errors(NamedTuple):
    """The worst relative errors of all steps of a case."""

    loss: float
    gradients: float
    parameters: float


def errors(case: Case) -> Errors:
    """Run a case beside the oracle. What is counted must be equal, so it is asserted here."""
    found, (outcomes, parameters) = observe(case), expected(case.balance, case.microbatches)
    loss = gradients = 0.0
    for metrics, gradient, outcome in zip(found.metrics, found.gradients, outcomes, strict=True):
        np.testing.assert_array_equal(metrics.load, outcome.load)
        assert metrics.load[0, UNUSED] == 0
        assert metrics.dropped == 0
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm", "max_violation"):
            wanted = getattr(outcome, name)
            loss = max(loss, abs(float(getattr(metrics, name)) - wanted) / wanted)
        gradients = max(gradients, worst(gradient, outcome.gradients))
        assert all(abs(gradient["router"][layer]).max() > 0.01 for layer in range(LAYERS))
        for name in ("gate", "up", "down"):
            # Not small: zero, whatever the device's other experts got.
            assert not gradient[name][metrics.load == 0].any()
            assert gradient[name][metrics.load > 0].any((1, 2)).all()
    return Errors(loss, gradients, worst(found.parameters, parameters))


@pytest.mark.parametrize("case", cover(), ids=str)
def test_whole_step(case):
    assert max(errors(case)) < TOLERANCE


def test_oracle_sees_what_it_should():
    """The data has what the tests rely on: an expert without a token, and losses that all weigh in."""
    outcomes, _ = expected("batch", 1)
    for outcome in outcomes:
        assert outcome.load[0, UNUSED] == 0
        assert outcome.load.min(1).tolist() == [0] * LAYERS
        assert min(outcome.loss, outcome.load_balance_loss, outcome.z_loss) > 0.1
        assert all(abs(g).max() > 0.01 for g in outcome.gradients.values())
    other = expected("sequence", 2)[0][0]
    # What the balance is taken over changes both the loss and the router's gradient, by far more than the tolerance.
    assert abs(other.load_balance_loss - outcomes[0].load_balance_loss) > 0.01
    assert worst(other.gradients, outcomes[0].gradients) > 0.01


@pytest.mark.parametrize("name", ["router", "gate", "key", "embedding", "attention_norm", "final_norm"])
def test_oracle_differentiates(name):
    """Its gradient against a central difference along a random direction."""
    parameters, data, sizes = oracle.parameters_of(model()), batch(0), oracle_sizes("batch")
    direction = np.random.default_rng(0).standard_normal(parameters[name].shape)

    def objective(step: float) -> float:
        moved = parameters | {name: parameters[name] + step * direction}
        outcome = oracle.differentiate(moved, data, 2, sizes)
        return outcome.loss + outcome.load_balance_loss + outcome.z_loss

    slope = (oracle.differentiate(parameters, data, 2, sizes).gradients[name] * direction).sum()
    # The error of a central difference is of order step**2, its rounding 1e-16 / step.
    assert (objective(1e-5) - objective(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        Case("ring", "ep8", "fsdp_ep", "full", 1, "batch"),
        Case("gather", "fsdp2_ep4", "shard_exp_on_fsdp", "dots", 1, "batch"),
        Case("dense", "fsdp2_ep2_context2", "replicated", "none", 1, "batch"),
    ],
    ids=str,
)
def test_adamw(case):
    """Three updates with warm-up, cosine, decay and a gradient that is clipped."""
    # With a small epsilon the first update is the gradient's sign, which for a gradient of nearly zero is decided by
    # rounding; with this one an update is a smooth function of the gradient.
    settings = AdamW(learning_rate=0.05, beta1=0.8, beta2=0.9, epsilon=1e-2, weight_decay=0.5, clip_norm=2.5)
    schedule = Cosine(warmup_steps=1, final_ratio=0.1)
    optimizer = Optimizer(settings, schedule, STEPS, model())
    running = Running(case, optimizer)

    parameters = oracle.parameters_of(model())
    zeros = {name: np.zeros_like(p) for name, p in parameters.items()}
    theirs = oracle.AdamW(0.8, 0.9, 1e-2, 0.5, 2.5, dict(zeros), dict(zeros))
    norms = []
    for number in range(STEPS):
        outcome = oracle.differentiate(parameters, batch(number), 1, oracle_sizes("batch"))
        norms.append(outcome.gradient_norm)
        rate = oracle.cosine_rate(0.05, 1, STEPS, 0.1, number)
        parameters = theirs.update(parameters, outcome, rate)
        metrics = running(number)
        assert float(metrics.loss) == pytest.approx(outcome.loss, rel=TOLERANCE)
        assert float(metrics.learning_rate) == pytest.approx(rate, rel=1e-6)
        adam = running.state.optimizer[0]
        assert int(adam.count) == number + 1
        assert worst(oracle.parameters_of(adam.mu), theirs.first) < TOLERANCE
        assert worst(oracle.parameters_of(adam.nu), theirs.second) < TOLERANCE
        assert worst(oracle.parameters_of(running.state.model), parameters) < TOLERANCE
    assert min(norms) < 2.5 < max(norms)  # clipping was tried both ways


def table(rows: dict[Case, Errors]) -> str:
    """The table of docs/parity.md."""
    lines = [
        "# Every way to run the step, against plain loops",
        "",
        "The training step of a tiny Mixtral on 8 virtual CPU devices in float32, against an oracle of plain loops",
        "over rows, tokens and chosen experts in float64. Three updates of gradient descent; the worst relative error",
        "of any figure (loss, routing losses, gradient norm), of any gradient and of any parameter after the last",
        "update, each relative to the largest value of its array. Expert loads are equal. All must be below",
        f"{TOLERANCE:g}.",
        "",
        "Written by `python -m pytest -n 0 -m full tests/parity/test_step_parity.py`.",
        "",
        "| strategy | mesh | rules | remat | micro-steps | balance | loss | gradients | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c, e in rows.items():
        settings = (c.strategy, c.mesh, c.rules, c.remat, str(c.microbatches), c.balance)
        lines.append(f"| {' | '.join((*settings, *(f'{x:.0e}' for x in e)))} |")
    return "\n".join(lines) + "\n"


def whole() -> list[Case]:
    """The product of everything but the balance, which goes by turns: both with every strategy, mesh, rules, remat."""
    balances = {}
    for case in product():
        balances.setdefault((case.strategy, case.mesh, case.rules, case.remat, case.microbatches), []).append(case)
    return [cases[(i + i // 2) % 2] for i, cases in enumerate(balances.values())]


@pytest.mark.full
def test_whole_product():
    """All of them, in one process; leaves the table."""
    rows = {case: errors(case) for case in whole()}
    TABLE.write_text(table(rows))
    assert max(max(e) for e in rows.values()) < TOLERANCE
