"""The step's collectives, counted in the traced program, are what the rules and the strategy say: no more, no less.

`expected_counts` is the promise that a reader can predict every collective, written out term by term.
"""

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from cover import BESIDE, LAYERS, Case, config, cover, product
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from running import RATE, STEPS, shapes

from moezoo import Execution
from moezoo.jaxprs import count_collectives, equations
from moezoo.models import model_shapes
from moezoo.moe.dispatch import STRATEGIES
from moezoo.settings import SGD, Constant
from moezoo.train.loss import cross_entropy
from moezoo.train.optimizer import Optimizer
from moezoo.train.step import Step

# Logical axes of the parameters, as far as rules may name them.
EMBED, Q_LORA, KV_LORA, EXPERTS = ("embed",), ("q_lora",), ("kv_lora",), ("expert", "expert_embed")


class Kind(NamedTuple):
    """Layers of one kind: how many weights each has of which logical axes, how many norms, whether it routes."""

    layers: int
    weights: dict[tuple[str, ...], int]
    norms: int
    routes: bool


# A layer's weights of `embed`: of attention; of a dense MLP (gate, up, down); of the router; of the shared experts.
KINDS = {
    # Attention: query, key, value, out. Norms: of attention, of the experts.
    "mixtral": [Kind(LAYERS, {EMBED: 4 + 1, EXPERTS: 3}, 2, True)],
    # Attention: down to the latents of queries and of keys, and out; up to queries; up to keys and values. Norms: those
    # two, and of both latents. The choice bias is replicated, and no gradient or sum is its own.
    "deepseek": [
        Kind(1, {EMBED: 3 + 3, Q_LORA: 1, KV_LORA: 2}, 4, False),
        Kind(LAYERS, {EMBED: 3 + 1 + 3, Q_LORA: 1, KV_LORA: 2, EXPERTS: 3}, 4, True),
    ],
    # Queries have no latent, and no norm of it.
    "deepseek_v2": [
        Kind(1, {EMBED: 3 + 3, KV_LORA: 2}, 3, False),
        Kind(LAYERS, {EMBED: 3 + 1 + 3, KV_LORA: 2, EXPERTS: 3}, 3, True),
    ],
}


@functools.cache
def traced(case: Case, **changes: int) -> Any:
    """The traced step."""
    model = model_shapes(config(case.family, case.balance, **changes))
    optimizer = Optimizer(SGD(RATE), Constant(), STEPS, model)
    return Step(model, optimizer, case.execution, shapes(case.microbatches)).jaxpr()


