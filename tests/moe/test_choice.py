"""Every way to choose experts and weigh them, and the choice bias, against a loop over tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import context_of
from jax.sharding import PartitionSpec

import moezoo
from moezoo.moe.dispatch import Ring
from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.weight_mover import WeightMover

BATCH, SEQ, EMBED, EXPERTS = 2, 6, 5, 8
PRECISION = 32 * 2.0**-24


def loop(scores, bias, choice, k):
    """Return the experts and gates of a token with these scores."""
    eligible = list(range(EXPERTS))
    if choice.groups > 1:
        size = EXPERTS // choice.groups
        best = {"max": 1, "sum_of_top2": 2}[choice.group_score]

        def goodness(group):
            members = sorted((scores + bias)[group * size : (group + 1) * size], reverse=True)
            return sum(members[:best])

        kept = sorted(range(choice.groups), key=goodness, reverse=True)[: choice.kept_groups]
        eligible = [e for e in eligible if e // size in kept]
    chosen = sorted(eligible, key=lambda e: -(scores + bias)[e])[:k]
    gates = scores[chosen]
    if choice.gates == "renormalised":
        gates = gates / max(gates.sum() + (0 if choice.least_sum else choice.added_to_sum), choice.least_sum)
    return chosen, gates * choice.scale


# Every pair of values of score, groups with their score, gates and choice bias is in one of them.
CHOICES = [
    Choice("softmax", 1, 1, "max", "renormalised", 2.5, "none"),
    Choice("softmax", 4, 2, "max", "scores", 2.5, "learned"),
    Choice("softmax", 4, 2, "sum_of_top2", "renormalised", 2.5, "learned"),
    Choice("sigmoid", 1, 1, "max", "scores", 2.5, "learned"),
    Choice("sigmoid", 4, 2, "max", "renormalised", 2.5, "none"),
    Choice("sigmoid", 4, 2, "sum_of_top2", "scores", 2.5, "none"),
    Choice("softmax", 1, 1, "max", "renormalised", 1.0, "learned", least_sum=0.5),  # of most tokens, not of all
    Choice("sigmoid", choice_bias="learned", added_to_sum=0.3),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, vars(c).values())))
def test_equals_a_loop_over_tokens(choice):
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((BATCH, SEQ, EMBED)), rng.standard_normal((EMBED, EXPERTS))
    # Large enough to change choices, so gates of biased scores would be noticed.
    bias = rng.standard_normal(EXPERTS).astype(np.float32) * (choice.choice_bias == "learned")
    router = Router(EMBED, EXPERTS, 3, choice, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    assert (router.choice_bias is None) == (choice.choice_bias == "none")
    router = eqx.tree_at(lambda r: r.weight, router, jnp.asarray(weight, jnp.float32))
    if choice.choice_bias == "learned":
        router = eqx.tree_at(lambda r: r.choice_bias, router, jnp.asarray(bias))
    valid = np.ones((BATCH, SEQ), bool)
    valid[1, 4:] = False
    run = jax.jit(lambda router, x: router(x, jnp.asarray(valid)))
    assignment, sums = run(router, jnp.asarray(x, jnp.float32))

    x, weight = np.asarray(x, np.float32).astype(np.float64), np.asarray(weight, np.float32).astype(np.float64)
    counts, probabilities = np.zeros((BATCH, EXPERTS), int), np.zeros((BATCH, EXPERTS))
    for b, s in np.ndindex(BATCH, SEQ):
        experts, gates = np.asarray(assignment.expert_ids)[b * SEQ + s], np.asarray(assignment.gates)[b * SEQ + s]
        if not valid[b, s]:
            assert (experts == EXPERTS).all()
            assert not gates.any()
            continue
        logits = x[b, s] @ weight
        scores = np.exp(logits) / np.exp(logits).sum() if choice.score == "softmax" else 1 / (1 + np.exp(-logits))
        wanted, shares = loop(scores, bias, choice, 3)
        np.testing.assert_array_equal(experts, wanted)
        np.testing.assert_allclose(gates, shares, rtol=0, atol=choice.scale * PRECISION)
        counts[b, wanted] += 1
        probabilities[b] += scores / scores.sum()
    np.testing.assert_array_equal(sums.counts, counts)
    np.testing.assert_allclose(sums.probabilities, probabilities, rtol=0, atol=SEQ * PRECISION)


def test_gates_have_a_gradient_and_the_choice_bias_has_none():
    choice = Choice(score="sigmoid", choice_bias="learned")
    router = Router(EMBED, EXPERTS, 2, choice, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    x, valid = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED)), jnp.ones((BATCH, SEQ), bool)
    gradient = jax.jit(jax.grad(lambda r: (r(x, valid).assignment.gates[:, 0] ** 2).sum()))(router)
    assert not np.asarray(gradient.choice_bias).any()
    assert np.asarray(gradient.weight).any()


@pytest.mark.parametrize("load", [[[3, 3, 3, 3]], [[5, 1, 3, 3]], [[7, 0, 0, 0], [1, 1, 2, 1]], [[2**30, 0, 2**29, 1]]])
def test_the_choice_bias_moves_by_the_sign_of_the_missing_load(load):
    """By sign(sum(c) - E c_e), exactly for integers of any size: no mean is rounded, no product overflows."""
    layers = len(load)
    router = Router(
        EMBED, 4, 1, Choice(choice_bias="learned", bias_rate=0.25), dtype=jnp.dtype("float32"), key=jax.random.key(0)
    )
    start = np.arange(4 * layers, dtype=np.float32).reshape(layers, 4)
    router = eqx.tree_at(lambda r: r.choice_bias, router, jnp.asarray(start))
    moved = jax.jit(lambda r, c: r.rebalance(c).choice_bias)(router, jnp.asarray(load, jnp.int32))
    wanted = [[np.sign(sum(row) - 4 * c) for c in row] for row in load]
    np.testing.assert_array_equal(moved, start + 0.25 * np.asarray(wanted, np.float32))


def test_balancing_moves_the_choice_bias_and_not_the_trained_one():
    """The choice bias moves and the trained bias stays; both change the choice."""
    choice = Choice("sigmoid", choice_bias="learned", bias_rate=0.125)
    router = Router(EMBED, 4, 1, choice, bias="trained", dtype=jnp.dtype("float32"), key=jax.random.key(0))
    moved = router.rebalance(jnp.asarray([3, 1, 0, 0]))
    np.testing.assert_array_equal(moved.choice_bias, [-0.125, 0, 0.125, 0.125])
    np.testing.assert_array_equal(moved.bias, np.zeros(4))
    x, valid = jnp.zeros((1, 1, EMBED)), jnp.ones((1, 1), bool)
    route = jax.jit(lambda router: router(x, valid))
    assert route(moved).assignment.expert_ids == 2
    np.testing.assert_array_equal(route(moved).sums.z, np.float32(np.log(np.float32(4))) ** 2)
    trained = eqx.tree_at(lambda r: r.bias, moved, jnp.asarray([9.0, 0, 0, 0]))
    assert route(trained).assignment.expert_ids == 0


def test_without_a_bias_nothing_moves():
    router = Router(EMBED, 4, 1, Choice(), dtype=jnp.dtype("float32"), key=jax.random.key(0))
    assert router.rebalance(jnp.ones((1, 4), jnp.int32)) is router


FORCED = [
    (2, Choice()),
    (3, Choice(groups=4, kept_groups=2, group_score="sum_of_top2", choice_bias="learned")),
    (4, Choice("sigmoid", groups=2, kept_groups=1)),
    (8, Choice()),
]


@pytest.mark.parametrize("routing", ["random", "balanced"])
@pytest.mark.parametrize(("k", "choice"), FORCED, ids=[f"{k} of {choice.groups} groups" for k, choice in FORCED])
def test_forced_routing_keeps_to_the_rules_of_the_choice(k, choice, routing):
    """K different experts from at most `kept_groups` groups, with gates by their scores."""
    router = Router(EMBED, EXPERTS, k, choice, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2 * EXPERTS, EMBED)), jnp.float32)
    valid = jnp.ones(x.shape[:2], bool)
    route = jax.jit(lambda router: router(x, valid, routing))
    (experts, gates), sums = route(router)
    scores = np.asarray(x.reshape(-1, EMBED) @ router.weight, np.float64)
    scores = 1 / (1 + np.exp(-scores)) if choice.score == "sigmoid" else np.exp(scores)
    for row, weight, score in zip(np.asarray(experts), np.asarray(gates), scores, strict=True):
        assert len(set(row)) == k
        assert len(set(row // (EXPERTS // choice.groups))) <= choice.kept_groups
        np.testing.assert_allclose(weight, choice.scale * score[row] / score[row].sum(), rtol=1e-5)
    load = np.asarray(sums.counts).sum(0)
    assert load.sum() == experts.size
    if routing == "balanced":
        assert (load == experts.size // EXPERTS).all()
        # A token's experts are as far apart around each group as its size allows.
        size, each = EXPERTS // choice.groups, -(-k // choice.kept_groups)
        for row in np.asarray(experts):
            for group in set(row // size):
                near = np.sort(row[row // size == group])
                gaps = np.diff(np.append(near, near[0] + size))
                assert gaps.min() >= (size // each if len(near) > 1 else 1)
    elif k < EXPERTS:
        assert 0 < load.min() < load.max()
        other = eqx.tree_at(lambda r: r.weight, router, router.weight + 1)
        assert (route(other).assignment.expert_ids != experts).any()


def test_forced_routing_on_a_mesh():
    """Each device draws, or takes turns, for its own tokens."""
    mesh = moezoo.make_mesh(moezoo.MeshShape(fsdp=2, expert=4))
    keys, dtype = jax.random.split(jax.random.key(0), 2), jnp.dtype("float32")
    router = Router(8, EXPERTS, 2, Choice(), dtype=dtype, key=keys[0])
    block = MoE(router, Experts(EXPERTS, 8, 4, out_std=1.0, dtype=dtype, key=keys[1]))
    tokens, split = jnp.zeros((8, 8, 8)), PartitionSpec(mesh.axis_names)  # equal tokens: only devices differ

    def loads(block, x):
        def load(routing):
            execution = on_mesh(moezoo.Execution(mesh, moezoo.compose().rules, Ring(), routing=routing))
            whole, valid = WeightMover(execution).gather(block), jnp.ones(x.shape[:2], bool)
            return whole(x, context_of(valid), execution).sums.counts

        return load("balanced"), load("random")

    execution = on_mesh(moezoo.Execution(mesh, moezoo.compose().rules, Ring()))
    specs = (execution.specs(block), split)
    mapped = jax.shard_map(loads, mesh=mesh, in_specs=specs, out_specs=(split, split))
    balanced, random = jax.jit(mapped)(moezoo.place(block, execution), tokens)
    np.testing.assert_array_equal(balanced, np.full((8, EXPERTS), 2))  # one row per device
    assert len(np.unique(random, axis=0)) > 4
    assert (np.asarray(random).sum(1) == 16).all()
