"""Corpora compared with plain lists of documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moezoo.data.corpus import (
    Corpus,
    concatenate,
    dtype_for,
    fingerprint,
)

documents = st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=8)


def build(texts: list[list[int]], masks: list[list[bool]] | None = None) -> Corpus:
    masked = None if masks is None else [np.array(mask, bool) for mask in masks]
    return concatenate([np.array(text, np.uint8) for text in texts], np.dtype(np.uint8), masked)


def texts_of(corpus: Corpus) -> list[list[int]]:
    lengths = np.diff(corpus.offsets)
    return [corpus.tokens[s : s + n].tolist() for s, n in zip(corpus.starts, lengths, strict=True)]


def masks_of(corpus: Corpus) -> list[list[bool]]:
    assert corpus.mask is not None
    masks = texts_of(Corpus(corpus.mask, corpus.starts, corpus.offsets))
    return [[bool(predicted) for predicted in mask] for mask in masks]


@settings(deadline=None, max_examples=50)
@given(documents, st.data())
def test_select_and_cut_against_lists(texts, data):
    chosen = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    corpus = build(texts, [[token % 3 == 0 for token in text] for text in texts])
    assert texts_of(corpus) == texts
    assert (len(corpus), corpus.documents) == (sum(map(len, texts)), len(texts))

    kept = corpus.select(np.array(chosen, bool))
    texts = [text for text, keep in zip(texts, chosen, strict=True) if keep]
    assert texts_of(kept) == texts

    # A selection can be cut, in the middle of a document or between two.
    at = data.draw(st.integers(0, len(kept)))
    first, second = [], []
    for text in texts:
        room = at - sum(map(len, first))
        first.append(text[:room])
        second.append(text[room:])
    before, after = kept.cut(at)
    assert texts_of(before) == [text for text in first if text]
    assert texts_of(after) == [text for text in second if text]
    assert before.tokens is after.tokens is corpus.tokens  # no copy
    for part in (kept, before, after, kept.take(np.arange(kept.documents)[::-1])):
        assert masks_of(part) == [[token % 3 == 0 for token in text] for text in texts_of(part)]


def test_a_fingerprint_sees_tokens_documents_and_the_choice_of_them():
    """Of a large corpus it reads parts; the place of every document counts, and every bit of a mask."""
    texts = [[1, 2], [3], [4, 5, 6]]
    masked = [build(texts, [[True, True], [True], [True, last, True]]) for last in (True, False)]
    others = [[[1, 2], [3], [4, 5, 7]], [[1, 2, 3], [], [4, 5, 6]], texts[:2]]
    corpora = [*map(build, [texts, *others]), build(texts).select(np.array([True, False, True])), *masked]
    assert len({fingerprint(corpus) for corpus in corpora}) == len(corpora)
    assert fingerprint(build(texts)) == fingerprint(corpora[0])
    large = [Corpus.from_tokens(np.full(2**25, value, np.uint8), np.array([0, 2**25])) for value in (0, 0, 1)]
    assert [fingerprint(corpus) == fingerprint(large[0]) for corpus in large] == [True, True, False]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_smallest_dtype(vocab, dtype):
    assert dtype_for(vocab) == dtype


def test_a_corpus_may_have_nothing_to_predict():
    """The first token of a document is not predicted, whatever its mask says."""
    assert not build([[1], [], [2]]).predicts()
    assert build([[1], [2, 3]]).predicts()
    assert not build([[1, 2], [3]], [[True, False], [True]]).predicts()
    assert build([[1, 2], [3, 4]], [[True, False], [False, True]]).predicts()
    # Only of documents that are selected.
    two = build([[1, 2], [3, 4]], [[True, True], [False, False]])
    assert [two.select(np.array(chosen)).predicts() for chosen in ([True, False], [False, True])] == [True, False]