def live(case: Case, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of more than one device: nothing is exchanged over others."""
    return tuple(axis for axis in axes if case.execution.sizes[axis] > 1)


def weight(case: Case, logical: tuple[str, ...]) -> tuple[Counter, Counter]:
    """The collectives that make one weight whole, and those of its gradient.

    What is stored and not computed on is gathered. Axes that split tokens and axes that do not take one gather each,
    where they change in the stored order; the gradient comes back by a reduce-scatter over the former, and by taking
    one's own part over the latter.
    """
    rules, forward, back = case.execution.rules, Counter(), Counter()
    tokens = live(case, rules.batch + rules.sequence)
    for name in logical:
        stored, kept = live(case, rules.store.get(name, ())), live(case, rules.compute.get(name, ()))
        for split, group in itertools.groupby(stored[len(kept) :], key=lambda axis: axis in tokens):
            run = tuple(group)
            forward["all_gather", run] += 1
            back["reduce_scatter", run] += split
    return +forward, +back


def times(count: int, *counters: Counter) -> Counter:
    """`count` times all of them."""
    return Counter({key: count * n for key, n in sum(counters, Counter()).items()})


def dispatch(case: Case) -> Counter:
    """One layer's exchange of tokens or weights over the expert axes: forward, backward, and forward again."""
    rules, total = case.execution.rules, Counter()
    group = live(case, rules.compute.get("expert", ()))
    if not group:
        return total
    if case.strategy == "ring":
        # Tokens, and routing (weights and experts in one array), to everybody; then partial sums back. Whoever
        # recomputes the layer needs tokens and routing again, and not the layer's result.
        total["all_gather", group] += 2 + 2
        total["reduce_scatter", group] += 1
        # Backward each turns into the other.
        total["reduce_scatter", group] += 2
        total["all_gather", group] += 1
    elif case.strategy == "capacity":
        # Buffers there and back, and again, as the router's gradient needs what came back; both ways' gradients.
        total["all_to_all", group] += 2 + 2 + 2
    elif case.strategy == "ragged":
        # The same of routed rows; and how many rows everybody has for every expert, and again.
        total["ragged_all_to_all", group] += 2 + 2 + 2
        total["all_gather", group] += 1 + 1
    else:
        # Three expert weights to everybody, and again; their gradients back.
        total["all_gather", group] += 3 + 3
        total["reduce_scatter", group] += 3
    if not set(group) <= set(rules.batch + rules.sequence):
        # Tokens are the same on all devices of the group: each takes a share (of tokens, and of their weights, whose
        # gradients are summed) and the results are joined (the transpose of which is to take one's own part).
        total["all_gather", group] += 1
        total["psum", group] += 2
    return total


def expected_counts(case: Case) -> Counter:
    """All collectives of a step under `remat=full`, in which the backward pass computes each layer again."""
    rules, total = case.execution.rules, Counter()
    batch, sequence = live(case, rules.batch), live(case, rules.sequence)
    everywhere = tuple(sorted(batch + sequence))

    def summed(axes: tuple[str, ...]) -> Counter:
        return Counter({("psum", tuple(sorted(axes))): 1}) if axes else Counter()

    for kind in KINDS[case.family]:
        # A layer gathers its weights twice and scatters their gradients once.
        for logical, count in kind.weights.items():
            forward, back = weight(case, logical)
            total += times(kind.layers * count, forward, forward, back)
        if kind.routes:
            total += times(kind.layers, dispatch(case))
        if sequence:
            # Of the whole sequence keys and values, or latents and shared rotated keys, twice; their gradients back.
            exchanged = Counter({("all_gather", sequence): 2 + 2, ("reduce_scatter", sequence): 2})
            total += times(kind.layers, exchanged)
    if sequence:
        # Positions and segments, once for all layers.
        total += Counter({("all_gather", sequence): 2})
    # The embedding is gathered once: its gradient needs the tokens only. The unembedding is gathered again.
    forward, back = weight(case, EMBED)
    total += times(1, forward, back) + times(1, forward, forward, back)
    # Losses and routing statistics of all layers take one sum; rows must be whole first where each is balanced.
    total += summed(everywhere) if case.balance == "batch" else summed(sequence) + summed(batch)
    total = times(case.microbatches, total)
    # Once a step, however many micro-steps: the number of predicted tokens, the norm, and for each parameter the axes
    # that split tokens and do not store it.
    total += summed(everywhere) + summed(live(case, tuple(case.execution.sizes)))
    arrays = Counter({EMBED: 2, ("norm",): 1})  # embedding, unembedding and the last norm; then layers, stacked
    for kind in KINDS[case.family]:
        arrays += Counter({**kind.weights, ("norm",): kind.norms})
    for logical, count in arrays.items():
        stored = {axis for name in logical for axis in live(case, rules.store.get(name, ()))}
        total += times(count, summed(tuple(axis for axis in everywhere if axis not in stored)))
    return total


def _full_remat(cases: tuple[Case, ...]) -> list[Case]:
    return list(dict.fromkeys(replace(case, remat="full") for case in cases))


@pytest.mark.parametrize("case", _full_remat((*cover(), *BESIDE)), ids=str)
def test_counts_are_those_of_the_rules(case):
    # `count_collectives` refuses loops without a known end that hold one, so there is none.
    assert count_collectives(traced(case)) == expected_counts(case)


@pytest.mark.full
def test_counts_of_the_whole_product():
    wrong = [str(c) for c in _full_remat(product()) if count_collectives(traced.__wrapped__(c)) != expected_counts(c)]
    assert not wrong


def test_one_device_exchanges_nothing():
    assert not expected_counts(Case("ring", "single", "fsdp_ep", "full", 2, "batch"))


def test_mixtral_on_fsdp2_ep4_in_figures():
    """The same for one case, counted by hand: two layers, `ring`, experts' width over fsdp and all else over both."""
    counts = count_collectives(traced(Case("ring", "fsdp2_ep4", "fsdp_ep", "full", 1, "batch")))
    assert counts == {
        ("all_gather", ("fsdp", "expert")): 2 * 5 * 2 + 1 + 2,
        ("reduce_scatter", ("fsdp", "expert")): 2 * 5 + 2,
        ("all_gather", ("fsdp",)): 2 * 3 * 2,
        ("reduce_scatter", ("fsdp",)): 2 * 3,
        ("all_gather", ("expert",)): 2 * 5,
        ("reduce_scatter", ("expert",)): 2 * 3,
        ("psum", ("expert", "fsdp")): 6,  # tokens, losses, three norms' gradients, the global norm
    }


@pytest.mark.parametrize(("strategy", "family"), [("gather", "mixtral"), ("ring", "mixtral"), ("ring", "deepseek")])
def test_program_does_not_grow_with_depth(strategy, family):
    case = Case(strategy, "fsdp2_ep4", "fsdp_ep", "full", 2, "batch", family)
    sizes = [len(list(equations(traced(case, layers=layers)))) for layers in (4, 32)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_add_nothing_by_scatter(strategy):
    """Neither forward nor backward: sums are in fixed order, so that a step is repeatable and fast."""
    layer = model_shapes(config()).stacks[0].layer.moe
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layer)
    x = jax.ShapeDtypeStruct((4, 8, one.router.weight.shape[0]), jnp.float32)
    valid = jax.ShapeDtypeStruct((4, 8), jnp.bool)

    def objective(moe: Any, x: Any, valid: Any) -> Any:
        y, _, sums = moe(x, valid, Execution(dispatch=strategy))
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


def count(function: Any) -> Counter:
    """Collectives of a function of one array that is split over two axes."""
    mesh, split = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), PartitionSpec(("a", "b"))
    whole = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split)
    return count_collectives(jax.make_jaxpr(whole)(jnp.ones((16, 4))))


