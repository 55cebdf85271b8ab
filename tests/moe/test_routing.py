"""Losses and figures of routing sums against loops, and the same on any mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import count_collectives

from moezoo.moe.routing import LayerSums, RoutingConfig, balance_of, reduce_routing
from moezoo.parallel.collectives import psum

LAYERS, BATCH, EXPERTS, K = 2, 8, 4, 2
ALPHA, BETA = 0.01, 0.001
# A share is a quotient of sums of at most 8 rows and 4 experts: some 30 roundings to float32.
PRECISION = 30 * 2.0**-24


def config(over):
    """Coefficients as a model sets them."""
    return RoutingConfig(ALPHA, BETA, K, over)


def balanced_at(load, over):
    """Return the routing of one layer, with two experts per token, of which `load` [batch, experts] has the counts.

    Probabilities are the shares of assignments.
    """
    load = np.asarray(load, np.int32)[None]
    tokens = load.sum(-1) // 2
    others = np.zeros(1, np.float32), np.zeros(1, np.int32)
    return reduced((load, load.astype(np.float32) / 2, tokens, *others), over)


def _reduced(sums, over):
    return reduce_routing(LayerSums(*sums), config(over), (), ())


reduced = jax.jit(_reduced, static_argnames="over")


def random_sums(parts=1, seed=0):
    """Return sums of `parts` pieces of each row: [parts, layer, batch, ...]. One row is padding; lengths differ."""
    rng = np.random.default_rng(seed)
    counts, probabilities = np.zeros((2, parts, LAYERS, BATCH, EXPERTS))
    lengths = rng.integers(1, 6, (parts, BATCH))
    lengths[:, 3] = 0
    for part, layer, row in np.ndindex(parts, LAYERS, BATCH):
        for _ in range(lengths[part, row]):
            scores = rng.dirichlet(np.ones(EXPERTS))
            counts[part, layer, row, np.argsort(-scores)[:K]] += 1
            probabilities[part, layer, row] += scores
    tokens = np.broadcast_to(lengths[:, None], (parts, LAYERS, BATCH)).astype(np.int32)
    z = rng.uniform(0, 9, (parts, LAYERS)).astype(np.float32)
    dropped = rng.integers(0, 3, (parts, LAYERS)).astype(np.int32)
    arrays: list[Any] = [counts.astype(np.int32), probabilities.astype(np.float32), tokens, z, dropped]
    return LayerSums(*arrays)


def loop(sums, over):
    """Return the figures of each layer by their definition, from whole rows."""
    figures = []
    for counts, probabilities, tokens, z, dropped in zip(*(np.asarray(x, np.float64) for x in sums), strict=True):
        groups = [[row] for row in range(len(tokens)) if tokens[row]] if over == "sequence" else [range(len(tokens))]
        balances = []
        for rows in groups:
            total = sum(tokens[row] for row in rows)
            shares = [sum(counts[row, e] for row in rows) / (K * total) for e in range(EXPERTS)]
            means = [sum(probabilities[row, e] for row in rows) / total for e in range(EXPERTS)]
            balances.append(EXPERTS * sum(f * p for f, p in zip(shares, means, strict=True)))
        load = counts.sum(0)
        share = [n / load.sum() for n in load]
        entropy = -sum(p * np.log(p) for p in share if p)
        violation = max(load) / (load.sum() / EXPERTS) - 1
        figures.append((load, entropy, violation, dropped, ALPHA * np.mean(balances), BETA * z / tokens.sum()))
    return [np.asarray(figure) for figure in zip(*figures, strict=True)]


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_equals_a_loop(over):
    sums = [x[0] for x in random_sums()]
    routing = reduced(sums, over)
    for name, result, want in zip(routing._fields, routing, loop(sums, over), strict=True):
        np.testing.assert_allclose(result, want, rtol=PRECISION, atol=PRECISION, err_msg=name)
    assert routing.load.dtype == routing.dropped.dtype == jnp.int32


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_gradients_equal_those_of_the_loop(over):
    """Both losses are linear in the arrays that have gradients, so finite differences are exact."""
    counts, probabilities, tokens, z, dropped = (x[0] for x in random_sums())

    def through_loop(probabilities, z):
        *_, balance, z_loss = loop((counts, probabilities, tokens, z, dropped), over)
        return (balance + z_loss).sum()

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def through_routing(probabilities, z, *others):
        routing = _reduced((others[0], probabilities, others[1], z, others[2]), over)
        return (routing.load_balance_loss + routing.z_loss).sum()

    gradients = map(np.asarray, through_routing(probabilities, z, counts, tokens, dropped))
    base = through_loop(probabilities.astype(float), z.astype(float))
    for argument, gradient in enumerate(gradients):
        assert gradient.any()
        for index in np.ndindex(gradient.shape):
            moved = [probabilities.astype(float), z.astype(float)]
            moved[argument][index] += 1
            np.testing.assert_allclose(gradient[index], through_loop(*moved) - base, rtol=PRECISION, atol=1e-12)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_balanced(over):
    """Sizes are powers of two, so nothing is rounded: the loss equals its coefficient to the bit."""
    routing = balanced_at(np.full((BATCH, EXPERTS), 4), over)
    assert routing.load_balance_loss[0] == np.float32(ALPHA)
    assert routing.max_violation[0] == 0
    np.testing.assert_allclose(routing.entropy, [np.log(EXPERTS)], rtol=PRECISION)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_all_on_one_expert(over):
    routing = balanced_at([[0, 0, 8, 0]] * BATCH, over)
    assert routing.entropy[0] == 0
    assert routing.max_violation[0] == EXPERTS - 1
    assert routing.load_balance_loss[0] == np.float32(ALPHA) * EXPERTS


def test_balance_within_the_batch_is_not_balance_within_each_row():
    """Rows that use different experts: balanced over the batch, twice the loss by sequence."""
    load = [[4, 4, 0, 0], [0, 0, 4, 4]] * (BATCH // 2)
    assert balanced_at(load, "batch").load_balance_loss[0] == np.float32(ALPHA)
    assert balanced_at(load, "sequence").load_balance_loss[0] == np.float32(ALPHA) * 2


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_no_tokens_at_all(over):
    routing = balanced_at(np.zeros((BATCH, EXPERTS)), over)
    for name, result in routing._asdict().items():
        assert np.isfinite(result).all(), name
    assert not routing.load_balance_loss.any()
    assert not routing.z_loss.any()


def total_and_routing(batch_axes, sequence_axes, over, probabilities, z, others):
    """Return a loss like that of a training step, and the figures."""
    counts, tokens, dropped = others
    sums = LayerSums(counts, probabilities, tokens, z, dropped)
    routing = reduce_routing(sums, config(over), batch_axes, sequence_axes)
    scale = jnp.arange(1, LAYERS + 1, dtype=jnp.float32)
    return ((routing.load_balance_loss + routing.z_loss) * scale).sum(), routing


# (mesh, axes that split the batch, axes that split the sequence)
MESHES = {
    "8": ({"expert": 8}, ("expert",), ()),
    "2x4": ({"fsdp": 2, "expert": 4}, ("fsdp", "expert"), ()),
    "2x4 sequence": ({"fsdp": 2, "context": 4}, ("fsdp",), ("context",)),
}


@pytest.mark.parametrize("over", ["batch", "sequence"])
@pytest.mark.parametrize("name", MESHES)
def test_the_same_on_any_mesh(name, over):
    """Values and gradients. Arrays are summed once, or twice where rows are split and the balance is by row."""
    shape, batch_axes, sequence_axes = MESHES[name]
    mesh = auto_mesh(**shape)
    parts = 4 if sequence_axes else 1
    pieces = random_sums(parts)
    whole = [x.sum(0, dtype=x.dtype) for x in pieces]
    every = batch_axes + sequence_axes

    def cut(x):
        """[parts, layer, batch, ...] -> [layer, batch, parts, ...]: batch and parts are split over the mesh."""
        return np.moveaxis(x, 0, 2)

    z = np.linspace(1, 2, 8 * LAYERS, dtype=np.float32).reshape(8, LAYERS)
    dropped = np.arange(8 * LAYERS, dtype=np.int32).reshape(8, LAYERS)

    def local(probabilities, z, others):
        counts, tokens, dropped = others
        others = counts[:, :, 0], tokens[:, :, 0], dropped[0]
        function = functools.partial(total_and_routing, batch_axes, sequence_axes, over)

        def loss(probabilities, z):
            return function(probabilities[:, :, 0], z[0], others)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(probabilities, z)

    rows, device = PartitionSpec(None, batch_axes, sequence_axes or None), PartitionSpec(every)
    in_specs = (rows, device, (rows, rows, device))
    out_specs = ((PartitionSpec(), PartitionSpec()), (rows, device))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    arguments = (cut(pieces.probabilities), z, (cut(pieces.counts), cut(pieces.tokens), dropped))
    (total, routing), gradients = jax.jit(mapped)(*arguments)

    single = functools.partial(total_and_routing, (), (), over)

    def single_loss(probabilities, z):
        others = jax.tree.map(jnp.asarray, (whole[0], whole[2], dropped.sum(0, dtype=np.int32)))
        return single(probabilities, z.sum(0), others)

    function = jax.value_and_grad(single_loss, argnums=(0, 1), has_aux=True)
    (want, want_routing), want_gradients = jax.jit(function)(whole[1], z)

    np.testing.assert_array_equal(routing.load, want_routing.load)
    np.testing.assert_array_equal(routing.dropped, dropped.sum(0))
    np.testing.assert_allclose(total, want, rtol=PRECISION)
    for field, result, expected in zip(routing._fields, routing, want_routing, strict=True):
        np.testing.assert_allclose(result, expected, rtol=PRECISION, atol=PRECISION, err_msg=field)
    # Each piece of a row has the gradient of the whole row.
    by_probabilities, *rest = gradients
    wanted = np.repeat(np.asarray(want_gradients[0])[:, :, None], parts, axis=2)
    np.testing.assert_allclose(by_probabilities, wanted, rtol=PRECISION)
    for result, expected in zip(rest, want_gradients[1:], strict=True):
        np.testing.assert_allclose(result, expected, rtol=PRECISION)

    by_row = over == "sequence"
    reductions = count_collectives(jax.make_jaxpr(mapped)(*arguments))
    assert reductions.total() == 5 + by_row + 5 * (by_row and bool(sequence_axes)), reductions


LOADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (2, 4), (3, 5)]).flatmap(
    lambda shape: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2, 7, 2**20]), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


compiled_balance = jax.jit(balance_of)


@settings(max_examples=60)
@given(LOADS)
@example([[3], [1]])  # one expert
@example([[0], [2]])
@example([[0, 0], [1, 3]])  # a layer without tokens
@example([[4, 4, 4, 4], [16, 0, 0, 0]])
def test_balance_of_a_step_equals_a_loop(load):
    """Entropies relative to the largest possible, violations, and the share of experts with an assignment."""
    entropies, violations, used = [], [], []
    for row in load:
        shares = [n / max(sum(row), 1) for n in row]
        entropy = -sum(p * np.log(p) for p in shares if p)
        entropies.append(entropy / np.log(len(row)) if len(row) > 1 else float(sum(row) > 0))
        violations.append(max(shares) * len(row) - 1)
        used += [n > 0 for n in row]
    wanted = (np.mean(entropies), min(entropies), np.mean(violations), max(violations), np.mean(used))
    found = compiled_balance(np.asarray(load, np.int32))
    assert all(x.shape == () and x.dtype == jnp.float32 for x in found)
    # Violation subtracts 1 from a number up to the number of experts.
    np.testing.assert_allclose(found, wanted, rtol=PRECISION, atol=5 * PRECISION)


WHOLE = st.lists(st.integers(0, 2**24 - 1), min_size=8, max_size=8)


@functools.cache
def summed():
    """Return the compiled `psum` of integers and a float."""
    mesh = auto_mesh(a=2, b=4)
    everywhere = PartitionSpec(("a", "b"))
    mapped = jax.shard_map(
        lambda tree: psum(tree, ("a", "b")), mesh=mesh, in_specs=everywhere, out_specs=PartitionSpec()
    )
    return jax.jit(mapped)


@settings(max_examples=50)
@given(first=WHOLE, second=WHOLE)
@example(first=[2**24 - 1] * 8, second=[4095, 4096] * 4)
def test_integers_are_summed_exactly(first, second):
    """Integers are summed as integers: float32 holds them exactly only up to 2 ** 24."""
    tree = {
        "counts": np.stack([first, second], axis=1).astype(np.int32),
        "loss": np.asarray(first, np.float32) / 2**10,
        "more": np.asarray(second, np.int32),
    }
    result = summed()(tree)
    np.testing.assert_array_equal(result["counts"], [[sum(first), sum(second)]])
    np.testing.assert_array_equal(result["more"], [sum(second)])
    assert result["counts"].dtype == jnp.int32
    # Eight terms, each addition rounded once.
    np.testing.assert_allclose(result["loss"], [sum(first) / 2**10], rtol=8 * 2.0**-24)


def test_nothing_is_summed_over_no_axes():
    tree = {"a": jnp.arange(3, dtype=jnp.int32)}
    assert psum(tree, ()) is tree
