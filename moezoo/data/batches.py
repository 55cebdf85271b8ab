"""Batches for training, shuffled without end, and for validation, in order; nothing else knows of grain."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Integer

from moezoo.data.corpus import Corpus
from moezoo.data.source import Source, check_ids
from moezoo.data.windows import Batch, read_windows, validation_indices, window_count
from moezoo.errors import UserError

# Windows a run can read at most. Not grain's own endless repetition, whose length overflows in batches of one.
_ENDLESS = 2**62


def train_batches(
    source: Source,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    rows: Integer[np.ndarray, " rows"] | None = None,
    start: int = 0,
) -> Iterator[Batch]:
    """Batches of all training windows in an order that `seed` gives and that is another in every epoch.

    Of each batch of `batch_size` rows only `rows` are read and returned, those that a process needs; None for all. An
    epoch ends anywhere in a batch. `start` passes over so many batches at no cost.

    Raises `UserError` for a `batch_size` below 1.
    """
    import grain  # a second to import, and none of it needed to read a configuration

    _check(batch_size)

    def read(indices: np.ndarray) -> Batch:
        return _read(source, source.train, indices if rows is None else indices[rows], seq_len)

    # Numbers are shuffled and grouped, and only the windows asked for are read. Repeated before they are grouped: no
    # remainder of an epoch is lost.
    count = window_count(source.train, seq_len)
    order = grain.MapDataset.range(count).seed(seed).shuffle().repeat(_ENDLESS // count)
    # Reading from memory takes a fraction of a step; a file may lie on a slow disk and is read ahead.
    ahead = 4 if isinstance(source.train.tokens, np.memmap) else 0
    options = grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)
    batches: Any = iter(order.batch(batch_size).map(read).to_iter_dataset(options))
    batches.set_state({"next_index": start})
    return batches


def validation_batches(
    source: Source,
    *,
    seq_len: int,
    batch_size: int,
    limit: int,
    rows: Integer[np.ndarray, " rows"] | None = None,
) -> Iterator[Batch]:
    """`limit` validation windows, evenly spaced and in order; all of them if `limit` is 0.

    Batches are full, whatever `rows` of each are read: after the last window come rows of padding, with segment 0 and
    label -1. Raises `UserError` for a `batch_size` below 1.
    """
    _check(batch_size)
    indices = validation_indices(source.validation, limit=limit, seq_len=seq_len)
    # One further than the first that predicts nothing, a window holds no token at all.
    beyond = np.full(-len(indices) % batch_size, window_count(source.validation, seq_len) + 1)
    grouped = np.concatenate([indices, beyond]).reshape(-1, batch_size)
    return (_read(source, source.validation, group if rows is None else group[rows], seq_len) for group in grouped)


def _check(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")


def _read(source: Source, corpus: Corpus, indices: Integer[np.ndarray, "batch"], seq_len: int) -> Batch:
    batch = read_windows(corpus, indices, seq_len)
    check_ids(batch.tokens.view(np.uint32), source)  # unsigned: ids too large for int32 are negative by now
    check_ids(batch.labels, source)
    return batch