def test_counter_reads_axes_and_rounds():
    def looped(x: Any) -> Any:
        once = lambda c, _: (c + lax.psum(c, ("b", "a")).sum(), lax.ppermute(c, "b", [(0, 1)]))  # noqa: E731
        return lax.scan(lambda c, _: (lax.scan(once, c, None, length=3)[0], None), x, None, length=2)[0]

    assert count(lambda x: x) == {}
    assert count(lambda x: lax.all_gather(x, ("b", "a"), tiled=True)) == {("all_gather", ("b", "a")): 1}
    assert count(lambda x: lax.all_gather(x, ("a", "b"), tiled=True)) == {("all_gather", ("a", "b")): 1}
    assert count(jax.checkpoint(lambda x: lax.psum_scatter(x, "b", tiled=True, scatter_dimension=1))) == {
        ("reduce_scatter", ("b",)): 1
    }
    assert count(looped) == {("psum", ("a", "b")): 6, ("ppermute", ("b",)): 6}


def test_counter_refuses_what_it_cannot_know():
    def exchange(x: Any) -> Any:
        return lax.ppermute(x, "a", [(0, 1), (1, 0)])

    with pytest.raises(ValueError, match="ends on a condition"):
        count(lambda x: lax.while_loop(lambda c: c.sum() < 9, exchange, x))
    with pytest.raises(ValueError, match="depends on the data"):
        count(lambda x: lax.cond(x.sum() > 9, exchange, lambda c: c, x))
    assert count(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)) == {}
