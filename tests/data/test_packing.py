"""Packed rows compared with naive packing, their order with naive epochs, and what is left out."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import naive_files as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from moezoo.data import Jsonl, Source, cache, load, packing, train_batches, validation_batches
from moezoo.data.corpus import Corpus, concatenate
from moezoo.data.epochs import PackedEpochs, make_epochs
from moezoo.data.held_out import Split
from moezoo.data.packing import fit, pack
from moezoo.data.source import make_source
from moezoo.data.tokenizer import Numbers

SEQ, SHARD, BUFFER = 7, 200, 6


def documents_of(lengths: list[int]) -> list[list[int]]:
    ids = iter(range(10**6))
    return [[next(ids) for _ in range(n)] for n in lengths]


def corpus_of(documents: list[list[int]], predicted=None) -> Corpus:
    """Documents that are stored with others between them, which are not selected."""
    both = [np.array(part) for document in documents for part in (document, [7, 7])]
    masks = [np.array([predicted(i) for i in part.tolist()], bool) for part in both] if predicted else None
    return concatenate(both, np.dtype(np.uint16), masks).select(np.arange(len(both)) % 2 == 0)


def as_lists(rows) -> list[naive.Row]:
    return np.stack(rows.read(np.arange(len(rows)))).transpose(1, 0, 2).tolist()


lengths = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 9, 14, 30]), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 12), st.integers(1, 9))
def test_rows_against_naive_packing(lengths, seq_len, buffer):
    """Every document is in one row, or in consecutive parts; rows are as full as best fit makes them."""
    documents = documents_of(lengths)
    fitted = fit(corpus_of(documents), seq_len, "parts")
    with mock.patch.object(packing, "BUFFER", buffer):
        rows = pack(fitted.inputs, seq_len)
    found = as_lists(rows)
    assert found == naive.pack(documents, seq_len, buffer)
    assert fitted[1:] == (sum(n > seq_len + 1 for n in lengths), sum(n < 2 for n in lengths))
    assert rows.sizes(np.arange(len(rows))).tolist() == [sum(s > 0 for s in row[2]) for row in found]
    # Every token except the first of each document is predicted once, from the token before it.
    predicted = [(a, b) for row in found for a, b in zip(row[0], row[1], strict=True) if b >= 0]
    assert sorted(predicted) == [(a, a + 1) for document in documents for a in document[:-1]]
    padding = sum(segment == 0 for row in found for segment in row[2])
    assert rows.padding == pytest.approx(padding / max(1, len(found) * seq_len))


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 12), st.integers(1, 4))
def test_masks_and_what_is_too_long(lengths, seq_len, period):
    """A document or part without a label is in no row."""

    def predicted(token):
        return token % 5 >= period

    def masked(row):
        return [row[0], [token if token >= 0 and predicted(token) else -1 for token in row[1]], *row[2:]]

    documents = documents_of(lengths)
    corpus = corpus_of(documents, predicted)
    kept: dict[packing.TooLong, list[list[int]]] = {
        "parts": [part for each in documents for part in naive.cut_long(each, seq_len)],
        "cut": [each[: seq_len + 1] for each in documents],
        "drop": [each for each in documents if len(each) <= seq_len + 1],
    }
    for too_long, expected in kept.items():
        labelled = [each for each in expected if any(map(predicted, each[1:]))]
        fitted = fit(corpus, seq_len, too_long)
        found = as_lists(pack(fitted.inputs, seq_len))
        assert fitted.without_label == sum(len(each) < 2 for each in documents) + sum(
            len(each) > 1 and each not in labelled for each in expected
        )
        assert found == [masked(row) for row in naive.pack(labelled, seq_len, packing.BUFFER)]


def source_of(corpus: Corpus, too_long: packing.TooLong) -> Source:
    source = make_source("by hand", Split(corpus, corpus, "by hand"), Numbers(10**6), vocab=10**6)
    return dataclasses.replace(source, packing="whole", too_long=too_long)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 40, 120, 128, 129, 130, 200, 257, 300, 700]), min_size=1, max_size=12),
    st.sampled_from([2, 39, 128, 199, 256]),
    st.integers(0, 4),
    st.sampled_from(["cut", "drop"]),
)
def test_a_warning_names_the_length_that_keeps_enough(lengths, seq_len, period, too_long):
    """Where rows lose more than a tenth of what is predicted: a multiple of 128 that keeps 95%, and no smaller one."""

    def predicted(token):
        return token % 5 >= period

    def kept(seq_len):
        some = [each[: seq_len + 1] for each in documents if too_long == "cut" or len(each) <= seq_len + 1]
        return sum(predicted(token) for each in some for token in each[1:])

    documents = documents_of(lengths)
    whole = kept(10**6)
    epochs = make_epochs(source_of(corpus_of(documents, predicted), too_long), seq_len=seq_len, seed=0)
    if 10 * (whole - kept(seq_len)) <= whole:
        assert epochs.warnings() == []
        return
    enough = next(length for length in range(128, 10**4, 128) if 100 * kept(length) >= 95 * whole)
    longer, lost = sum(len(each) > seq_len + 1 for each in documents), (whole - kept(seq_len)) / whole
    (line,) = epochs.warnings()
    assert line.startswith(
        f"{lost:.0%} of the tokens to predict are lost, since {longer} of {len(documents)} documents "
    )
    assert line.endswith(f"longer than seq_len={seq_len}; seq_len={enough} keeps 95%")


def test_validation_in_order_with_padding():
    source = source_of(corpus_of(documents_of([3, 5])), "parts")
    rows = as_lists(pack(fit(source.validation, 4, "parts").inputs, 4))
    (batch,) = validation_batches(source, seq_len=4, batch_size=3, limit=0)
    assert np.stack(batch).transpose(1, 0, 2).tolist() == [*rows, [[0] * 4, [-1] * 4, [0] * 4, [0] * 4]]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Many shards and buffers, of documents with 1 to 60 bytes."""
    monkeypatch.setattr(cache, "SHARD", SHARD)
    monkeypatch.setattr(packing, "BUFFER", BUFFER)
    texts = ["abcdefghij" * 6][:1] + [chr(97 + i % 26) * (1 + i * i % 19) for i in range(90)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def read(source: Source, count: int, *, start: int = 0, rows: list[int] | None = None) -> np.ndarray:
    """Return `count` batches [batch, array, row, seq]."""
    chosen = None if rows is None else np.array(rows)
    batches = train_batches(source, seq_len=SEQ, batch_size=4, seed=3, rows=chosen, start=start)
    return np.stack([np.stack(next(batches)) for _ in range(count)])


def test_epochs_against_naive_ones(folder):
    """Three epochs of different lengths: without and with the cache, in parts, and resumed at any batch."""

    def load_source() -> Source:
        return load(Jsonl(path=str(folder), packing="whole"), seq_len=SEQ, seed=3, vocab=256)

    shards = naive.cut_by_size(naive.read_lines(folder), lambda text: list(text.encode()), SHARD)
    expected = naive.packed_rows(shards, seed=3, seq_len=SEQ, buffer=BUFFER)
    cold = load_source()
    epochs = make_epochs(cold, seq_len=SEQ, seed=3)
    assert isinstance(epochs, PackedEpochs)
    lengths = [len(epochs.rows(epoch)) for epoch in range(3)]
    assert len(set(lengths)) > 1
    assert [make_epochs(cold, seq_len=SEQ, seed=3).count(n) for n in (3, 1)] == [sum(lengths), lengths[0]]
    count = sum(lengths) // 4 + 2
    batches = read(cold, count)
    assert batches.transpose(0, 2, 1, 3).reshape(-1, 4, SEQ).tolist() == [next(expected) for _ in range(4 * count)]
    warm = load_source()
    np.testing.assert_array_equal(read(warm, count), batches)
    halves = [read(warm, count, rows=part) for part in ([0, 1], [2, 3])]
    np.testing.assert_array_equal(np.concatenate(halves, axis=2), batches)
    for start in range(0, count, 5):
        np.testing.assert_array_equal(read(load_source(), 1, start=start)[0], batches[start])
    line, long, left_out = epochs.describe()
    assert line.startswith(f"whole: {epochs.fitted.inputs.documents} documents in {lengths[0]} rows in the first epoch")
    assert line.endswith(f"{100 * (batches[:, 2].reshape(-1, SEQ)[: lengths[0]] == 0).mean():.2f}% padding")
    trained = [each for shard in shards for each in shard if not naive.is_held_out(each)]
    longer, single = sum(len(each) > SEQ + 1 for each in trained), sum(len(each) == 1 for each in trained)
    assert long == f"{longer} documents longer than a row are cut into parts"
    assert left_out == f"{single} documents without a byte to predict are left out"

    held_out = [each for shard in shards for each in shard if naive.is_held_out(each)]
    rows = naive.pack(held_out, SEQ, BUFFER)
    found = np.concatenate([np.stack(b) for b in validation_batches(cold, seq_len=SEQ, batch_size=3, limit=0)], axis=1)
    assert found.transpose(1, 0, 2)[: len(rows)].tolist() == rows
    assert (found[2, len(rows) :] == 0).all()
    assert cold.facts(SEQ) == warm.facts(SEQ)
    stream = load(Jsonl(path=str(folder)), seq_len=SEQ, seed=3, vocab=256)
    assert cold.facts(SEQ) != stream.facts(SEQ)


def test_documents_that_make_no_row(folder):
    (folder / "a.jsonl").write_text('{"text": "a"}\n' * 99)
    with refused("data=jsonl has no byte to predict for training; give data that have some"):
        load(Jsonl(path=str(folder), packing="whole"), seq_len=SEQ, seed=3, vocab=256)
    masks = [np.arange(20) > 15] * 2
    corpus = concatenate([np.arange(20)] * 2, np.dtype(np.uint8), masks)
    source = make_source("tokens", Split(corpus, corpus, "by hand"), Numbers(99), vocab=99)

    class Own(Jsonl):
        def load(self, *, seed, vocab):
            return Source(**{**vars(source), "too_long": "cut"})

    assert load(Own(packing="whole"), seq_len=16, seed=0, vocab=99).packing == "whole"
    with refused("data=tokens has no document for training that predicts a token within seq_len=15; give shorter"):
        load(Own(packing="whole"), seq_len=15, seed=0, vocab=99)
