"""Products with weights by their definition, and initial values."""

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.nn.linear import contract, normal, project, project_rows


def test_products():
    x, weight = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate([(2, 3, 4), (3, 4, 5)]))
    wanted = np.einsum("bij,ijo->bo", x.astype(np.float64), weight)
    np.testing.assert_allclose(project(jnp.asarray(x), jnp.asarray(weight), inputs=2), wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(contract("bij,ijo->bo", jnp.asarray(x), jnp.asarray(weight)), wanted, rtol=0, atol=1e-5)
    narrow, narrow_weight = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight))
    assert project(narrow, narrow_weight, 2).dtype == jnp.bfloat16
    # Asked for float32, sums are not rounded to bfloat16.
    found = project(narrow, narrow_weight, 2, dtype=jnp.float32)
    wanted = np.einsum("bij,ijo->bo", *(np.asarray(a, np.float64) for a in (narrow, narrow_weight)))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_gradients_of_projected_rows():
    """By definition. On a CPU tokens are transposed in memory: no product has a transposed left operand."""
    sizes = (64, 32), (32, 48), (64, 48)
    x, weight, back = (np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(sizes))

    def run(x, weight, back):
        value, pull = jax.vjp(project_rows, x, weight)
        return value, *pull(back)

    program = jax.jit(run).lower(x, weight, back).compile()
    wide = x.astype(np.float64), weight.astype(np.float64), back.astype(np.float64)
    wanted = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
    for found, each in zip(program(x, weight, back), wanted, strict=True):
        np.testing.assert_allclose(found, each, rtol=0, atol=1e-4)
    assert "lhs_contracting_dims={0}" not in str(program.as_text())
    rounded = run(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), back)
    assert [a.dtype for a in rounded] == ["float32", "bfloat16", "bfloat16"]


def test_initial_values_are_normal_within_two_deviations():
    values = normal(jax.random.key(0), (64, 64), 0.5, jnp.dtype("bfloat16"))
    assert values.dtype == jnp.bfloat16
    wide = np.asarray(values, np.float64)
    assert 0.9 < np.abs(wide).max() <= 1.0
    # A normal distribution truncated at two deviations has 0.88 of its deviation; 4096 draws give it within 0.02.
    assert abs(wide.std() / 0.5 - 0.88) < 0.03
    assert abs(wide.mean()) < 0.03
