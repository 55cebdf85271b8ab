"""The router against a loop over tokens in float64, and its gradients against finite differences of that loop."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.moe.router import Choice, Router

BATCH, SEQ, EMBED, EXPERTS = 2, 5, 4, 6
# Logits of order 4 to within 8 roundings to float32; the softmax passes on their absolute error.
PRECISION = 8 * 4 * 2.0**-24


def router_of(weight, k, dtype=jnp.float32):
    """Return a router with this matrix."""
    router = Router(EMBED, weight.shape[1], k, Choice(), dtype=jnp.dtype(dtype), key=jax.random.key(0))
    return eqx.tree_at(lambda r: r.weight, router, jnp.asarray(weight, dtype))


def _route(weight, x, valid, k):
    (experts, gates), sums = router_of(weight, k, x.dtype)(x, valid)
    return experts, gates, sums


route = jax.jit(_route, static_argnames="k")


def inputs(seed=0):
    """Return activations, a router matrix, and a mask of real tokens, with padding in the middle and at the end."""
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((BATCH, SEQ, EMBED)), rng.standard_normal((EMBED, EXPERTS))
    valid = np.asarray([[True, True, False, True, True], [True, True, True, False, False]])
    return x.astype(np.float32), weight.astype(np.float32), valid


def loop(x, weight, valid, k):
    """Return chosen experts and their gates, token by token, and the sums of the layer."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    experts = weight.shape[1]
    chosen, gates = np.full((BATCH * SEQ, k), experts), np.zeros((BATCH * SEQ, k))
    counts, probabilities, z = np.zeros((BATCH, experts), int), np.zeros((BATCH, experts)), 0.0
    for b, s in np.argwhere(valid):
        logits = (x[b, s][:, None] * weight).sum(0)  # tied columns tie to the bit
        scores = np.exp(logits) / np.exp(logits).sum()
        best = sorted(range(experts), key=lambda e: (-scores[e], e))[:k]
        chosen[b * SEQ + s], gates[b * SEQ + s] = best, scores[best] / scores[best].sum()
        counts[b, best] += 1
        probabilities[b] += scores
        z += np.log(np.exp(logits).sum()) ** 2
    return chosen, gates, counts, probabilities, z


@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_equals_a_loop_over_tokens(k):
    x, weight, valid = inputs()
    experts, gates, sums = route(weight, x, valid, k)
    wanted_experts, wanted_gates, counts, probabilities, z = loop(x, weight, valid, k)
    np.testing.assert_array_equal(experts, wanted_experts)
    np.testing.assert_array_equal(sums.counts, counts)
    np.testing.assert_array_equal(sums.tokens, valid.sum(1))
    assert sums.dropped == 0
    np.testing.assert_allclose(gates, wanted_gates, rtol=0, atol=PRECISION)
    np.testing.assert_allclose(sums.probabilities, probabilities, rtol=0, atol=SEQ * PRECISION)
    np.testing.assert_allclose(sums.z, z, rtol=PRECISION)


def test_padding_goes_nowhere():
    x, weight, valid = inputs()
    experts, gates, _ = route(weight, x, valid, 2)
    assert (np.asarray(experts)[~valid.reshape(-1)] == EXPERTS).all()
    assert not np.asarray(gates)[~valid.reshape(-1)].any()
    experts, gates, sums = route(weight, x, np.zeros_like(valid), 2)
    assert (np.asarray(experts) == EXPERTS).all()
    for total in (gates, sums.counts, sums.probabilities, sums.tokens, sums.z):
        assert not np.asarray(total).any()


def test_ties_go_to_the_lower_index():
    x, weight, valid = inputs()
    weight[:, 1] *= 4
    weight[:, 4] = weight[:, 1]
    experts, _, _ = route(weight, x, valid, 2)
    experts = np.asarray(experts)
    np.testing.assert_array_equal(experts, loop(x, weight, valid, 2)[0])
    assert (experts == [1, 4]).all(axis=1).any()  # the tie occurs
    experts, gates, _ = route(weight, np.zeros_like(x), np.ones_like(valid), 4)
    np.testing.assert_array_equal(experts, np.tile(np.arange(4), (BATCH * SEQ, 1)))
    np.testing.assert_array_equal(gates, np.full((BATCH * SEQ, 4), 0.25))


