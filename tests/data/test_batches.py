"""Training batches: shuffled, resumable, the same for any rows that are read. Validation batches: in order."""

import itertools

import numpy as np
import pytest
from refusals import refused

from moezoo.data import Source, Synthetic, Tokens, load, train_batches, validation_batches
from moezoo.data.corpus import Ids, concatenate
from moezoo.data.epochs import make_epochs
from moezoo.data.held_out import Split
from moezoo.data.source import make_source
from moezoo.data.token_files import write_token_files
from moezoo.data.tokenizer import Numbers
from moezoo.errors import UserError


@pytest.fixture(scope="module")
def source() -> Source:
    """Every training token is different, so its first token identifies a window; 11 windows of 4."""
    train = concatenate([np.arange(30), np.arange(30, 43)], np.dtype(np.uint16))
    validation = concatenate([np.arange(29)], np.dtype(np.uint16))
    return make_source("tokens", Split(train, validation, "by hand"), Numbers(1000), vocab=1000)


def take(batches, count):
    return list(itertools.islice(batches, count))


def same(left, right):
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_every_epoch_reads_all_windows_in_a_new_order(source):
    batches = take(train_batches(source, seq_len=4, batch_size=3, seed=0), 22)  # 6 epochs of 11 windows
    assert batches[0].tokens.shape == (3, 4)
    firsts = np.concatenate([batch.tokens[:, 0] for batch in batches]).reshape(6, 11)
    for epoch in firsts:
        assert sorted(epoch.tolist()) == list(range(0, 44, 4))
    assert len({tuple(epoch) for epoch in firsts.tolist()}) == 6
    assert make_epochs(source, seq_len=4, seed=0).count(6) == firsts.size


def test_order_follows_from_the_seed(source):
    def run(seed):
        return take(train_batches(source, seq_len=4, batch_size=3, seed=seed), 4)

    same(run(5), run(5))
    assert any((a.tokens != b.tokens).any() for a, b in zip(run(5), run(6), strict=True))


def test_batches_of_one(source):
    firsts = [batch.tokens[0, 0] for batch in take(train_batches(source, seq_len=4, batch_size=1, seed=0), 11)]
    assert sorted(firsts) == list(range(0, 44, 4))


def test_an_epoch_smaller_than_a_batch(source):
    batch = next(train_batches(source, seq_len=40, batch_size=7, seed=0))
    assert batch.tokens.shape == (7, 40)
    assert set(batch.tokens[:, 0].tolist()) == {0, 40}


def select_rows(rows, batches):
    return [[array[rows] for array in batch] for batch in batches]


@pytest.mark.parametrize("rows", [[1, 4], [5], [0, 1, 2, 3, 4, 5]])
def test_some_rows_of_a_batch(source, rows):
    rows = np.array(rows)
    whole = take(train_batches(source, seq_len=4, batch_size=6, seed=1), 5)
    same(select_rows(rows, whole), take(train_batches(source, seq_len=4, batch_size=6, seed=1, rows=rows), 5))
    held_out = validation_batches(source, seq_len=4, batch_size=6, limit=5)
    same(select_rows(rows, held_out), validation_batches(source, seq_len=4, batch_size=6, limit=5, rows=rows))


def test_resumes_after_any_number_of_batches(source):
    batches = train_batches(source, seq_len=4, batch_size=3, seed=0)
    take(batches, 5)
    rest = take(batches, 4)
    same(rest, take(train_batches(source, seq_len=4, batch_size=3, seed=0, start=5), 4))
    # A run may be resumed with another number of processes.
    last = train_batches(source, seq_len=4, batch_size=3, seed=0, start=5, rows=np.array([2]))
    same(select_rows([2], rest), take(last, 4))


def test_mapped_files_are_read_ahead_with_the_same_result(source, tmp_path):
    np.save(tmp_path / "tokens.npy", source.train.tokens)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    on_disk = Source(**{**vars(source), "train": type(source.train)(mapped, source.train.starts, source.train.offsets)})
    batches = train_batches(on_disk, seq_len=4, batch_size=3, seed=0, start=2)
    same(take(batches, 5), take(train_batches(source, seq_len=4, batch_size=3, seed=0, start=2), 5))


def test_validation_in_order_with_padding(source):
    batches = list(validation_batches(source, seq_len=4, batch_size=4, limit=0))
    assert np.concatenate([batch.tokens[:, 0] for batch in batches]).tolist() == [0, 4, 8, 12, 16, 20, 24, 0]
    assert [batch.tokens.shape for batch in batches] == [(4, 4)] * 2
    assert batches[1].segments.tolist() == [[1] * 4] * 3 + [[0] * 4]
    assert batches[1].labels[3].tolist() == [-1] * 4
    assert batches[1].positions.tolist() == [[0, 1, 2, 3]] * 3 + [[0] * 4]
    same(batches, validation_batches(source, seq_len=4, batch_size=4, limit=0))
    few = list(validation_batches(source, seq_len=4, batch_size=2, limit=3))
    assert np.concatenate([batch.tokens[:, 0] for batch in few]).tolist() == [0, 8, 16, 0]


@pytest.mark.parametrize("size", [0, -4])
def test_a_batch_size_below_one_is_refused(source, size):
    message = f"^batch_size={size} must be at least 1$"
    with pytest.raises(UserError, match=message):
        train_batches(source, seq_len=4, batch_size=size, seed=0)
    with pytest.raises(UserError, match=message):
        validation_batches(source, seq_len=4, batch_size=size, limit=0)


@pytest.mark.parametrize("too_large", [1000, 2**31 + 5])
def test_ids_outside_the_vocabulary_are_refused(source, too_large):
    tokens = np.array([1, 2, too_large, 4, 5], np.uint32)
    bad = concatenate([tokens], np.dtype(np.uint32))
    bad = Source(**{**vars(source), "train": bad, "validation": bad})
    message = f"^data=tokens holds token {too_large} at index 2 but its vocabulary is 1000 tokens"
    with pytest.raises(UserError, match=message):
        next(train_batches(bad, seq_len=4, batch_size=1, seed=0))
    with pytest.raises(UserError, match=message):
        next(validation_batches(bad, seq_len=4, batch_size=1, limit=0))


def test_a_loaded_source_feeds_both():
    source = load(Synthetic(vocab=16, documents=40, document_length=9), seq_len=8, seed=0, vocab=16)
    assert next(train_batches(source, seq_len=8, batch_size=2, seed=0)).tokens.max() < 16
    assert next(validation_batches(source, seq_len=8, batch_size=2, limit=0)).tokens.max() < 16


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_the_file_and_the_index_of_an_id_outside(tmp_path, packing):
    """Wherever it is: in the middle of a document, as a last token, which is only predicted, or beyond a first row."""
    lengths = [5, 3, 9, 2, 7]
    documents = [Ids(np.arange(n, dtype=np.uint16)) for n in lengths]
    for name in ("a", "b"):
        path = tmp_path / f"{name}.npy"
        write_token_files(path, documents, np.dtype(np.uint16), lambda: {"vocab": 50, "unit": "token"})
    settings = Tokens(path=f"{tmp_path}/a.npy", validation=f"{tmp_path}/b.npy", packing=packing)
    for at in range(sum(lengths)):
        ids = np.concatenate([each.ids for each in documents])
        ids[at] = 60
        np.save(tmp_path / "b.npy", ids)
        source = load(settings, seq_len=4, seed=0, vocab=50)
        with refused(f"data=tokens ({tmp_path}/b.npy) holds token 60 at index {at} but its vocabulary is 50 tokens"):
            list(validation_batches(source, seq_len=4, batch_size=3, limit=0))
