"""Weights that are read in the stack of all layers, against the same layer as an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.kernels.grouped_matmul import few, grouped_matmul
from moezoo.nn.linear import project
from moezoo.parallel.stacked import FEW_ROWS, InStack

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
