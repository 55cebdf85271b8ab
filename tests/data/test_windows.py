"""Windows compared with a loop over single tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moezoo.data.corpus import Corpus, concatenate
from moezoo.data.epochs import OneSource, validation_rows
from moezoo.data.held_out import Split
from moezoo.data.rows import Windows
from moezoo.data.source import make_source
from moezoo.data.tokenizer import Numbers


def corpus_of(lengths: list[int], dtype=np.uint8, predicted=None) -> Corpus:
    """Documents of these lengths with different tokens, separated in the file by documents that are not selected."""
    ids = iter(range(10_000))
    documents = [np.array([next(ids) for _ in range(n)], dtype) for n in lengths]
    both = [part for document in documents for part in (document, np.array([77, 77], dtype))]
    masks = [np.array([predicted(i) for i in part], bool) for part in both] if predicted else None
    return concatenate(both, np.dtype(dtype), masks).select(np.arange(len(both)) % 2 == 0)


def one_by_one(lengths: list[int], row: int, seq_len: int, predicted=lambda token: True):
    """Return tokens, labels, segments and positions of one window."""
    owner = [d for d, n in enumerate(lengths) for _ in range(n)]
    result, segment, position = [], 0, -1
    for place in range(row * seq_len, (row + 1) * seq_len):
        if place >= len(owner):
            result.append((0, -1, 0, 0))
            continue
        if place == row * seq_len or owner[place] != owner[place - 1]:
            segment, position = segment + 1, -1
        position += 1
        goes_on = place + 1 < len(owner) and owner[place + 1] == owner[place]
        result.append((place, place + 1 if goes_on and predicted(place + 1) else -1, segment, position))
    return [list(column) for column in zip(*result, strict=True)]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 20]), min_size=1, max_size=8), st.integers(1, 9))
def test_windows_against_a_loop(lengths, seq_len):
    corpus = corpus_of(lengths)
    count = len(Windows(corpus, seq_len))
    batch = Windows(corpus, seq_len).read(np.arange(count))
    for array in batch:
        assert (array.shape, array.dtype) == ((count, seq_len), np.int32)
    for row in range(count):
        assert [array[row].tolist() for array in batch] == one_by_one(lengths, row, seq_len)
    # Every token except the first of each document is predicted once.
    firsts = np.cumsum([0, *lengths])
    expected = [place for n, first in zip(lengths, firsts, strict=False) for place in range(first + 1, first + n)]
    assert sorted(batch.labels[batch.labels >= 0].tolist()) == expected


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 4))
def test_a_token_that_the_mask_leaves_out_is_no_label(lengths, seq_len, period):
    def predicted(token):
        return token % 5 >= period

    corpus = corpus_of(lengths, predicted=predicted)
    count = len(Windows(corpus, seq_len))
    batch = Windows(corpus, seq_len).read(np.arange(count))
    for row in range(count):
        assert [array[row].tolist() for array in batch] == one_by_one(lengths, row, seq_len, predicted)


def test_any_order():
    corpus = corpus_of([5, 6])
    every = Windows(corpus, 4).read(np.arange(3))
    some = Windows(corpus, 4).read(np.array([2, 0, 2]))
    for whole, part in zip(every, some, strict=True):
        np.testing.assert_array_equal(part, whole[[2, 0, 2]])


def test_ids_wider_than_a_byte():
    corpus = concatenate([np.array([70_000, 65_535, 3])], np.dtype(np.uint32))
    assert Windows(corpus, 2).read(np.array([0])).labels.tolist() == [[65_535, 3]]


def validation(corpus: Corpus, seq_len: int) -> OneSource:
    return validation_rows(make_source("any", Split(corpus, corpus, ""), Numbers(99), vocab=99), seq_len)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, list(range(10))), (10, list(range(10))), (99, list(range(10))), (4, [0, 2, 5, 7]), (1, [0])],
)
def test_validation_windows_are_evenly_spaced(limit, expected):
    assert validation(corpus_of([21]), 2).choose(limit).tolist() == expected


def test_nothing_to_predict_makes_no_window():
    for lengths in ([], [0], [1]):
        assert len(Windows(corpus_of(lengths), 4)) == 0
        assert validation(corpus_of(lengths), 4).choose(3).tolist() == []
