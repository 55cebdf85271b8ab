"""The cross-entropy against its definition, in chunks that do not divide the tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import auto_mesh
from programs import largest_array

import moezoo
from moezoo.models import MixtralConfig
from moezoo.models.base import LanguageModel, TokenEmbedding, Unembedding
from moezoo.nn.linear import project
from moezoo.parallel.kernels import Target
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.traces import equations
from moezoo.training import loss

EMBED, VOCAB = 6, 40
LABELS = np.array([[0, 3, -1, 39, 0], [-1, 2, 0, -1, 5]], np.int32)
HIDDEN = np.random.default_rng(0).standard_normal((2, 5, EMBED)).astype(np.float32)
OPERANDS = (
    Unembedding(EMBED, VOCAB, epsilon=1e-3, std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0)),
    HIDDEN,
)


def model(unembedding):
    """Return a model without layers."""
    embedding = TokenEmbedding(1, 1, std=1.0, dtype=jnp.dtype("float32"), key=jax.random.key(0))
    return LanguageModel(embedding, (), unembedding, MixtralConfig())


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 4 * VOCAB)
    monkeypatch.setattr(loss, "_CHUNK_TOKENS", 1)


def ours(unembedding, hidden):
    """Return a third of the cross-entropy."""
    return loss.cross_entropy(model(unembedding), hidden, jnp.asarray(LABELS), on_mesh(moezoo.Execution())) / 3


def definition(unembedding, hidden):
    """Return the same from all logits."""
    logits = project(unembedding.norm(hidden), unembedding.weight, dtype=jnp.float32)
    log_p = jax.nn.log_softmax(
        logits if unembedding.cap is None else unembedding.cap * jnp.tanh(logits / unembedding.cap)
    )
    return -sum(log_p[i, j, LABELS[i, j]] for i in range(2) for j in range(5) if LABELS[i, j] >= 0) / 3


@pytest.mark.parametrize("cap", [None, 1.5])
def test_cross_entropy_in_chunks(cap):
    """The sum over labels from 0 on, and its gradients; the last of three chunks is not full.

    No array is larger than the weight, so the logits of all ten tokens do not exist. A cap bends nearly all of them.
    """
    unembedding = Unembedding(
        EMBED, VOCAB, epsilon=1e-3, std=1.0, cap=cap, dtype=jnp.dtype("float32"), key=jax.random.key(0)
    )
    operands = unembedding, HIDDEN
    programs = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*operands).compile() for f in (ours, definition)]
    found, wanted = (largest_array(program.as_text() or "") for program in programs)
    assert found <= EMBED * VOCAB < wanted
    found, wanted = (jax.tree.leaves(program(*operands)) for program in programs)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_devices_may_share_the_vocabulary(monkeypatch):
    """Each has ten logits of a token. Those of the last device are thousands, so its maximum counts for all.

    With the maximum of any other, exp would overflow.
    """
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 4 * VOCAB // 4)
    monkeypatch.setattr(loss, "_CHUNK_TOKENS", 1)
    unembedding = eqx.tree_at(lambda u: u.weight, OPERANDS[0], replace_fn=lambda w: w.at[:, 30:].multiply(1000))
    execution = on_mesh(moezoo.Execution(auto_mesh(tensor=4), moezoo.compose("rules=tensor").rules))
    labels, specs, whole = jnp.asarray(LABELS), execution.specs(unembedding), jax.sharding.PartitionSpec()

    def local(unembedding, hidden):
        return loss.cross_entropy(model(unembedding), hidden, labels, execution) / 3

    mapped = jax.shard_map(
        jax.value_and_grad(local, argnums=(0, 1)),
        mesh=execution.mesh,
        in_specs=(specs, whole),
        out_specs=(whole, (specs, whole)),
    )
    found = jax.tree.leaves(jax.jit(mapped)(unembedding, jnp.asarray(HIDDEN)))
    wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(definition, argnums=(0, 1)))(unembedding, HIDDEN))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    assert jnp.isinf(jnp.exp(unembedding(jnp.asarray(HIDDEN)).max()))


@pytest.mark.parametrize(("by", "products"), [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_logits_are_made_once(by, products):
    """One product makes the logits of a chunk, and one each of the gradients by weights and by activations."""
    unembedding, hidden = OPERANDS

    def function(weight, hidden):
        return ours(eqx.tree_at(lambda u: u.weight, unembedding, weight), hidden)

    program = jax.make_jaxpr(jax.grad(function, argnums=by) if by else function)(unembedding.weight, hidden)
    assert sum(e.primitive.name == "dot_general" for e, *_ in equations(program)) == products


def test_a_chunk_has_enough_tokens_to_use_what_it_reads(monkeypatch):
    """And few tokens or a small vocabulary take one chunk."""
    monkeypatch.undo()
    assert [loss.chunk_rows(8192, vocab) for vocab in (256, 32768, 129280)] == [8192, 512, 512]
    assert loss.chunk_rows(100, 129280) == 100
    # On a GPU 2,048 whose logits, with all that is made of them, have at most 4 GiB; of a larger vocabulary fewer.
    gpu, vocabularies = Target("cuda", "9.0"), (256, 32768, 129280, 174762, 262144, 10**6)
    assert [loss.chunk_rows(2**15, vocab, gpu) for vocab in vocabularies] == [16384, 2048, 2048, 2048, 1024, 512]
    assert loss.chunk_rows(8192, 129280, Target("tpu")) == 512
