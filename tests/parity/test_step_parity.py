"""The training step against the oracle: every strategy, mesh, layout and memory policy gives the same numbers."""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import oracle
import pytest
from cover import BESIDE, FAMILIES, LAYERS, UNUSED, Case, as_parameters, batch, cover, model, one_process, product
from oracle_deepseek import DeepSeek
from oracle_grouped import Grouped
from running import STEPS, Running, expected, observe, oracle_family, parameters_of, worst
from table import write_section

from moezoo.analysis.cost import communication
from moezoo.optim import AdamW, Cosine, Optimizer
from moezoo.parallel.axes import trainable_mask

# float32 rounds at 6e-8. Sums here have at most some hundred terms, in a chain of about forty operations forward and
# back, which adds up to some 1e-6 of an array's largest value; what is wrong is wrong by far more than ten times that.
TOLERANCE = 1e-5


class Errors(NamedTuple):
    """The worst relative errors of all steps of a case."""

    loss: float
    gradients: float
    parameters: float


def errors(case: Case) -> Errors:
    """Compare a case with the oracle. Counts and the traffic must be equal, so they are asserted here."""
    found, wanted = observe(case), expected(case.family, case.balance, case.microbatches)
    # The reader of traces refuses loops of unknown length that hold a collective, so the case has none.
    assert found.traffic.outline(2) == communication(case.settings)
    loss = gradients = 0.0
    for metrics, gradient, outcome in zip(found.metrics, found.gradients, wanted.outcomes, strict=True):
        np.testing.assert_array_equal(metrics.load, outcome.load)
        assert metrics.load[0, UNUSED] == 0
        assert not metrics.dropped.any()
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm", "max_violation"):
            figure = getattr(outcome, name)
            loss = max(loss, abs(float(getattr(metrics, name)) - figure) / figure)
        gradients = max(gradients, worst(gradient, outcome.gradients))
        assert all(abs(gradient["router"][layer]).max() > 0.01 for layer in range(LAYERS))
        for name in ("gate", "up", "down"):
            # Not small: zero, whatever the device's other experts got.
            assert not gradient[name][metrics.load == 0].any()
            # An expert of the last layer may have nothing but tokens that predict nothing.
            assert (gradient[name].any((2, 3)) == outcome.gradients[name].any((2, 3))).all()
    assert (found.bias is not None) == (case.family == "deepseek")
    if found.bias is not None:
        assert isinstance(wanted.family, DeepSeek)
        # Moved by whole quarters from whole 64ths: no rounding, and the same to the bit on every mesh.
        assert found.bias.dtype == np.float32
        np.testing.assert_array_equal(found.bias, wanted.family.bias)
    return Errors(loss, gradients, worst(found.parameters, wanted.parameters))


@pytest.mark.parametrize("case", as_parameters([*cover(), *BESIDE]))
def test_whole_step(case):
    assert max(errors(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "visible"),
    [
        pytest.param("mixtral", 0.01, marks=one_process("mixtral")),
        pytest.param("deepseek", 0.005, marks=one_process("deepseek")),
        pytest.param("qwen3_moe", 0.002, marks=one_process("qwen3_moe")),
        pytest.param("olmoe", 0.001, marks=one_process("olmoe")),
    ],
)
def test_oracle_sees_what_it_should(family, visible):
    """The data has what the tests rely on: an expert without a token, and losses that all weigh in."""
    outcomes = expected(family, "batch", 1).outcomes
    for outcome in outcomes:
        assert outcome.load[0, UNUSED] == 0
        assert outcome.load.shape[0] == LAYERS
        assert family != "mixtral" or outcome.load.min(1).tolist() == [0] * LAYERS
        assert min(outcome.loss, outcome.load_balance_loss, outcome.z_loss) > 0.1
        assert all(abs(g).max() > visible for g in outcome.gradients.values())
    other = expected(family, "sequence", 2).outcomes[0]
    # What the balance is taken over changes both the loss and the router's gradient, by far more than the tolerance.
    assert abs(other.load_balance_loss - outcomes[0].load_balance_loss) > visible
    assert worst(other.gradients, outcomes[0].gradients) > 0.01


