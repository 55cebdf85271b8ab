"""The rows of a batch: their contract, and windows, each a part of the stream of documents."""

import abc
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.corpus import Corpus


class Batch(NamedTuple):
    """Rows of a batch, int32 [batch, seq] each.

    - `tokens`: the input of the model;
    - `labels`: the token to predict from each token, or -1 if there is none;
    - `segments`: the number of the document inside the row, from 1, so that documents do not see each other; 0 is
      padding;
    - `positions`: 0, 1, ... from the start of each document, or of the part of it that is in this row.
    """

    # NumPy arrays when they are read; also arrays on devices, their shapes, or their layouts.
    tokens: Any
    labels: Any
    segments: Any
    positions: Any


class Rows(abc.ABC):
    """The rows that documents in one order make; `len` is their number."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, indices: Integer[np.ndarray, "batch"]) -> Batch:
        """Return rows as a batch [batch, seq]."""

    @property
    @abc.abstractmethod
    def stored(self) -> np.ndarray:
        """The stored tokens [stored] of the documents."""

    @abc.abstractmethod
    def locate(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch seq"]:
        """Return the index in `stored` of each input; its label is the next. What it is for padding has no meaning."""

    @abc.abstractmethod
    def sizes(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch"]:
        """Return the number of tokens in each row, padding not counted, without reading any."""


class _Places(NamedTuple):
    """Of each token of a row and the one after it: its index in the stream, its document, its index in `stored`."""

    index: Int64[np.ndarray, "batch seq+1"]
    document: Int64[np.ndarray, "batch seq+1"]
    stored: Int64[np.ndarray, "batch seq+1"]


@dataclasses.dataclass(frozen=True)
class Windows(Rows):
    """Rows of which row i reads the stream from token i * `seq_len`, and predicts one token further.

    Together they contain every token to predict once; the last one may end in padding. The first token of a document is
    never predicted, because the token before it belongs to another document; nor is one that the mask leaves out.
    """

    corpus: Corpus
    seq_len: int

    def __len__(self) -> int:
        return max(0, -(-(len(self.corpus) - 1) // self.seq_len))

    def sizes(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch"]:
        return np.minimum(len(self.corpus) - indices.astype(np.int64) * self.seq_len, self.seq_len)

    @property
    def stored(self) -> np.ndarray:
        return self.corpus.tokens

    def locate(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch seq"]:
        return self._places(indices).stored[:, :-1]

    def _places(self, indices: Integer[np.ndarray, "batch"]) -> "_Places":
        corpus = self.corpus
        begin = indices.astype(np.int64)[:, None] * self.seq_len
        index = begin + np.arange(self.seq_len + 1)  # in the stream; the last column is only ever a label
        within = np.minimum(index, len(corpus) - 1)
        # Of documents that share an offset all but the last are empty, so side="right" passes them over.
        document = np.searchsorted(corpus.offsets, within, side="right") - 1
        return _Places(index, document, corpus.starts[document] + within - corpus.offsets[document])

    def read(self, indices: Integer[np.ndarray, "batch"]) -> Batch:
        corpus, seq_len = self.corpus, self.seq_len
        index, document, stored = self._places(indices)
        begin, exists = index[:, :1], index < len(corpus)
        ids = corpus.tokens[stored].astype(np.int32)

        same = (document[:, 1:] == document[:, :-1]) & exists[:, 1:]
        if corpus.mask is not None:
            same &= corpus.mask[stored[:, 1:]]
        segments = np.ones((len(begin), seq_len), np.int32)
        segments[:, 1:] += np.cumsum(document[:, 1:-1] != document[:, :-2], axis=1, dtype=np.int32)
        positions = index - np.maximum(corpus.offsets[document], begin)
        real = exists[:, :-1]
        return Batch(
            tokens=np.where(real, ids[:, :-1], np.int32(0)),
            labels=np.where(same, ids[:, 1:], np.int32(-1)),
            segments=np.where(real, segments, np.int32(0)),
            positions=np.where(real, positions[:, :-1], 0).astype(np.int32),
        )