def test_scores_are_float32_whatever_the_activations():
    """Activations and weights in bfloat16 are read exactly; logits in bfloat16 would be off by 2 ** -7."""
    x, weight, _ = inputs()
    x, valid = jnp.asarray(x, jnp.bfloat16), np.ones((BATCH, SEQ), bool)
    weight = np.asarray(jnp.asarray(weight, jnp.bfloat16), np.float32)
    experts, gates, sums = route(weight, x, valid, 2)
    wanted_experts, wanted_gates, _, probabilities, z = loop(x, weight, valid, 2)
    np.testing.assert_array_equal(experts, wanted_experts)
    np.testing.assert_allclose(gates, wanted_gates, rtol=0, atol=PRECISION)
    np.testing.assert_allclose(sums.probabilities, probabilities, rtol=0, atol=SEQ * PRECISION)
    np.testing.assert_allclose(sums.z, z, rtol=PRECISION)
    assert gates.dtype == sums.probabilities.dtype == sums.z.dtype == jnp.float32


def loss(parts, of_gates, of_probabilities):
    """Return a sum of all differentiable results, weighed so that gradients do not cancel (gates sum to 1)."""
    gates, probabilities, z = parts
    return (gates * of_gates).sum() + (probabilities * of_probabilities).sum() + z


def test_gradients_equal_finite_differences():
    x, weight, valid = inputs()
    rng = np.random.default_rng(1)
    of_gates, of_probabilities = rng.standard_normal((BATCH * SEQ, 2)), rng.standard_normal((BATCH, EXPERTS))
    constants = of_gates.astype(np.float32), of_probabilities.astype(np.float32)

    def through_router(x, weight):
        (_, gates), sums = router_of(weight, 2)(x, jnp.asarray(valid))
        return loss((gates, sums.probabilities, sums.z), *constants)

    def through_loop(x, weight):
        chosen, gates, _, probabilities, z = loop(x, weight, valid, 2)
        assert (chosen == loop(*inputs()[:2], valid, 2)[0]).all()  # no choice flips under the difference
        return loss((gates, probabilities, z), *constants)

    gradients = jax.jit(jax.grad(through_router, argnums=(0, 1)))(x, weight)
    for argument, gradient in enumerate(gradients):
        wanted = np.zeros(gradient.shape)
        for index in np.ndindex(gradient.shape):
            step = np.zeros(gradient.shape)
            step[index] = 1e-6
            up, down = ([x.astype(np.float64), weight.astype(np.float64)] for _ in range(2))
            up[argument], down[argument] = up[argument] + step, down[argument] - step
            wanted[index] = (through_loop(*up) - through_loop(*down)) / 2e-6
        # Float32: some 60 roundings, relative to the largest entry; the differences themselves are good to 1e-9.
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=60 * 2.0**-24 * np.abs(wanted).max())
    assert not np.asarray(gradients[0])[~valid].any()


def test_the_gates_of_an_assignment_reach_the_router():
    """Training seems to work without this gradient, so only a test notices its loss."""
    x, weight, valid = inputs()

    def first_choice(weight):
        return router_of(weight, 2)(jnp.asarray(x), jnp.asarray(valid)).assignment.gates[:, 0].sum()

    gradient = np.asarray(jax.jit(jax.grad(first_choice))(weight))
    chosen = np.unique(loop(x, weight, valid, 2)[0][valid.reshape(-1)])
    assert gradient[:, chosen].any(axis=0).all()


