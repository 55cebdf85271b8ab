"""The collectives of the traced step are those of the rules and the strategy, no more and no fewer.

`test_step_parity` compares the trace of every case of the cover with the formula; here are counts by hand and, with
`-m full`, the whole product.

`moezoo.analysis.cost` is the promise that a reader can predict every collective; it is kept in counts and bytes.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from cover import Case, config, product
from running import RATE, STEPS, shapes

from moezoo import Execution
from moezoo.analysis.cost import communication
from moezoo.models import model_shapes
from moezoo.moe.dispatch import STRATEGIES
from moezoo.optim import SGD, Constant, Optimizer
from moezoo.parallel.traces import collective_traffic, count_collectives, equations
from moezoo.parallel.traffic import TrafficTable
from moezoo.training.loss import cross_entropy
from moezoo.training.step import Step


@functools.cache
def traced(case: Case, **changes: int) -> Any:
    """The traced step."""
    model = model_shapes(config(case.family, case.balance, **changes))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, case.execution.placements(model))
    return Step(model, optimizer, case.execution, shapes(case.microbatches)).traced.jaxpr


def predicted(case: Case) -> TrafficTable:
    """Return the traffic by formula."""
    return communication(case.settings)


@pytest.mark.full
def test_traffic_of_the_whole_product():
    wrong = [
        str(case) for case in product() if collective_traffic(traced.__wrapped__(case)).outline(2) != predicted(case)
    ]
    assert not wrong


def test_one_device_exchanges_nothing():
    case = Case("ring", "single", "fsdp_ep", "full", 2, "batch")
    assert collective_traffic(traced(case)) == predicted(case) == {}


def test_mixtral_on_fsdp2_ep4_in_figures():
    """The same for one case, counted by hand: two layers, `ring`, experts' width over fsdp and all else over both."""
    program = traced(Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch"))
    counts = count_collectives(program)
    assert counts == {
        ("all_gather", ("fsdp", "expert")): 2 * 5 * 2 + 1 + 2,
        ("reduce_scatter", ("fsdp", "expert")): 2 * 5 + 2,
        ("all_gather", ("fsdp",)): 2 * 3 * 2,
        ("reduce_scatter", ("fsdp",)): 2 * 3,
        ("all_gather", ("expert",)): 2 * 5,
        ("reduce_scatter", ("expert",)): 2 * 3,
        ("psum", ("expert", "fsdp")): 1
        + 6
        + 3
        + 1,  # tokens, loss and routing, three norms' gradients, the global norm
    }
    table = collective_traffic(program)
    assert {scope: traffic.count for (scope,), traffic in table.by("scope").items()} == {
        "embedding/weights": 2,
        "head/weights": 3,
        "layers/weights": 2 * 3 * 8,
        "layers/feed_forward/dispatch": 2 * 3 * 2,  # tokens and routing; forward, again and backward
        "layers/feed_forward/combine": 2 * 2,  # forward and backward
        "routing": 5,
        "loss": 2,
        "gradient_sums": 3,
        "gradient_norm": 1,
    }


@pytest.mark.parametrize(("strategy", "family"), [("gather", "mixtral"), ("ring", "deepseek")])
def test_program_does_not_grow_with_depth(strategy, family):
    case = Case(strategy, "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", family)
    sizes = [len(list(equations(traced(case, layers=layers)))) for layers in (4, 32)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_add_nothing_by_scatter(strategy):
    """Neither forward nor backward: sums are in fixed order, so that a step is repeatable and fast."""
    layer = model_shapes(config()).stacks[0].blocks[0].feed_forward
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layer)
    x = jax.ShapeDtypeStruct((4, 8, one.router.weight.shape[0]), jnp.float32)
    valid = jax.ShapeDtypeStruct((4, 8), jnp.bool)

    def objective(moe: Any, x: Any, valid: Any) -> Any:
        y, sums, _ = moe(x, valid, Execution(dispatch=STRATEGIES[strategy]()))
        return (y**2).sum() + sums.probabilities.sum() + sums.z

    program = jax.make_jaxpr(jax.value_and_grad(objective, (0, 1)))(one, x, valid)
    names = {e.equation.primitive.name for e in equations(program)}
    assert "custom_jvp_call" in names or "while" in names  # the experts are in what was traced
    assert not {name for name in names if name.startswith("scatter") and name != "scatter"}


def test_logits_never_exist_as_a_whole():
    """In the loss and its gradient no array has a value for each token and each word, whatever its shape."""
    vocab, tokens, embed = 2**16, 2**12, 8
    model = model_shapes(config(vocab=vocab, embed=embed))
    hidden = jax.ShapeDtypeStruct((4, tokens // 4, embed), jnp.float32)
    labels = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def objective(model: Any, hidden: Any, labels: Any) -> Any:
        return cross_entropy(model, hidden, labels, Execution())

    program = jax.make_jaxpr(eqx.filter_value_and_grad(objective))(model, hidden, labels)
    sizes = [getattr(v.aval, "size", 0) for e in equations(program) for v in e.equation.outvars]
    # A chunk is far from the whole, and far from a single token too.
    assert 16 * vocab <= max(sizes) <= tokens * vocab // 16
