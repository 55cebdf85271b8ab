"""The trigram loss compared with dictionaries and loops, and with the entropy of a known chain."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moezoo.data import Source, Synthetic, load, trigram_loss
from moezoo.data.corpus import concatenate
from moezoo.data.held_out import Split
from moezoo.data.source import make_source
from moezoo.data.tokenizer import Numbers
from moezoo.errors import UserError

VOCAB = 3
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9), min_size=1, max_size=5)


def source_of(train, validation, vocab=VOCAB) -> Source:
    def corpus(texts):
        return concatenate([np.array(text, np.int64) for text in texts], np.dtype(np.uint16))

    return make_source("tokens", Split(corpus(train), corpus(validation), "by hand"), Numbers(vocab), vocab=vocab)


def predictions(texts, width):
    """Yield (history of up to two tokens, token, window) of all predicted tokens, in windows of `width`."""
    stream = [(d, token) for d, text in enumerate(texts) for token in text]
    for place in range(1, len(stream)):
        begin = (place - 1) // width * width
        history = [token for d, token in stream[max(begin, place - 2) : place] if d == stream[place][0]]
        if stream[place - 1][0] == stream[place][0]:
            yield tuple(history), stream[place][1], begin // width


def slow_loss(train, validation, seq_len, windows):
    counts = collections.defaultdict(collections.Counter)
    for history, token, _ in predictions(train, 10_000):
        for n in range(len(history) + 1):
            counts[history[len(history) - n :]][token] += 1

    def probability(history, token):
        shorter = probability(history[1:], token) if history else 1 / VOCAB
        seen = counts[history]
        return (seen[token] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter

    for history in ((), (0,), (0, 1), (2, 2)):
        assert sum(probability(history, token) for token in range(VOCAB)) == pytest.approx(1)
    losses = [-math.log(probability(h, t)) for h, t, window in predictions(validation, seq_len) if window in windows]
    return sum(losses) / max(len(losses), 1)


@settings(deadline=None, max_examples=50)
@given(documents, documents, st.integers(1, 6))
def test_against_dictionaries(train, validation, seq_len):
    source = source_of(train, validation)
    expected = slow_loss(train, validation, seq_len, set(range(99)))
    assert trigram_loss(source, limit=0, seq_len=seq_len) == pytest.approx(expected)


def test_reads_the_windows_of_the_evaluation():
    random = np.random.default_rng(0)
    train, validation = ([random.integers(VOCAB, size=n).tolist() for n in sizes] for sizes in ((50, 60), (41, 40)))
    source = source_of(train, validation)
    expected = slow_loss(train, validation, 8, {0, 3, 6})  # 3 of 10
    assert trigram_loss(source, limit=3, seq_len=8) == pytest.approx(expected)


def test_counting_in_chunks():
    random = np.random.default_rng(0)
    train, validation = ([random.integers(VOCAB, size=n).tolist() for n in sizes] for sizes in ((90, 5), (41, 30)))
    source = source_of(train, validation)
    whole = trigram_loss(source, limit=0, seq_len=4)
    # The first prediction of a chunk has one token of history instead of two.
    assert trigram_loss(source, limit=0, seq_len=4, chunk=47) == pytest.approx(whole, rel=0.02)
    only_first = trigram_loss(source_of([train[0][:48]], validation), limit=0, seq_len=4)
    assert trigram_loss(source, limit=0, seq_len=4, chunk=47, counted=47) == pytest.approx(only_first)


def test_close_to_and_never_below_the_entropy():
    source = load(Synthetic(vocab=16, documents=1000, document_length=100), seq_len=32, seed=0, vocab=16)
    loss = trigram_loss(source, limit=0, seq_len=32)
    assert loss is not None
    assert math.log(4) < loss < math.log(4) + 0.01


def test_none_for_a_large_vocabulary():
    assert trigram_loss(source_of([[1, 2, 300]], [[1, 2]], vocab=301), limit=0, seq_len=4) is None


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(UserError, match=r"^data=tokens holds token 7 at index 1 but its vocabulary is 3 tokens"):
        trigram_loss(source_of([[1, 7, 2]], [[1, 2]]), limit=0, seq_len=4)
