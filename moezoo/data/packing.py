"""Packing: rows of whole documents, padded at their end.

The documents of a buffer, which are `BUFFER` consecutive ones, are put into rows longest first, each into the row with
the least room that holds it. Rows have the order of their first documents, and a row's documents keep theirs.

A document of n tokens needs n - 1 places in a row: its last token is predicted, and nothing from it. So one of
`seq_len` + 1 tokens fills a row, and one of a single token is in none.

A million documents are packed in about a second:

    python -c "
    import time, numpy as np; from moezoo.data.corpus import Corpus; from moezoo.data.packing import fit, pack
    ends = np.cumsum(np.random.default_rng(0).geometric(1 / 400, 10**6)); offsets = np.append(0, ends)
    corpus = Corpus.from_tokens(np.zeros(offsets[-1], np.uint8), offsets)
    began = time.perf_counter(); rows = pack(fit(corpus, 2048, 'parts').inputs, 2048)
    print(len(rows), rows.padding, time.perf_counter() - began)"
"""

import bisect
import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.corpus import Corpus
from moezoo.data.rows import Batch, Rows

# How documents become rows: as windows of their stream, or whole.
Packing = Literal["stream", "whole"]
# What happens to a document that is longer than a row: it becomes parts, each predicting the tokens after the part
# before it; only its beginning is kept; or it is left out.
TooLong = Literal["parts", "cut", "drop"]

BUFFER = 1000


class Fitted(NamedTuple):
    """Documents of which none is longer than a row.

    - `inputs`: the documents without their last tokens, which lie behind them in the stored tokens;
    - `too_long`: how many documents were longer than a row;
    - `without_label`: how many documents or parts are left out because no token of theirs is predicted.
    """

    inputs: Corpus
    too_long: int
    without_label: int


def fit(corpus: Corpus, seq_len: int, too_long: TooLong) -> Fitted:
    """Return the documents of a corpus such that none is longer than a row of `seq_len` inputs, in the same order."""
    predicted = np.maximum(np.diff(corpus.offsets) - 1, 0)
    longer = predicted > seq_len
    parts = -(-predicted // seq_len)
    if too_long != "parts":
        parts[longer] = too_long == "cut"
    document = np.repeat(np.arange(len(parts)), parts)
    skipped = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
    starts = corpus.starts[document] + skipped
    lengths = np.minimum(predicted[document] - skipped, seq_len)
    empty = int((predicted == 0).sum())
    if (mask := corpus.mask) is not None:
        ends = starts + lengths
        kept = np.array([mask[at + 1 : end + 1].any() for at, end in zip(starts, ends, strict=True)], bool)
        empty += int((~kept).sum())
        starts, lengths = starts[kept], lengths[kept]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    inputs = dataclasses.replace(corpus, starts=starts, offsets=offsets)
    return Fitted(inputs, int(longer.sum()), empty)


def count_kept(corpus: Corpus, too_long: TooLong) -> Int64[np.ndarray, "lengths"]:
    """Return how many tokens of a corpus are predicted in rows of each length, from 0 up to the longest document.

    `too_long` is "cut" or "drop": documents in parts lose none.
    """
    lengths = np.maximum(np.diff(corpus.offsets) - 1, 0)
    more = np.zeros(int(lengths.max(initial=0)) + 1, np.int64)  # than in rows that are shorter by one
    for start, length in zip(corpus.starts, lengths, strict=True):
        predicted = np.ones(length, bool) if corpus.mask is None else corpus.mask[start + 1 : start + 1 + length]
        if too_long == "drop":
            more[length] += predicted.sum()
        else:
            more[1 : length + 1] += predicted
    return np.cumsum(more)


class _Places(NamedTuple):
    """The number of the document of each input, and the index of the input in it."""

    document: Int64[np.ndarray, "batch seq"]
    position: Int64[np.ndarray, "batch seq"]


@dataclasses.dataclass(frozen=True)
class Packed(Rows):
    """Rows of whole documents.

    - `inputs`: documents without their last tokens, row after row;
    - `first`: [rows + 1], the number of the first document of each row, then that of all documents;
    - `seq_len`: the length of a row.
    """

    inputs: Corpus
    first: Int64[np.ndarray, "bounds"]
    seq_len: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def padding(self) -> float:
        """The part of all rows that is padding."""
        places = len(self) * self.seq_len
        return (places - len(self.inputs)) / max(1, places)

    def sizes(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch"]:
        return self.inputs.offsets[self.first[indices + 1]] - self.inputs.offsets[self.first[indices]]

    @property
    def stored(self) -> np.ndarray:
        return self.inputs.tokens

    def locate(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch seq"]:
        places = self._places(indices)
        return self.inputs.starts[places.document] + places.position

    def _places(self, indices: Integer[np.ndarray, "batch"]) -> "_Places":
        corpus = self.inputs
        begin = corpus.offsets[self.first[indices]]
        index = np.minimum(begin[:, None] + np.arange(self.seq_len), len(corpus) - 1)
        document = np.searchsorted(corpus.offsets, index, side="right") - 1
        return _Places(document, index - corpus.offsets[document])

    def read(self, indices: Integer[np.ndarray, "batch"]) -> Batch:
        corpus = self.inputs
        first = self.first[indices][:, None]
        real = np.arange(self.seq_len) < self.sizes(indices)[:, None]
        document, position = self._places(indices)
        stored = corpus.starts[document] + position
        label = real if corpus.mask is None else real & corpus.mask[stored + 1]
        return Batch(
            tokens=np.where(real, corpus.tokens[stored].astype(np.int32), np.int32(0)),
            labels=np.where(label, corpus.tokens[stored + 1].astype(np.int32), np.int32(-1)),
            segments=np.where(real, document - first + 1, 0).astype(np.int32),
            positions=np.where(real, position, 0).astype(np.int32),
        )


def pack(inputs: Corpus, seq_len: int) -> Packed:
    """Put documents that `fit` returned into rows."""
    lengths, orders, counts = np.diff(inputs.offsets), [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for begin in range(0, len(lengths), BUFFER):
        rows = _best_fit(lengths[begin : begin + BUFFER], seq_len)
        orders.append(begin + np.argsort(rows, kind="stable"))
        counts.append(np.bincount(rows))
    return Packed(inputs.take(np.concatenate(orders)), np.cumsum(np.concatenate(counts)), seq_len)


def _best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each document; of rows with the same room the one that was begun first is taken."""
    longest_first = np.argsort(-lengths, kind="stable")
    count = len(lengths)
    # A row that is not full is `room * count + row`, so the sorted list has rows with little room first.
    rooms: list[int] = []
    rows, begun = np.empty(count, np.int64), 0
    chosen = []
    for length in lengths[longest_first].tolist():
        at = bisect.bisect_left(rooms, length * count)
        if at < len(rooms):
            left, row = divmod(rooms.pop(at), count)
        else:
            left, row = room, begun
            begun += 1
        if left > length:
            bisect.insort(rooms, (left - length) * count + row)
        chosen.append(row)
    rows[longest_first] = chosen
    _, earliest = np.unique(rows, return_index=True)
    number = np.empty(begun, np.int64)
    number[np.argsort(earliest)] = np.arange(begun)
    return number[rows]
