"""Which tokens are drawn, and how often, against NumPy."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moezoo.generation.sampling import Sampling

VOCAB, DRAWS = 7, 4096


@functools.cache
def draw_many(sampling):
    """Return a function that draws for many rows of the same logits."""
    row = jnp.arange(DRAWS)
    return jax.jit(lambda logits, key: sampling(jnp.broadcast_to(logits, (DRAWS, VOCAB)), row, 0, key))


def distribution(logits, sampling):
    """Return probabilities by the definition, in float64."""
    logits = logits[: sampling.vocab].astype(np.float64) / sampling.temperature
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k or len(logits)]
    p = np.exp(logits - logits[order[0]])
    total, reached, kept = p[order].sum(), 0.0, []
    for token in order:
        if sampling.top_p is not None and reached >= sampling.top_p:
            break
        kept.append(token)
        reached += p[token] / total
    result = np.zeros(VOCAB)
    result[kept] = p[kept] / p[kept].sum()
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_k=3),
        Sampling(1.0, top_k=100),
        Sampling(1.0, top_p=0.75),
        Sampling(1.0, top_k=4, top_p=0.75),
        Sampling(1.0, top_p=1.0, vocab=5),
    ],
    ids=str,
)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1))
def test_draws_follow_the_definition(sampling, seed):
    logits = np.random.default_rng(seed).permutation(np.linspace(-1.5, 1.5, VOCAB)).astype(np.float32)
    drawn = np.asarray(draw_many(sampling)(logits, jax.random.key(seed)))
    wanted = distribution(logits, sampling)
    found = np.bincount(drawn, minlength=VOCAB) / DRAWS
    assert not found[wanted == 0].any()
    # Six standard deviations: a correct share exceeds this about twice in 10^9.
    assert (abs(found - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-9).all()


def exact_choice(weights, top_p, top_k, vocab):
    """Return, in fractions, the tokens that can be drawn with probabilities proportional to `weights`."""
    order = sorted(range(len(weights[:vocab])), key=lambda token: (-weights[token], token))[:top_k]
    total, reached, kept = sum(weights[token] for token in order), 0, set()
    for token in order:
        if Fraction(reached, total) >= top_p:
            break
        kept.add(token)
        reached += weights[token]
    return kept


@pytest.mark.parametrize(
    ("weights", "top_k", "vocab"),
    [
        ((1, 1, 1, 1, 1, 1, 1, 1), None, None),
        ((0, 1, 0, 1, 1, 0, 1, 0), None, None),
        ((1, 1, 1, 0, 1, 1, 1, 1), 4, None),
        ((1, 0, 1, 0, 1, 1, 1, 1), None, 3),
        ((2, 1, 4, 2, 1, 2, 4, 0), None, None),
        ((2, 1, 4, 2, 1, 2, 4, 0), 4, None),
    ],
    ids=str,
)
def test_top_p_at_ties(weights, top_k, vocab):
    """With equal logits, and with sums of probabilities that equal `top_p`, exactly the tokens of the definition.

    Equal logits, a power of two in number, have exact probabilities in float32. Otherwise rounding decides where
    `top_p` equals a sum, so it is only put halfway between multiples of 1 / total, of which all sums are multiples.
    """
    kept = [weights[token] for token in exact_choice(weights, 1, top_k, vocab) if weights[token]]
    halves = range(1, 2 * sum(kept) + 1, 1 if set(kept) == {1} else 2)
    logits = jnp.broadcast_to(jnp.asarray([np.log(w) if w else -1e4 for w in weights], jnp.float32), (256, 8))
    for top_p in (Fraction(half, 2 * sum(kept)) for half in halves):
        drawn = Sampling(1.0, top_k, float(top_p), vocab)(logits, jnp.arange(256), 0, jax.random.key(0))
        # A token of the smallest probability, 1 / 16, is missing from 256 draws with probability 7e-8.
        assert set(drawn.tolist()) == exact_choice(weights, top_p, top_k, vocab), top_p


def test_takes_the_most_likely_token():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((5, VOCAB), np.float32))
    rows, key = jnp.arange(5), jax.random.key(0)
    np.testing.assert_array_equal(Sampling()(logits, rows, 0, key), logits.argmax(1))
    np.testing.assert_array_equal(Sampling(vocab=3)(logits, rows, 0, key), logits[:, :3].argmax(1))
    for sampling in (
        Sampling(3.0, top_k=1),
        Sampling(3.0, top_p=1e-9),
        Sampling(1e-4),
        Sampling(1e-300),
        Sampling(1e-39, top_k=3),
    ):
        np.testing.assert_array_equal(sampling(logits, rows, 0, key), logits.argmax(1))


def test_steps_and_rows_draw_independently():
    logits, key = jnp.zeros((64, VOCAB)), jax.random.key(0)
    one = Sampling(1.0)(logits, jnp.arange(64), 1, key)
    assert (one != Sampling(1.0)(logits, jnp.arange(64), 2, key)).any()
    np.testing.assert_array_equal(Sampling(1.0)(logits[:8], jnp.arange(8, 16), 1, key), one[8:16])
