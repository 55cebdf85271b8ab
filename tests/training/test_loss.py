"""The cross-entropy against its definition, in chunks that do not divide the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from programs import largest_array

import moezoo
from moezoo.models.base import LanguageModel, Unembedding
from moezoo.training import loss

EMBED, VOCAB = 6, 40


def test_cross_entropy_in_chunks(monkeypatch):
    """The sum over labels from 0 on, and its gradients; the last of three chunks is not full.

    No array is larger than the weight, so the logits of all ten tokens do not exist.
    """
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 4 * VOCAB)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 5, EMBED)).astype(np.float32)
    labels = np.array([[0, 3, -1, 39, 0], [-1, 2, 0, -1, 5]], np.int32)
    unembedding = Unembedding(EMBED, VOCAB, epsilon=1e-3, std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))

    class Model(LanguageModel):
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

    programs = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(unembedding, hidden).compile() for f in (ours, definition)
    ]
    found, wanted = (largest_array(program.as_text() or "") for program in programs)
    assert found <= EMBED * VOCAB < wanted
    found, wanted = (jax.tree.leaves(program(unembedding, hidden)) for program in programs)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
