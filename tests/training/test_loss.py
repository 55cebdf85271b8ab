"""The cross-entropy against its definition, in chunks that do not divide the tokens."""

import jax
import jax.numpy as jnp
import numpy as np

import moezoo
from moezoo.models.base import Unembedding
from moezoo.training import loss


def test_cross_entropy_in_chunks(monkeypatch):
    """The sum over labels from 0 on, and its gradients; the last of three chunks is not full."""
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 4 * 7)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 5, 6)).astype(np.float32)
    labels = np.array([[0, 3, -1, 6, 0], [-1, 2, 0, -1, 5]], np.int32)
    unembedding = Unembedding(6, 7, epsilon=1e-3, std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))

    class Model(moezoo.models.base.LanguageModel):
        embedding: None
        stacks: tuple
        unembedding: Unembedding
        config: None

    def ours(unembedding, hidden):
        model = Model(None, (), unembedding, None)
        return loss.cross_entropy(model, hidden, jnp.asarray(labels), moezoo.Execution())

    def definition(unembedding, hidden):
        log_p = jax.nn.log_softmax(unembedding(hidden))
        return -sum(log_p[i, j, labels[i, j]] for i in range(2) for j in range(5) if labels[i, j] >= 0)

    found, wanted = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(unembedding, hidden) for f in (ours, definition))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
