"""Weights that are read in the stack of all layers, against the same layer as an array."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from moezoo.kernels.grouped_matmul import few, grouped_matmul, routed, routed_mlp
from moezoo.kernels.permute import plan
from moezoo.nn.linear import project
from moezoo.parallel.axes import Axes, Role, Weight
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.stacks import FEW_ROWS, InStack, ReadInStack
from moezoo.parallel.stored import Stored
from moezoo.parallel.weight_mover import WeightMover

LAYERS, LAYER = 3, 2


def random_array(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def in_stack(seed, shape, dtype=jnp.float32):
    """Return a layer in its stack, and the same layer as an array."""
    stack = random_array(seed, (LAYERS, *shape), dtype)
    return InStack(stack=stack, layer=jnp.int32(LAYER), dtype=np.dtype(dtype)), stack[LAYER]


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("shape", [(4, 8, 24), (5, 3, 24)])  # 32 inputs are cut into parts, 15 are not
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_product(rows, shape, dtype, error):
    weight, array = in_stack(0, shape, dtype)
    x = random_array(1, (rows, *shape[:2]), dtype)
    found = jax.jit(lambda x, w: project(x, w, inputs=2))(x, weight)
    assert found.dtype == dtype
    wanted = np.tensordot(np.asarray(x, np.float64), np.asarray(array, np.float64), 2)
    # Sums of tens of terms, rounded to the dtype once.
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=error * abs(wanted).max())


def test_numbers_are_those_of_the_dtype_of_the_layer():
    """A stack of float32 that computes in bfloat16, as in training: a product must not see its further bits."""
    dtype = np.dtype(jnp.bfloat16)
    stack = random_array(0, (LAYERS, 32, 24))
    weight, wanted = InStack(stack=stack, layer=jnp.int32(LAYER), dtype=dtype), stack[LAYER].astype(dtype)
    np.testing.assert_array_equal(weight.materialise(jnp.float32), wanted.astype(jnp.float32))
    matrices = InStack(stack=stack[:, None], layer=jnp.int32(LAYER), dtype=dtype)
    np.testing.assert_array_equal(matrices.matrix(jnp.int32(0)), wanted)
    for rows in (1, FEW_ROWS + 1):
        x = random_array(1, (rows, 32), dtype)
        found = weight.product(x, 1, jnp.float32)
        exact = np.asarray(x, np.float64) @ np.asarray(wanted, np.float64)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * abs(exact).max())


def test_a_product_with_one_row_copies_no_matrix():
    weight, array = in_stack(0, (256, 1024))
    compiled = jax.jit(lambda x, w: project(x, w)).lower(jnp.ones((1, 256)), weight).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < array.nbytes / 8


@pytest.mark.parametrize("inputs", [32, 15])  # row by row, and in blocks
def test_grouped_product(inputs):
    """Groups without rows are skipped; rows after the last group are zero and may hold anything."""
    sizes = np.array([2, 0, 3, 1], np.int32)
    weight, array = in_stack(0, (4, inputs, 16))
    rows = random_array(3, (8, inputs)).at[6:].set(jnp.nan)
    assert few.suits(8, weight) == (inputs == 32)
    assert not few.suits(8, array)
    found = jax.jit(grouped_matmul)(rows, weight, jnp.asarray(sizes))
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        wanted = np.asarray(rows[row], np.float64) @ np.asarray(array[group], np.float64)
        np.testing.assert_allclose(found[row], wanted, rtol=0, atol=1e-5 * abs(wanted).max())
    np.testing.assert_array_equal(found[6:], 0)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("tokens", "way"), [(1, "few"), (4, "few"), (5, "blocks of few"), (17, "blocks of few"), (33, "blocks")]
)
def test_experts_of_few_rows(monkeypatch, tokens, way, dtype, error):
    """Two of four experts per token, in each of three ways: spread, all the same two, and a token that goes nowhere."""
    groups, k, embed, mlp = 4, 2, 32, 16
    calls = {"few": few.multiply, "blocks of few": routed.SIZES_OF_FEW, "blocks": routed.SIZES}
    monkeypatch.setattr(few, "multiply", calls["few"] if way == "few" else None)
    monkeypatch.setattr(routed, "SIZES_OF_FEW", calls["blocks of few"] if way == "blocks of few" else None)
    monkeypatch.setattr(routed, "SIZES", calls["blocks"] if way == "blocks" else None)
    (gate, a), (up, b), (down, c) = (
        in_stack(seed, shape, dtype) for seed, shape in enumerate([(groups, embed, mlp)] * 2 + [(groups, mlp, embed)])
    )
    x, gates = random_array(3, (tokens, embed), dtype), abs(random_array(4, (tokens, k)))
    spread = np.random.default_rng(5).permuted(np.tile(np.arange(groups), (tokens, 1)), axis=1)[:, :k]
    nowhere = np.where(np.arange(tokens)[:, None] == tokens // 2, groups, spread)
    run = jax.jit(
        lambda ids, x: routed_mlp(
            x, gates, plan(ids, 0, groups), gate, up, down, activation=lambda g, u: jnp.tanh(g) * u
        )
    )
    for ids in (spread, np.full((tokens, k), [3, 1]), nowhere):
        lost = (ids == groups).all(1)
        found = run(jnp.asarray(ids, jnp.int32), jnp.where(lost[:, None], jnp.nan, x))
        assert found.dtype == dtype
        wanted = np.zeros((tokens, embed))
        for t, n in np.argwhere(ids < groups):
            token, *weights = (np.asarray(w, np.float64) for w in (x[t], *(w[ids[t, n]] for w in (a, b, c))))
            wanted[t] += float(gates[t, n]) * (np.tanh(token @ weights[0]) * (token @ weights[1])) @ weights[2]
        # Three sums of tens of terms, each rounded to the dtype.
        np.testing.assert_allclose(
            np.asarray(found, np.float64), wanted, rtol=0, atol=error * abs(wanted).max() + 1e-30
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_experts_of_a_training_step_read_in_the_stack(implementation, dtype):
    """Results, and gradients of the layer's slice, are those of arrays to the bit; the stack has no gradient."""
    groups, embed, mlp, tokens = 4, 16, 24, 32
    shapes = [(groups, embed, mlp)] * 2 + [(groups, mlp, embed)]
    stacks = [random_array(seed, (LAYERS, *shape)) for seed, shape in enumerate(shapes)]
    x, gates = random_array(3, (tokens, embed), dtype), abs(random_array(4, (tokens, 2)))
    ids = np.where(np.arange(tokens)[:, None] < 9, [0, 1], [3, 1])  # group 2 has no rows

    def total(in_stack: bool, stacks: Any, parts: Any, x: Array, gates: Array) -> Array:
        weights = [part.astype(dtype) for part in parts]
        if in_stack:
            where = {"layer": jnp.int32(LAYER), "dtype": np.dtype(dtype)}
            weights = [ReadInStack(part=w, stack=s, **where) for w, s in zip(weights, stacks, strict=True)]
        rows = plan(jnp.asarray(ids, jnp.int32), 0, groups)
        y = routed_mlp(x, gates, rows, *weights, activation=lambda g, u: jnp.tanh(g) * u, implementation=implementation)
        return (y.astype(jnp.float32) * jnp.arange(embed, dtype=jnp.float32)[None]).sum()

    operands = (stacks, [stack[LAYER] for stack in stacks], x, gates)
    both = jax.jit(jax.value_and_grad(total, argnums=(1, 2, 3, 4)), static_argnums=0)
    (wanted, gradients), (found, others) = (both(in_stack, *operands) for in_stack in (False, True))
    assert float(found) == float(wanted)
    assert not any(np.any(stack) for stack in others[0])
    jax.tree.map(np.testing.assert_array_equal, others, gradients)
    assert not np.any(others[1][0][2])
    assert np.any(others[1][0][0])


