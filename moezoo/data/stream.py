"""Streams: documents that are read one after another, as they are trained on, and the places where reading goes on.

A stream is divided into readers, each of which reads a part of it that no other reads, and gives the same number of
consecutive rows of every batch. A process has the readers of its rows. What a reader does next follows from its place,
so a run goes on with the rows that it would have had, also in other processes.

A reader takes documents in chunks. The place is where its chunk begins, what is left of the tokens before it, and how
many rows the chunk has given: a resume reads one chunk again. The next chunk is read meanwhile, on a thread.
"""

import abc
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from moezoo.data.corpus import Corpus, Ids, concatenate
from moezoo.data.documents import Document, Make, tokenize
from moezoo.data.packing import Packing, TooLong, fit, pack
from moezoo.data.rows import Batch, Rows, Windows
from moezoo.errors import UserError

Json = Any


class Chunk(NamedTuple):
    """Documents that are read together, in the order of training.

    - `documents`: they become tokens when they are needed;
    - `epoch`: from 0;
    - `place`: JSON; from it, this chunk is read again.
    """

    documents: list[Document]
    epoch: int
    place: Json


@dataclasses.dataclass(frozen=True)
class Stream(abc.ABC):
    """The training documents of a source that stores none.

    - `shown`: what messages begin with;
    - `make`: makes the ids of a document, and its mask; documents all have one, or none has;
    - `dtype`: it holds every id;
    - `fingerprint`: other text for other data, as far as a first look shows.
    """

    shown: str
    make: Make
    dtype: np.dtype
    fingerprint: str

    @abc.abstractmethod
    def chunks(self, reader: int, readers: int, seed: int, place: Json) -> Iterator[Chunk]:
        """Yield the chunks of a reader, endlessly, epoch after epoch, none of them empty.

        Args:
            reader: Its number, from 0.
            readers: How many there are. In every epoch each document is in a chunk of exactly one of them.
            seed: The seed of the order.
            place: The place of a chunk, to begin with it; None for the first one.

        Raises:
            UserError: The data cannot be read, or this reader has no document.
        """

    def notes(self, readers: int) -> list[str]:
        """Return what a user should know of data that so many readers share, in lines."""
        del readers
        return []


class _Part(NamedTuple):
    """The first `count` of the rows of a chunk; `place` is that of the first of them."""

    rows: Rows
    count: int
    place: Mapping[str, Json]


