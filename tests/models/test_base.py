"""Embedding and unembedding."""

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.models.base import Unembedding


def test_logits_are_not_rounded_to_bfloat16():
    """The products of bfloat16 numbers are summed in float32."""
    unembedding = Unembedding(64, 50, epsilon=1e-3, std=1.0, dtype=jnp.dtype("bfloat16"), key=jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (3, 64), jnp.bfloat16)
    logits = unembedding(hidden)
    factors = (np.asarray(x, np.float64) for x in (unembedding.norm(hidden), unembedding.weight))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.matmul(*factors), rtol=0, atol=1e-5 * np.abs(logits).max())
