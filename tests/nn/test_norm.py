"""RMSNorm by its formula."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from definitions import rms_norm

from moezoo.nn.norm import RMSNorm, normalise


def test_formula():
    x = 3 * np.random.default_rng(0).standard_normal((2, 5, 6), np.float32)
    scale = np.arange(1, 7, dtype=np.float32)
    norm = eqx.tree_at(lambda n: n.scale, RMSNorm(6, 0.1, dtype=jnp.dtype("float32")), jnp.asarray(scale))
    wanted = rms_norm(x, scale, 0.1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), wanted, rtol=10 * 2.0**-24)
    # In bfloat16 the input, the normalised value and the product are rounded, the mean is not.
    narrow = norm(jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float64), wanted, rtol=4 * 2.0**-8)


def test_a_scale_around_one():
    """The stored number is what is added to one; it starts at zero, and is not rounded with it."""
    x = 3 * np.random.default_rng(0).standard_normal((2, 5, 6), np.float32)
    norm = RMSNorm(6, 0.1, around_one=True, dtype=jnp.dtype("bfloat16"))
    assert not np.asarray(norm.scale).any()
    small = jnp.full(6, 2.0**-10, jnp.bfloat16)
    norm = eqx.tree_at(lambda n: n.scale, norm, small)
    np.testing.assert_allclose(norm(jnp.asarray(x)), rms_norm(x, np.full(6, 1 + 2.0**-10), 0.1), rtol=10 * 2.0**-24)


def test_the_cast_may_come_last():
    """In bfloat16 the product with the scale is rounded once, not its factors before."""
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((2, 5, 6), np.float32), jnp.bfloat16)
    scale = jnp.asarray(1 + 0.3 * np.random.default_rng(1).standard_normal(6), jnp.bfloat16)
    first, last = (
        eqx.tree_at(lambda n: n.scale, RMSNorm(6, 0.1, cast_last=last, dtype=jnp.dtype("bfloat16")), scale)(x)
        for last in (False, True)
    )
    once = rms_norm(np.asarray(x, np.float64), np.asarray(scale, np.float64), 0.1)
    np.testing.assert_array_equal(last, jnp.asarray(once, jnp.float32).astype(jnp.bfloat16))
    assert (np.asarray(first) != np.asarray(last)).any()
    without = normalise(x, 0.1)
    np.testing.assert_array_equal(without, jnp.asarray(rms_norm(np.asarray(x, np.float64), 1.0, 0.1), jnp.bfloat16))