class Product(Stored):
    """The product of two matrices, both trained."""

    left: jax.Array
    right: jax.Array
    dtype: np.dtype = eqx.field(static=True)

    def axes(self, declared):
        left, right = (declared.inputs, ("rank",)), (("rank",), declared.outputs)
        return {name: Axes(Role.WEIGHT, declared.stacked, *pair) for name, pair in (("left", left), ("right", right))}

    @property
    def shape(self):
        return (*self.left.shape[:-1], self.right.shape[-1])

    def materialise(self, dtype):
        return (self.left @ self.right).astype(dtype)


class Pair(eqx.Module):
    array: Weight[Array, "embed -> mlp"]
    stored: Weight[Array, "embed -> mlp"]


def test_a_container_in_a_stack_has_arrays_of_its_layer():
    """Its methods expect arrays; a weight next to it stays in the stack."""
    left, right = random_array(0, (LAYERS, 4, 2)), random_array(1, (LAYERS, 2, 6))
    product: Any = Product(left=left, right=right, dtype=np.dtype("float32"))
    pair = Pair(random_array(2, (LAYERS, 4, 6)), product)
    found = WeightMover(on_mesh(Execution())).layer(pair, jnp.int32(LAYER))
    assert isinstance(found.array, InStack)
    np.testing.assert_allclose(found.stored.materialise(jnp.float32), left[LAYER] @ right[LAYER], rtol=1e-6)
