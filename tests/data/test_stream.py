"""Streams: rows against naive ones, places from which any reader goes on, and readers that share a stream."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from refusals import refused

from moezoo.data.corpus import Corpus, Ids, concatenate
from moezoo.data.documents import Document
from moezoo.data.epochs import make_epochs
from moezoo.data.mixture import Mixture, Weighted
from moezoo.data.packing import Packing
from moezoo.data.source import Source
from moezoo.data.stream import Chunk, Stream, StreamBatches
from moezoo.data.synthetic import Synthetic
from moezoo.data.tokenizer import Bytes
from moezoo.errors import UserError

SEQ, CHUNK = 8, 3
TEXTS = [bytes([65 + i]) * (1 + 7 * i % 23) for i in range(26)] + [b"", b"#"]


def make(document: Document) -> Ids:
    return Ids(np.frombuffer(document.text, np.uint8))


def make_masked(document: Document) -> Ids:
    """Every third token is predicted."""
    ids = np.frombuffer(document.text, np.uint8)
    return Ids(ids, np.arange(len(ids)) % 3 == 0)


class Letters(Stream):
    """`TEXTS` in chunks, one of every `readers` for each reader; the second epoch is reversed, and so on."""

    read: ClassVar[list[Any]] = []  # the places of chunks

    def chunks(self, reader: int, readers: int, seed: int, place: Any) -> Iterator[Chunk]:
        epoch, at = place or (0, 0)
        own = TEXTS[reader::readers]
        while True:
            texts = own[:: -1 if epoch % 2 else 1]
            while at < len(texts):
                Letters.read.append([epoch, at])
                yield Chunk([Document(text, "here") for text in texts[at : at + CHUNK]], epoch, [epoch, at])
                at += CHUNK
            epoch, at = epoch + 1, 0


def source(make=make, packing: Packing = "stream", **others) -> Source:
    empty = concatenate([], np.dtype(np.uint8))
    tokenizer = Bytes()
    stream = Letters("letters", make, np.dtype(np.uint8), "first letters")
    return Source(
        name="letters",
        train=empty,
        validation=empty,
        vocab=256,
        unit="byte",
        summary={},
        held_out=(),
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        token_bytes=tokenizer.token_bytes,
        packing=packing,
        stream=stream,
        **others,
    )


def batches(of: Source, size: int, *, rows=None, places=None) -> StreamBatches:
    found = make_epochs(of, seq_len=SEQ, seed=3).batches(size, rows, 0, places)
    assert isinstance(found, StreamBatches)
    return found


def naive_rows(texts: list[bytes], *, masked: bool) -> list[list[list[int]]]:
    """Tokens, labels, segments and positions of windows of texts, token by token."""
    flat = [(number, at, byte) for number, text in enumerate(texts) for at, byte in enumerate(text)]
    rows = []
    for begin in range(0, len(flat) - SEQ, SEQ):
        window, found = flat[begin : begin + SEQ + 1], []
        numbers = [*dict.fromkeys(number for number, _, _ in window)]
        for here, then in itertools.pairwise(window):
            predicted = here[0] == then[0] and (not masked or then[1] % 3 == 0)
            first = next(at for number, at, _ in window if number == here[0])
            found.append((here[2], then[2] if predicted else -1, numbers.index(here[0]) + 1, here[1] - first))
        rows.append([list(column) for column in zip(*found, strict=True)])
    return rows


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_windows_of_all_epochs_as_one_stream(masked):
    found = batches(source(make_masked if masked else make), 5)
    expected = naive_rows([*TEXTS, *TEXTS[::-1], *TEXTS], masked=masked)
    read = np.concatenate([np.stack(next(found), 1) for _ in range(len(expected) // 5)])
    found.close()
    assert len(read) > 100
    assert read.tolist() == expected[: len(read)]


@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize("make", [make, make_masked])
def test_goes_on_from_the_place_behind_any_batch(make, packing):
    """The next chunk is read ahead, and no chunk that was given before is read again."""
    of = source(make, packing, too_long="cut")
    whole, places, expected = batches(of, 4), [], []
    for _ in range(60):
        places.append(json.loads(json.dumps(whole.places())))
        expected.append(np.stack(next(whole)))
    whole.close()
    for start in range(60):
        Letters.read.clear()
        found = batches(of, 4, places=[places[start]["0"]])
        assert json.loads(json.dumps(found.places())) == places[start]
        for number in range(start, min(start + 3, 60)):
            assert json.loads(json.dumps(found.places())) == places[number]
            np.testing.assert_array_equal(np.stack(next(found)), expected[number])
        found.close()
        assert Letters.read[0] == (places[start]["0"]["chunk"] or [0, 0])
    with refused("letters has other rows than at the checkpoint; use the same data"):
        next(batches(of, 4, places=[{**places[30]["0"], "rows": 99}]))


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_processes_share_a_stream(packing):
    """Each reads its readers alone; a run goes on with other processes, which read as many readers as they need."""
    of, rows = source(packing=packing), np.arange(8)
    apart = [batches(of, 8, rows=part) for part in np.split(rows, 4)]
    read = [[np.stack(next(each)) for each in apart] for _ in range(9)]
    assert [list(each.places()) for each in apart] == [[0], [1], [2], [3]]
    places = [place for each in apart for place in each.places().values()]
    later = [np.concatenate([np.stack(next(each)) for each in apart], 1) for _ in range(5)]
    for each in apart:
        each.close()
    for number in range(4):  # the letters of a reader are in no row of another
        letters = {*np.concatenate([step[number][0].ravel() for step in read]).tolist()} - {0}
        assert letters <= {byte for text in TEXTS[number::4] for byte in text}
        assert len(letters) > 4
    for parts in (np.split(rows, 2), [rows], np.split(rows, 8), [np.array([1, 6])]):
        again = [batches(of, 8, rows=part, places=places) for part in parts]
        for expected in later:
            got = np.concatenate([np.stack(next(each)) for each in again], 1)
            np.testing.assert_array_equal(got, expected[:, np.concatenate(parts)])
        for each in again:
            each.close()
    assert len(batches(of, 8, rows=np.arange(8)).places()) == 1  # processes that all have all rows read the same


def test_refusals(monkeypatch):
    def empty(document: Document) -> Ids:
        return Ids(np.zeros(0, np.uint8))

    def single(document: Document) -> Ids:
        return Ids(np.zeros(1, np.uint8))

    for of in (source(empty), source(empty, "whole"), source(single, "whole")):
        with refused("letters: a whole epoch has nothing to train on; give other data"):
            next(batches(of, 4))
    next(batches(source(single), 4))  # a row has tokens of several epochs
    with refused("epochs=2: letters is a stream, whose length is not known; set steps"):
        make_epochs(source(), seq_len=SEQ, seed=3).count(2)
    monkeypatch.setattr(Synthetic, "load", lambda *_, **__: source())
    with refused("data.sources.a: a stream is no source of a mixture"):
        Mixture({"a": Weighted(Synthetic())}).load(seed=0, vocab=256)

    def wrong(document: Document) -> Ids:
        raise UserError("it is wrong")

    with refused("here: it is wrong"):
        next(batches(source(wrong), 4))


def test_what_names_a_stream():
    one, other = source(), source()
    object.__setattr__(other.stream, "fingerprint", "other letters")
    assert one.documents_hash == source().documents_hash != other.documents_hash
    assert one.facts(SEQ) != other.facts(SEQ)
    assert isinstance(one.train, Corpus)