class Reader:
    """One of the readers of a stream. It counts on from `place`, which another one had; None begins."""

    def __init__(
        self,
        stream: Stream,
        number: int,
        readers: int,
        *,
        seq_len: int,
        seed: int,
        packing: Packing,
        too_long: TooLong,
        place: Json,
    ):
        self._stream, self._seq_len, self._packing = stream, seq_len, packing
        self._too_long: TooLong = too_long
        self._begin = {"chunk": None, "rest": [], "rows": 0} if place is None else place
        chunks = stream.chunks(number, readers, seed, self._begin["chunk"])
        self._parts = self._make_parts(chunks, self._begin["rest"])
        self._thread = ThreadPoolExecutor(1, "stream")
        self._next: Future[_Part] = self._thread.submit(next, self._parts)
        self._part: _Part | None = None
        self._given = 0

    def close(self) -> None:
        """Read no further, and let the library close its files."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.close()

    @property
    def place(self) -> Json:
        """From here another reader gives the rows that this one would give next."""
        return self._begin if self._part is None else {**self._part.place, "rows": self._given}

    def take(self, count: int) -> list[Batch]:
        """Return the next `count` rows, as batches. Raises `UserError` as `Stream.chunks` does."""
        found = []
        while count:
            if self._part is None or self._given == self._part.count:
                self._given = self._begin["rows"] if self._part is None else 0
                self._part = self._next.result()
                self._next = self._thread.submit(next, self._parts)
                if self._given > self._part.count:
                    raise UserError(f"{self._stream.shown} has other rows than at the checkpoint; use the same data")
            end = min(self._given + count, self._part.count)
            found.append(self._part.rows.read(np.arange(self._given, end)))
            count, self._given = count - (end - self._given), end
        return found

    def _make_parts(self, chunks: Iterator[Chunk], rest: Json) -> Generator[_Part, None, None]:
        """Yield what chunks become; `rest` are documents whose tokens come before."""
        left, since = [_from_json(each, self._stream.dtype) for each in rest], None
        for chunk in chunks:
            place = {"chunk": chunk.place, "rest": [_to_json(each) for each in left]}
            made = [each.made for each in tokenize(chunk.documents, self._stream.make)]
            corpus = _join([*left, *made], self._stream.dtype)
            if self._packing == "whole":
                rows = pack(fit(corpus, self._seq_len, self._too_long).inputs, self._seq_len)
                count = len(rows)
            else:
                rows = Windows(corpus, self._seq_len)
                count = max(0, len(corpus) - 1) // self._seq_len  # the last window is full together with what follows
                left = _split(corpus.cut(count * self._seq_len)[1])
            if since is None or count or (self._packing == "stream" and any(len(each.ids) for each in made)):
                since = chunk.epoch
            if chunk.epoch > since + 1:
                raise UserError(f"{self._stream.shown}: a whole epoch has nothing to train on; give other data")
            yield _Part(rows, count, place)


class Batches(Iterator[Batch]):
    """Endless batches of training rows; `close` them after use.

    `notes` are lines that a user should know of how processes share the data.
    """

    notes: Sequence[str] = ()

    def places(self) -> dict[int, Json]:
        """Return the places behind the last batch by the numbers of this process's readers; empty without a stream."""
        return {}

    def close(self) -> None:
        """Read no further."""


class StreamBatches(Batches):
    """Batches of a stream.

    Args:
        make: Makes a reader by its number. Together, readers have all rows of a batch, in the order of their numbers.
        readers: How many there are.
        notes: As `Batches.notes`.
        batch_size: The rows per batch, a multiple of `readers`.
        rows: The rows of each batch to return; None for all.
    """

    def __init__(
        self,
        make: Callable[[int], Reader],
        readers: int,
        notes: Sequence[str],
        *,
        batch_size: int,
        rows: Integer[np.ndarray, " rows"] | None,
    ):
        self.notes, self._each = notes, batch_size // readers
        rows = np.arange(batch_size) if rows is None else rows
        numbers = np.unique(rows // self._each)
        self._readers = {number: make(number) for number in numbers.tolist()}
        # Of the rows that these readers give, those to return.
        self._chosen = np.searchsorted(numbers, rows // self._each) * self._each + rows % self._each

    def __next__(self) -> Batch:
        parts = [part for reader in self._readers.values() for part in reader.take(self._each)]
        return Batch(*(np.concatenate(arrays)[self._chosen] for arrays in zip(*parts, strict=True)))

    def places(self) -> dict[int, Json]:
        return {number: reader.place for number, reader in self._readers.items()}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def read_corpus(stream: Stream, documents: Sequence[Document]) -> Corpus:
    """Return documents as tokens in memory."""
    return _join([each.made for each in tokenize(documents, stream.make)], stream.dtype)


def _join(documents: list[Ids], dtype: np.dtype) -> Corpus:
    masks = [each.mask for each in documents if each.mask is not None]
    return concatenate([each.ids for each in documents], dtype, masks if masks else None)


def _split(corpus: Corpus) -> list[Ids]:
    ends = corpus.starts + np.diff(corpus.offsets)
    parts = [slice(start, end) for start, end in zip(corpus.starts, ends, strict=True)]
    return [Ids(corpus.tokens[part], None if corpus.mask is None else corpus.mask[part]) for part in parts]


def _to_json(document: Ids) -> Json:
    mask = None if document.mask is None else document.mask.astype(int).tolist()
    return {"ids": document.ids.tolist(), "mask": mask}


def _from_json(value: Json, dtype: np.dtype) -> Ids:
    return Ids(np.array(value["ids"], dtype), None if value["mask"] is None else np.array(value["mask"], bool))
