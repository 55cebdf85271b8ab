"""Experts as one loop, compared with the permutations and products that it replaces."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import executed_products, largest_array

from moezoo import Execution
from moezoo.kernels.grouped_matmul import routed, routed_mlp, tensor_cores_mlp
from moezoo.kernels.grouped_matmul.backend import ExpertWeights
from moezoo.kernels.grouped_matmul.chips import HOPPER
from moezoo.kernels.permute import plan
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import equations

TOKENS, K, EXPERTS, EMBED, MLP = 24, 2, 4, 5, 3


def shifted_tanh(gate, up):
    """An activation that is not zero where both operands are."""
    return jnp.tanh(gate) * (up + 1) + 0.5


def operands(dtype="float32"):
    """Return tokens, gates, matrices, biases and a cotangent, as a backend is called with them."""
    rng = np.random.default_rng(3)
    matrices = ((EXPERTS, EMBED, MLP),) * 2 + ((EXPERTS, MLP, EMBED),)
    tokens, *weights, cotangent = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((TOKENS, EMBED), *matrices, *((EXPERTS, MLP),) * 2, (TOKENS, EMBED))
    )
    return tokens, jnp.asarray(rng.standard_normal((TOKENS, K)), jnp.float32), *weights, cotangent


def choose(groups):
    """Return experts per token: `groups` tokens have a first expert; others, the last one included, go nowhere."""
    ids = np.full((TOKENS, K), EXPERTS, np.int32)
    first = np.repeat(np.arange(EXPERTS), groups)
    ids[: first.size, 0] = np.random.default_rng(1).permutation(first)
    ids[: first.size : 3, 1] = (ids[: first.size : 3, 0] + 1) % EXPERTS
    return ids


def value_and_gradients(ids, tokens, gates, gate, up, down, gate_bias, up_bias, cotangent, **options):
    """Return the sums, and the gradients of all operands."""

    def run(tokens, gates, gate, up, down, gate_bias, up_bias):
        options_of_all = {"activation": shifted_tanh, "gate_bias": gate_bias, "up_bias": up_bias, **options}
        return routed_mlp(tokens, gates, plan(ids, 0, EXPERTS), gate, up, down, **options_of_all)

    value, pull = jax.vjp(run, tokens, gates, gate, up, down, gate_bias, up_bias)
    return value, *pull(cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", ["inputs", "products"])
def test_equals_the_composed_products(monkeypatch, keep, dtype):
    """Tokens that go nowhere hold NaN, and so do their cotangents. Repeats are equal to the bit."""
    monkeypatch.setattr(routed, "SIZES", (8, 5, 2))
    fused, composed = (
        jax.jit(functools.partial(value_and_gradients, **options))
        for options in ({"implementation": "blocked", "keep": keep}, {"implementation": "reference"})
    )
    tokens, *others, cotangent = operands(dtype)
    # Every row is used, and the last block reaches beyond them.
    full = np.tile(np.asarray([0, 3], np.int32), (TOKENS, 1))
    full[0, 1] = 1
    # Several largest blocks and a rest, no rest, one that fills a size, an empty group; nothing at all.
    for ids in (full, *map(choose, ((11, 0, 8, 4), (0, 0, 23, 0), (0, 0, 0, 0)))):
        nowhere = (ids == EXPERTS).all(1)[:, None]
        given = (jnp.where(nowhere, jnp.nan, tokens), *others, jnp.where(nowhere, jnp.nan, cotangent))
        results = fused(ids, *given)
        for result, again in zip(results, fused(ids, *given), strict=True):
            np.testing.assert_array_equal(result, again)
        for result, want in zip(results, composed(ids, tokens, *others, cotangent), strict=True):
            assert result.dtype == want.dtype
            got, want = (np.asarray(x, np.float64) for x in (result, want))
            # Sums of at most 24 terms of order ten; in bfloat16 both round products, activations and results.
            ulps = 24 * 2.0**-24 if dtype == "float32" else 8 * 2.0**-8
            np.testing.assert_allclose(got, want, rtol=0, atol=ulps * max(1, np.abs(want).max()))
            assert not got[want == 0].any()


def test_gradients_of_gates_are_summed_in_float32():
    """Of whole numbers, in bfloat16, it is exact: those of cotangent x down need more bits than bfloat16 has."""
    rng = np.random.default_rng(0)
    draw = lambda most, *shape: rng.integers(-most, most, shape, endpoint=True)  # noqa: E731
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1)), axis=1)[:, :K]
    x, cotangent, up = draw(1, TOKENS, EMBED), draw(255, TOKENS, EMBED), draw(1, EXPERTS, EMBED, MLP)
    down, gates = draw(3, EXPERTS, MLP, EMBED), jnp.asarray(draw(2, TOKENS, K), jnp.float32)
    tokens, *weights, back = (jnp.asarray(each, jnp.bfloat16) for each in (x, up, up, down, cotangent))

    def run(gates):
        return routed_mlp(tokens, gates, plan(jnp.asarray(ids), 0, EXPERTS), *weights, activation=lambda _, up: up)

    (found,) = jax.vjp(run, gates)[1](back)
    inner, by_inner = np.einsum("te,tkef->tkf", x, up[ids]), np.einsum("te,tkfe->tkf", cotangent, down[ids])
    np.testing.assert_array_equal(found, (inner * by_inner).sum(-1))


def test_computes_only_rows_that_hold_an_assignment(monkeypatch):
    """The room is 48 rows; of these 13 are used."""
    monkeypatch.setattr(routed, "SIZES", (8, 2))
    ids = np.full((TOKENS, K), EXPERTS, np.int32)
    ids[:13, 0] = [0] * 2 + [1] * 11
    products = executed_products(functools.partial(value_and_gradients, keep="products"), ids, *operands())
    # Rows of a block are the first dimension of the left operand, except in gradients of matrices, which sum over them.
    blocks = [2, 8, 8]
    of_rows = [shape for shape in products if shape in {(n, m) for n in blocks for m in (EMBED, MLP)}]
    assert len(of_rows) == len(products) == 9 * len(blocks)
    assert sorted(n for n, _ in of_rows) == sorted(9 * blocks)


def test_no_array_of_permuted_rows():
    """The compiled backward pass of kept inputs makes no array [R, f]: each row passes through in a block."""
    width = 96
    rng = np.random.default_rng(0)
    ids = jnp.tile(jnp.arange(K, dtype=jnp.int32), (512, 1))
    shapes = (512, 4), (512, K), (EXPERTS, 4, width), (EXPERTS, 4, width), (EXPERTS, width, 4)
    tokens, gates, *matrices = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def loss(tokens, gates, *matrices):
        sums = routed_mlp(tokens, gates, plan(ids, 0, EXPERTS), *matrices, activation=shifted_tanh, keep="inputs")
        return sums.sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(tokens, gates, *matrices).compile().as_text()
    assert largest_array(text or "") < ids.size * width


@pytest.mark.parametrize(("remat", "loops"), [("full", 3 + 8), ("dots", 3 + 6), ("none", 3 + 6)])
def test_rematerialisation_repeats_no_loop(remat, loops):
    """Each group is one block: three products forward; backward six, and two more where only inputs are kept."""
    execution = on_mesh(Execution(dtype=jnp.dtype("float32"), remat=remat))
    ids = jnp.asarray(choose((11, 0, 8, 4)))

    def step(tokens, *others):
        *others, cotangent = others

        def layer(tokens, *others):
            gates, gate, up, down, *_ = others
            options = {"activation": shifted_tanh, "keep": execution.keep}
            return tokens + routed_mlp(tokens, gates, plan(ids, 0, EXPERTS), gate, up, down, **options)

        value, pull = jax.vjp(execution.checkpoint(layer), tokens, *others)
        return value, pull(cotangent)

    assert len(executed_products(step, *operands())) == loops * 4


@pytest.mark.parametrize("keep", ["inputs", "products"])
def test_kernels_of_gpus_gather_tokens_once_per_pass(keep):
    """And the backward pass the cotangents; no compiler needs to notice that rows are made twice."""
    tokens, gates, *weights, _ = operands("bfloat16")
    here = plan(jnp.asarray(choose((3, 0, 2, 1))), 0, EXPERTS)

    def both(tokens, gates, weights, cotangent):
        run = lambda *operands: tensor_cores_mlp.routed_mlp(HOPPER, *operands, jnp.minimum, keep)  # noqa: E731
        value, pull = jax.vjp(lambda x, g, w: run(x, g, here, w), tokens, gates, weights)
        return value, pull(cotangent)

    jaxpr = jax.make_jaxpr(both)(tokens, gates, ExpertWeights(*weights), tokens)
    gathers: list[Any] = [each.equation for each in equations(jaxpr) if each.equation.primitive.name == "gather"]
    shapes = [gather.outvars[0].aval.shape for gather in gathers]
    assert sum(shape == (*here.assignment.shape, EMBED) for shape in shapes) == 3
