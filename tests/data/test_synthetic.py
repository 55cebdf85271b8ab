"""The Markov chain agrees with its settings and its summary."""

import math

import numpy as np
import pytest

from moezoo.data import Synthetic, load
from moezoo.errors import UserError

SMALL = Synthetic(vocab=6, successors=3, documents=200, document_length=50)


def test_each_token_has_equally_likely_successors():
    source = load(SMALL, seq_len=16, seed=0, vocab=6)
    tokens = source.train.tokens.reshape(200, 50)  # both splits select from these
    counts = np.zeros((6, 6))
    np.add.at(counts, (tokens[:, :-1], tokens[:, 1:]), 1)
    assert ((counts > 0).sum(-1) == 3).all()
    shares = counts[counts > 0].reshape(6, 3) / counts.sum(-1, keepdims=True)
    np.testing.assert_allclose(shares, 1 / 3, atol=0.06)
    assert f"ln 3 = {math.log(3):.4f} nats per token" in source.summary["entropy"]
    assert (source.vocab, source.unit, tokens.dtype) == (6, "token", np.uint8)
    assert source.train.documents + source.validation.documents == 200


def test_the_seed_decides_the_data_and_not_the_split():
    first, again, other = (load(SMALL, seq_len=16, seed=seed, vocab=6) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train.tokens, again.train.tokens)
    assert (first.train.tokens != other.train.tokens).any()
    np.testing.assert_array_equal(first.validation.starts, other.validation.starts)


def test_ids_are_written_as_numbers():
    source = load(SMALL, seq_len=16, seed=0, vocab=8)
    assert source.decode(np.array([3, 0, 5])) == "3 0 5"
    assert source.encode(" 3 0\n5") == [3, 0, 5]
    for wrong in ("three", "-1", "6", "²"):
        with pytest.raises(
            UserError, match=rf"^'{wrong}' is not a token: this data has no tokenizer.*numbers from 0 to 5"
        ):
            source.encode(f"1 {wrong}")


@pytest.mark.parametrize("settings", [Synthetic(vocab=1, successors=1), Synthetic(vocab=300, documents=2)])
def test_corners(settings):
    source = load(settings, seq_len=16, seed=0, vocab=300)
    assert source.train.tokens.max() < settings.vocab
    assert len(source.validation) > 16