@one_process("mixtral")
def test_oracle_has_no_micro_steps_without_routing_losses():
    """Without routing losses one step of 16 rows and two micro-steps of 8 rows are the same to float64's rounding.

    The step equals the oracle for both numbers of micro-steps, so it has this property too.
    """
    known = replace(oracle_family("mixtral", "batch"), losses=oracle.Losses(0.0, 0.0, "batch"))
    parameters = parameters_of("mixtral", model("mixtral"))
    one, two = (oracle.differentiate(parameters, batch(0), micro_steps, known) for micro_steps in (1, 2))
    assert one.load_balance_loss == two.load_balance_loss == 0
    assert one.loss == pytest.approx(two.loss, rel=1e-12)
    assert worst(one.gradients, two.gradients) < 1e-12


@one_process("deepseek")
def test_oracle_sees_every_setting_of_deepseek():
    """Were one ignored, some gradient would show it, by far more than the tolerance."""
    known, parameters = oracle_family("deepseek", "batch"), parameters_of("deepseek", model("deepseek"))
    assert isinstance(known, DeepSeek)
    rope, choice = known.rope, known.choice
    others = {
        "bias": replace(known, bias=known.bias / 2),
        "groups": replace(known, choice=replace(choice, groups=1, kept_groups=1)),
        "group_score": replace(known, choice=replace(choice, group_score="max")),
        "scale": replace(known, choice=replace(choice, scale=1.0)),
        "pairs": replace(known, rope=replace(rope, interleaved=False)),
        "ramp": replace(known, rope=replace(rope, beta_slow=4.0)),
        "magnitude": replace(known, rope=replace(rope, mscale=rope.mscale_all)),
    }
    wanted = expected("deepseek", "batch", 1).outcomes[0]
    for name, other in others.items():
        outcome = oracle.differentiate(parameters, batch(0), 1, other)
        assert worst(outcome.gradients, wanted.gradients) > 1000 * TOLERANCE, name
        if name in ("bias", "groups", "group_score"):
            assert (outcome.load != wanted.load).any(), name


@pytest.mark.parametrize(
    ("family", "names"),
    [
        pytest.param("qwen3_moe", ("layers", "gates", "window", "ramp", "magnitude"), marks=one_process("qwen3_moe")),
        pytest.param("olmoe", ("gates", "clip"), marks=one_process("olmoe")),
    ],
)
def test_oracle_sees_every_setting_of_grouped_attention(family, names):
    """As above."""
    known, parameters = oracle_family(family, "batch"), parameters_of(family, model(family))
    assert isinstance(known, Grouped)
    rope = known.rope
    others = {
        "layers": replace(known, sparse=(True, False, True)),
        "gates": replace(known, renormalised=not known.renormalised),
        "window": replace(known, window=None),
        "ramp": replace(known, rope=replace(rope, beta_slow=4.0)),
        "magnitude": replace(known, rope=replace(rope, mscale=0.5, mscale_all=0.5)),
        "clip": replace(known, clip=None),
    }
    wanted = expected(family, "batch", 1).outcomes[0]
    for name in names:
        outcome = oracle.differentiate(parameters, batch(0), 1, others[name])
        assert worst(outcome.gradients, wanted.gradients) > 1000 * TOLERANCE, name


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2", "qwen3_moe_periodic"])
def test_every_array_but_the_bias_is_trained_and_compared(family):
    """Neither the optimiser nor the comparison leaves one out."""
    whole = model(family)
    parameters, buffers = eqx.partition(whole, trainable_mask(whole))
    assert sum(x.size for x in parameters_of(family, whole).values()) == sum(
        x.size for x in jax.tree.leaves(parameters)
    )
    kept = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(buffers)]
    assert kept == ([".stacks[1].blocks[0].feed_forward.router.choice_bias"] if family == "deepseek" else [])


