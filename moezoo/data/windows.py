"""Windows: a row of a batch is a part of the corpus, with labels, segments and positions."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

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


def window_count(corpus: Corpus, seq_len: int) -> int:
    """Return the number of windows that contain every token to predict once; the last one may end in padding."""
    return max(0, -(-(len(corpus) - 1) // seq_len))


def read_windows(corpus: Corpus, indices: Integer[np.ndarray, "batch"], seq_len: int) -> Batch:
    """Return the windows `indices` [batch] as a batch [batch, seq_len].

    Window i reads the stream from token i * seq_len and predicts one token further. The first token of a document is
    never predicted, because the token before it belongs to another document; nor is one that the mask leaves out.
    """
    begin = indices.astype(np.int64)[:, None] * seq_len
    index = begin + np.arange(seq_len + 1)  # in the stream; the last column is only ever a label
    exists = index < len(corpus)
    # Of documents that share an offset all but the last are empty, so side="right" passes them over.
    document = np.searchsorted(corpus.offsets, np.minimum(index, len(corpus) - 1), side="right") - 1
    within = np.minimum(index, len(corpus) - 1) - corpus.offsets[document]
    stored = corpus.starts[document] + within
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


def validation_indices(corpus: Corpus, *, limit: int, seq_len: int) -> Integer[np.ndarray, "windows"]:
    """Return the windows of an evaluation: `limit` windows, evenly spaced, or all if `limit` is 0 or larger."""
    count = window_count(corpus, seq_len)
    chosen = min(limit, count) if limit else count
    return np.arange(chosen, dtype=np.int64) * count // max(chosen, 1)