def test_a_trained_bias_is_part_of_the_logits():
    """It equals a row of the matrix for an input that is always 1; it changes choices and has a gradient."""
    x, weight, valid = inputs()
    bias = np.random.default_rng(2).standard_normal(EXPERTS).astype(np.float32)
    fresh = Router(EMBED, EXPERTS, 2, Choice(), bias="trained", dtype=jnp.dtype("float32"), key=jax.random.key(0))
    np.testing.assert_array_equal(fresh.bias, np.zeros(EXPERTS))
    assert fresh.choice_bias is None
    router = eqx.tree_at(lambda r: (r.weight, r.bias), fresh, (jnp.asarray(weight), jnp.asarray(bias)))
    (experts, gates), sums = jax.jit(lambda r: r(jnp.asarray(x), jnp.asarray(valid)))(router)
    with_one = np.concatenate([x, np.ones((BATCH, SEQ, 1))], axis=-1)
    wanted_experts, wanted_gates, counts, probabilities, z = loop(with_one, np.vstack([weight, bias]), valid, 2)
    np.testing.assert_array_equal(experts, wanted_experts)
    assert (wanted_experts != loop(x, weight, valid, 2)[0]).any()
    np.testing.assert_allclose(gates, wanted_gates, rtol=0, atol=PRECISION)
    np.testing.assert_array_equal(sums.counts, counts)
    np.testing.assert_allclose(sums.probabilities, probabilities, rtol=0, atol=SEQ * PRECISION)
    np.testing.assert_allclose(sums.z, z, rtol=PRECISION)

    def total(bias):
        (_, gates), sums = eqx.tree_at(lambda r: r.bias, router, bias)(jnp.asarray(x), jnp.asarray(valid))
        return gates[:, 0].sum() + sums.z

    def through_loop(bias):
        _, gates, _, _, z = loop(with_one, np.vstack([weight, bias]), valid, 2)
        return gates[:, 0].sum() + z

    step = 1e-6 * np.eye(EXPERTS)
    wanted = [(through_loop(bias + by) - through_loop(bias - by)) / 2e-6 for by in step]
    gradient = jax.jit(jax.grad(total))(jnp.asarray(bias))
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=60 * 2.0**-24 * np.abs(wanted).max())


def test_counts_are_not_doubled_under_rematerialisation():
    x, weight, valid = inputs()

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, weight):
        (_, gates), sums = router_of(weight, 2)(x, jnp.asarray(valid))
        return x * gates.sum(), sums

    def total(weight):
        x_out, sums = jax.lax.scan(layer, jnp.asarray(x), weight)
        return x_out.sum(), sums

    (_, sums), _ = jax.jit(jax.value_and_grad(total, has_aux=True))(np.stack([weight, weight]))
    np.testing.assert_array_equal(sums.counts.sum(-1), 2 * np.tile(valid.sum(1), (2, 1)))


def test_scales_of_the_input_and_of_gates():
    """A token is divided by its root mean square, scaled, and divided by sqrt(d); gates are scaled after their sum."""
    x, weight, valid = inputs()
    rng = np.random.default_rng(5)
    scale, of_experts = rng.uniform(0.5, 2, EMBED).astype(np.float32), rng.uniform(0.5, 2, EXPERTS).astype(np.float32)
    dtype, key = jnp.dtype("float32"), jax.random.key(0)
    router = Router(EMBED, EXPERTS, 2, Choice(), scales="trained", norm_eps=0.1, dtype=dtype, key=key)
    where = lambda r: (r.weight, r.input_scale, r.expert_scale)  # noqa: E731
    router = eqx.tree_at(where, router, tuple(map(jnp.asarray, (20 * weight, scale, of_experts))))
    (experts, gates), sums = jax.jit(lambda router, x: router(x, jnp.asarray(valid)))(router, x)
    wide = x.astype(np.float64)
    read = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * scale / EMBED**0.5
    chosen, shares, *_, z = loop(read, 20 * weight, valid, 2)
    np.testing.assert_array_equal(experts, chosen)
    wanted = shares * np.append(of_experts, 0)[chosen]
    np.testing.assert_allclose(gates, wanted, rtol=0, atol=20 * PRECISION)
    np.testing.assert_allclose(sums.z, z, rtol=20 * PRECISION)
