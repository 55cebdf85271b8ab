"""The training step against the oracle: every strategy, mesh, rule set and remat policy gives the same numbers.

Each case runs three steps in float32 on virtual CPU devices, and the oracle runs them in float64.

| compared | when | must be |
|---|---|---|
| loss, routing losses, gradient norm, rate, balance of experts, every gradient | after each step | within `TOLERANCE` |
| expert loads | after each step | equal |
| every parameter and moment | after the last step | within `TOLERANCE` |
| choice bias | after the last step | equal |
| collectives of the traced step, with those of `traffic_oracle` | once | equal in count and bytes |
| collectives of the compiled step, with the traced step | once | equal, or no more (`compiled.merged_on_cpu`) |

The error of an array is its largest difference from the oracle's, divided by the oracle's largest absolute value.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import oracle
import pytest
from compiled import ALL, UNMERGED
from cover import (
    EXTRA_CASES,
    FAMILIES,
    LAYERS,
    RECURRENT_CASES,
    STRETCH_CASES,
    UNUSED,
    WINDOWED_CASES,
    Case,
    batch,
    cover,
    each_time,
    model,
    product,
)
from oracle_deepseek import DeepSeek
from oracle_grouped import Grouped, clamped_swiglu
from oracle_router import softmax
from running import expected, oracle_family, parameters_of, run_case, worst_error
from table import write_section
from traffic_oracle import step_traffic

from moezoo.parallel.axes import trainable_mask

# float32 rounds by up to 6e-8 of a number. A gradient here is the result of about forty operations in a row, with sums
# of a few hundred terms at most. Together they round by about 1e-6 of an array's largest value; the tolerance is ten
# times that. Mistakes are larger: a wrong setting changes a gradient by over 1e-2 (see the tests of these settings).
TOLERANCE = 1e-5
# Orthogonalising enlarges the rounding of gradients by up to 3.4445^5 = 485 where singular values are small: 485 times
# 1e-6 of an array's largest value.
MUON_TOLERANCE = 5e-4


class Errors(NamedTuple):
    """The largest relative errors of a case, over all steps.

    `loss` covers the loss, both routing losses, the gradient norm, the learning rate and how evenly experts are used;
    `parameters` also covers the optimiser's moments.
    """

    loss: float
    gradients: float
    parameters: float


# Of Qwen3.5 CI has each time: a sequence that is split, another order of tokens, and widths that are split.
QWEN3_5_EACH_TIME = [("ring", "fsdp_ep"), ("gather", "ep_as_cp"), ("dense", "tensor")]
# Those that have a choice bias.
BIASED = ("deepseek", "glm4_moe", "kimi_linear", "lfm2_moe", "nemotron_h", "windowed")


def compare_with_oracle(case: Case) -> Errors:
    """Run a case, assert what must be equal, and return the errors of the rest."""
    found, wanted = run_case(case), expected(case.family, case.balance, case.microbatches, case.optimizer)
    # This also shows that no collective is in a loop of unknown length: `collective_traffic` refuses one.
    assert found.traffic.outline(2) == step_traffic(case.settings, model(case.family, case.balance))
    looped = [stack.count > 1 for stack in model(case.family, case.balance).stacks]
    equal = ALL if all(looped) else UNMERGED
    if case.strategy == "capacity" and case.remat != "none" and not looped[-1]:
        # Its exchange, where a layer is computed again, equals that of the forward pass, and may be merged with it.
        equal = ("reduce-scatter",)
    if case.family == "nemotron_h" and case.remat != "none" and not all(looped):
        # So may the sums of what experts return: the gradient of the matrix that reads them needs them again.
        equal = ("all-to-all",)
    found.budget.check(equal=equal)
    loss = gradients = 0.0
    for metrics, gradient, outcome, rate in zip(
        found.metrics, found.gradients, wanted.outcomes, wanted.rates, strict=True
    ):
        assert float(metrics.learning_rate) == pytest.approx(rate, rel=1e-6)
        np.testing.assert_array_equal(metrics.load, outcome.load)
        assert metrics.load[0, UNUSED] == 0
        assert not metrics.dropped.any()
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm"):
            figure = getattr(outcome, name)
            loss = max(loss, abs(float(getattr(metrics, name)) - figure) / figure)
        for name, figure in outcome.balance.items():
            loss = max(loss, abs(float(getattr(metrics.balance, name)) - figure) / figure)
        gradients = max(gradients, worst_error(gradient, outcome.gradients))
        assert all(abs(gradient["router"][layer]).max() > 0.01 for layer in range(LAYERS))
        for name in {"gate", "up", "down"} & gradient.keys():
            # The gradient of an expert without tokens is exactly zero, also next to experts with tokens.
            assert not gradient[name][metrics.load == 0].any()
            # An expert with tokens may have a zero gradient too: in the last layer, if none of its tokens has a label.
            assert (gradient[name].any((2, 3)) == outcome.gradients[name].any((2, 3))).all()
    assert (found.bias is not None) == (case.family in BIASED)
    if found.bias is not None:
        assert isinstance(wanted.family, DeepSeek | Grouped)
        # The bias starts at multiples of 1/64 and moves by 1/4. There is no rounding, so it is equal to the bit.
        assert found.bias.dtype == np.float32
        np.testing.assert_array_equal(found.bias, wanted.family.bias)
    moments = {name: found.moments[name] for name in wanted.moments}
    return Errors(
        loss,
        gradients,
        max(worst_error(found.parameters, wanted.parameters), worst_error(moments, wanted.moments)),
    )


def is_more_of_qwen3_5(case: Case) -> bool:
    """Return whether a case of Qwen3.5 runs only each week."""
    return case.family == "qwen3_5" and (case.strategy, case.rules) not in QWEN3_5_EACH_TIME


def tolerance_of(case: Case) -> float:
    """Return the largest error that rounding explains."""
    return MUON_TOLERANCE if case.optimizer == "muon" else TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=[pytest.mark.weekly] * (case not in each_time())) for case in cover()),
        *EXTRA_CASES[:-1],
        *(pytest.param(case, marks=[pytest.mark.weekly] * is_more_of_qwen3_5(case)) for case in RECURRENT_CASES),
        *WINDOWED_CASES,
        *(pytest.param(case, marks=[pytest.mark.weekly] * (at not in (1, 2))) for at, case in enumerate(STRETCH_CASES)),
        pytest.param(EXTRA_CASES[-1], marks=pytest.mark.newer),
    ],
    ids=str,
)
def test_whole_step(case):
    assert max(compare_with_oracle(case)) < tolerance_of(case)


@pytest.mark.parametrize(
    ("family", "visible"),
    [
        ("mixtral", 0.01),
        ("deepseek", 0.005),
        ("grouped", 0.002),
        ("olmoe", 0.001),
        ("gpt_oss", 0.005),
    ],
)
def test_oracle_data_exercise_every_loss_and_array(family, visible):
    """The models and batches have what the comparison needs.

    One expert has no token. Every loss exceeds 0.1, and some gradient of every array exceeds `visible`.
    """
    outcomes = expected(family, "batch", 1).outcomes
    for outcome in outcomes:
        assert outcome.load[0, UNUSED] == 0
        assert outcome.load.shape[0] == LAYERS
        assert family != "mixtral" or outcome.load.min(1).tolist() == [0] * LAYERS
        assert min(outcome.loss, outcome.load_balance_loss, outcome.z_loss) > 0.1
        assert all(abs(g).max() > visible for g in outcome.gradients.values())
    other = expected(family, "sequence", 2).outcomes[0]
    # Balance over the batch and over sequences give different losses and gradients, by much more than the tolerance.
    assert abs(other.load_balance_loss - outcomes[0].load_balance_loss) > visible
    assert worst_error(other.gradients, outcomes[0].gradients) > 0.01


def test_oracle_without_routing_losses_does_not_depend_on_micro_steps():
    """One micro-step of 16 rows and two of 8 rows differ only by float64's rounding.

    The tested step equals the oracle for both numbers of micro-steps, so it has this property too.
    """
    settings = oracle_family("mixtral", "batch")
    assert isinstance(settings, Grouped)
    settings = replace(settings, losses=oracle.Losses(0.0, 0.0, "batch"))
    parameters = parameters_of("mixtral", model("mixtral"))
    one, two = (oracle.differentiate(parameters, batch(0), micro_steps, settings) for micro_steps in (1, 2))
    assert one.load_balance_loss == two.load_balance_loss == 0
    assert one.loss == pytest.approx(two.loss, rel=1e-12)
    assert worst_error(one.gradients, two.gradients) < 1e-12


def test_oracle_depends_on_every_setting_of_deepseek():
    """Changing a setting changes a gradient by over 1000 times the tolerance, so a step that ignores it would fail."""
    settings, parameters = oracle_family("deepseek", "batch"), parameters_of("deepseek", model("deepseek"))
    assert isinstance(settings, DeepSeek)
    rope, choice = settings.rope, settings.choice
    assert rope is not None
    others = {
        "bias": replace(settings, bias=settings.bias / 2),
        "groups": replace(settings, choice=replace(choice, groups=1, kept_groups=1)),
        "group_score": replace(settings, choice=replace(choice, group_score="max")),
        "scale": replace(settings, choice=replace(choice, scale=1.0)),
        "pairs": replace(settings, rope=replace(rope, interleaved=False)),
        "ramp": replace(settings, rope=replace(rope, beta_slow=4.0)),
        "magnitude": replace(settings, rope=replace(rope, mscale=rope.mscale_all)),
    }
    wanted = expected("deepseek", "batch", 1).outcomes[0]
    for name, other in others.items():
        outcome = oracle.differentiate(parameters, batch(0), 1, other)
        assert worst_error(outcome.gradients, wanted.gradients) > 1000 * TOLERANCE, name
        if name in ("bias", "groups", "group_score"):
            assert (outcome.load != wanted.load).any(), name


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("grouped", ("layers", "gates", "window", "ramp", "magnitude")),
        ("olmoe", ("gates", "clip")),
        ("glm4_moe", ("rotated", "groups", "bias")),
        ("gpt_oss", ("window", "full", "activation", "truncate")),
    ],
)
def test_oracle_depends_on_every_setting_of_grouped_attention(family, names):
    """As for DeepSeek."""
    settings, parameters = oracle_family(family, "batch"), parameters_of(family, model(family))
    assert isinstance(settings, Grouped)
    rope = settings.rope
    others = {
        "layers": replace(settings, sparse=(True, False, True)),
        "gates": replace(settings, choice=softmax(not settings.choice.renormalised)),
        "window": replace(settings, window=None),
        "ramp": replace(settings, rope=replace(rope, beta_slow=4.0)),
        "magnitude": replace(settings, rope=replace(rope, mscale=0.5, mscale_all=0.5)),
        "clip": replace(settings, clip=None),
        "rotated": replace(settings, rotary_dims=None),
        "groups": replace(settings, choice=replace(settings.choice, groups=1, kept_groups=1)),
        "bias": replace(settings, bias=None),
        "full": replace(settings, full=(0,)),
        "activation": replace(settings, activation=clamped_swiglu(1.702, 1.1)),
        "truncate": replace(settings, rope=replace(rope, truncate=True)),
    }
    wanted = expected(family, "batch", 1).outcomes[0]
    for name in names:
        outcome = oracle.differentiate(parameters, batch(0), 1, others[name])
        assert worst_error(outcome.gradients, wanted.gradients) > 1000 * TOLERANCE, name


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2", "grouped_periodic", "glm4_moe"])
def test_every_array_except_the_choice_bias_is_trained_and_compared(family):
    tiny = model(family)
    parameters, buffers = eqx.partition(tiny, trainable_mask(tiny))
    assert sum(x.size for x in parameters_of(family, tiny).values()) == sum(x.size for x in jax.tree.leaves(parameters))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(buffers)]
    several = {"kimi_linear": (1, 2), "lfm2_moe": (1, 2), "nemotron_h": (1, 4), "windowed": (0, 1)}
    stacks = several.get(family, (1,)) if family in BIASED else ()
    wanted = [f".stacks[{stack}].blocks[0].feed_forward.router.choice_bias" for stack in stacks]
    if family == "gemma4":  # the number that a layer ends in
        wanted = [f".stacks[{stack}].blocks[0].scale" for stack in range(2)]
    assert paths == wanted


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_oracle_gradients_are_those_of_its_loss(family):
    """The oracle's gradients agree with a central difference along one random direction.

    The direction moves every array, scaled so that each array adds 1 or -1 to the slope. So a relative error of 1e-5 in
    the gradient of any one array fails the test.
    """
    parameters, settings = parameters_of(family, model(family)), oracle_family(family, "batch")
    data = {key: rows[:6] for key, rows in batch(0).items()}
    rng = np.random.default_rng(0)
    gradients = oracle.differentiate(parameters, data, 2, settings).gradients
    direction = {name: rng.standard_normal(p.shape) for name, p in parameters.items()}
    direction = {name: d / abs((gradients[name] * d).sum()) for name, d in direction.items()}
    size = max(abs(d).max() for d in direction.values())

    def objective(step: float) -> float:
        moved = {name: p + step * direction[name] for name, p in parameters.items()}
        outcome = oracle.differentiate(moved, data, 2, settings)
        return outcome.loss + outcome.load_balance_loss + outcome.z_loss

    step = 1e-5 / size
    slope = sum((gradients[name] * d).sum() for name, d in direction.items())
    # A central difference has an error of order (step * size)**2 and a rounding error of order 1e-16 / step.
    assert (objective(step) - objective(-step)) / (2 * step) == pytest.approx(slope, abs=1e-6)


def test_some_steps_clip_and_some_do_not():
    norms = [outcome.gradient_norm for outcome in expected("olmoe", "batch", 1, "adamw").outcomes]
    assert min(norms) < 2.5 < max(norms)


def thinned_product() -> list[Case]:
    """Return a part of the product: one case of each strategy, mesh, rule set, number of micro-steps and family.

    Its values of the other columns alternate, so that each meets every value of these.
    """
    groups: dict[Any, list[Case]] = {}
    for case in product():
        groups.setdefault((case.family, case.strategy, case.mesh, case.rules, case.microbatches), []).append(case)
    return [cases[(i + i // len(cases)) % len(cases)] for i, cases in enumerate(groups.values())]


@pytest.mark.full
def test_thinned_product():
    """Compare a part of the product in one process, and write the table of errors."""
    found = {case: compare_with_oracle(case) for case in thinned_product()}
    about = f"""
The training step of a tiny model on 8 virtual CPU devices in float32, compared with an oracle of plain loops over
rows, tokens and chosen experts in float64. Each case is three updates. The table shows the largest relative error of
any figure (loss, routing losses, gradient norm, use of experts), of any gradient, and of any parameter or moment after
the last update; an array's error is relative to its largest value. All are below {TOLERANCE:g}, with Muon below
{MUON_TOLERANCE:g}. Expert loads and choice biases are equal. Remat, balance, optimizer and context parallelism
alternate: each value meets every strategy, mesh, rule set, family and number of micro-steps.
"""
    settings = ("family", "strategy", "optimizer", "context", "mesh", "rules", "remat", "micro-steps", "balance")
    cases = {
        (
            c.family,
            c.strategy,
            c.optimizer,
            c.context_parallel,
            c.mesh,
            c.rules,
            c.remat,
            str(c.microbatches),
            c.balance,
        ): tuple(e)
        for c, e in found.items()
    }
    write_section("Training", about, settings, Errors._fields, cases, by=("optimizer", "strategy"))
    assert all(max(e) < tolerance_of(case) for case, e in found.items())