@pytest.mark.parametrize("family", [pytest.param(f, id=f, marks=one_process(f)) for f in (*FAMILIES, "deepseek_v2")])
def test_oracle_differentiates(family):
    """Its gradients equal a central difference along a direction that moves every array.

    Each array's part of the direction adds 1 or -1 to the slope, so an error of 1e-5 in any gradient is visible.
    """
    parameters, known = parameters_of(family, model(family)), oracle_family(family, "batch")
    data = {key: rows[:6] for key, rows in batch(0).items()}
    rng = np.random.default_rng(0)
    gradients = oracle.differentiate(parameters, data, 2, known).gradients
    direction = {name: rng.standard_normal(p.shape) for name, p in parameters.items()}
    direction = {name: d / abs((gradients[name] * d).sum()) for name, d in direction.items()}
    size = max(abs(d).max() for d in direction.values())

    def objective(step: float) -> float:
        moved = {name: p + step * direction[name] for name, p in parameters.items()}
        outcome = oracle.differentiate(moved, data, 2, known)
        return outcome.loss + outcome.load_balance_loss + outcome.z_loss

    step = 1e-5 / size
    slope = sum((gradients[name] * d).sum() for name, d in direction.items())
    # The error of a central difference is of order (step * size)**2, its rounding 1e-16 / step.
    assert (objective(step) - objective(-step)) / (2 * step) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    "case",
    as_parameters(
        [
            Case("ring", "ep8", "fsdp_ep", "full", 1, "batch"),
            Case("gather", "fsdp2_ep4", "shard_exp_on_fsdp", "dots", 1, "batch"),
            Case("dense", "fsdp2_ep2_context2", "replicated", "none", 1, "batch", "qwen3_moe"),
            Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch", "deepseek"),
        ]
    ),
)
def test_adamw(case):
    """Three updates with warm-up, cosine, decay and a gradient that is clipped."""
    # With a small epsilon the first update is the gradient's sign, which for a gradient of nearly zero is decided by
    # rounding; with this one an update is a smooth function of the gradient.
    settings = AdamW(learning_rate=0.05, beta1=0.8, beta2=0.9, epsilon=1e-2, weight_decay=0.5, clip_norm=2.5)
    schedule = Cosine(warmup_steps=1, final_ratio=0.1)
    family = case.family
    optimizer = Optimizer(settings, schedule, STEPS, case.execution.placements(model(family)))
    running = Running(case, optimizer)

    known, parameters = oracle_family(family, "batch"), parameters_of(family, model(family))
    zeros = {name: np.zeros_like(p) for name, p in parameters.items()}
    theirs = oracle.AdamW(0.8, 0.9, 1e-2, 0.5, 2.5, dict(zeros), dict(zeros))
    norms = []
    for number in range(STEPS):
        outcome = oracle.differentiate(parameters, batch(number), 1, known)
        known = known.after_step(outcome.load)
        norms.append(outcome.gradient_norm)
        rate = oracle.cosine_rate(0.05, 1, STEPS, 0.1, number)
        parameters = theirs.update(parameters, outcome, rate)
        metrics = running(number)
        assert float(metrics.loss) == pytest.approx(outcome.loss, rel=TOLERANCE)
        assert float(metrics.learning_rate) == pytest.approx(rate, rel=1e-6)
        adam = running.state.optimizer["all"][0]
        assert int(adam.count) == number + 1
        assert worst(parameters_of(family, adam.mu), theirs.first) < TOLERANCE
        assert worst(parameters_of(family, adam.nu), theirs.second) < TOLERANCE
        assert worst(parameters_of(family, running.state.model), parameters) < TOLERANCE
    assert min(norms) < 2.5 < max(norms)  # clipping was tried both ways


def whole() -> list[Case]:
    """The product, of which two settings go by turns, remat and balance.

    Turns are such that each value meets every strategy, mesh, rules, family and number of micro-steps.
    """
    turns: dict[Any, list[Case]] = {}
    for case in product():
        turns.setdefault((case.family, case.strategy, case.mesh, case.rules, case.microbatches), []).append(case)
    return [cases[(i + i // len(cases)) % len(cases)] for i, cases in enumerate(turns.values())]


@pytest.mark.full
def test_whole_product():
    """All of them in one process; writes the table."""
    found = {case: errors(case) for case in whole()}
    about = f"""
The training step of a tiny model on 8 virtual CPU devices in float32, compared with an oracle of plain loops over
rows, tokens and chosen experts in float64. Each case is three updates of gradient descent. The table shows the
largest relative error of any figure (loss, routing losses, gradient norm, largest load), of any gradient, and of any
parameter after the last update; an array's error is relative to its largest value. All are below {TOLERANCE:g}.
Expert loads and choice biases are equal. Remat and balance alternate: each value meets every strategy, mesh, rule
set, family and number of micro-steps.
"""
    settings = ("family", "strategy", "mesh", "rules", "remat", "micro-steps", "balance")
    cases = {
        (c.family, c.strategy, c.mesh, c.rules, c.remat, str(c.microbatches), c.balance): tuple(e)
        for c, e in found.items()
    }
    write_section("Training", about, settings, Errors._fields, cases, by=("family", "strategy"))
    assert max(max(e) for e in found.values()) < TOLERANCE
