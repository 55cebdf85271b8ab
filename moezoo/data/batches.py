"""Shuffled, endless batches for training, and ordered batches for validation. Only this module uses grain."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Integer

from moezoo.data.corpus import Corpus
from moezoo.data.order import reorder
from moezoo.data.source import Source, read_checked
from moezoo.data.windows import Batch, validation_indices, window_count
from moezoo.errors import UserError

# The most windows that a run can read. The length of grain's own endless repetition overflows in batches of one.
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
    """Return endless batches of training windows, in a new order in every epoch.

    Windows are shuffled; of a source with shards, documents are, and windows follow their order. An epoch may end
    inside a batch.

    Args:
        source: The data.
        seq_len: The tokens per window.
        batch_size: The windows per batch.
        seed: The seed of the order.
        rows: The rows of each batch to read and return; None for all.
        start: The number of batches to skip, without reading them.

    Raises:
        UserError: `batch_size` is below 1.
    """
    import grain  # takes a second to import, and a configuration can be read without it

    _check(batch_size)

    count = window_count(source.train, seq_len)

    @functools.lru_cache(maxsize=2)  # a batch may have windows of two epochs
    def corpus(epoch: int) -> Corpus:
        if source.shards is None:
            return source.train
        return reorder(source.train, source.shards, seed=seed, epoch=epoch)

    def read(numbers: np.ndarray) -> Batch:
        """Read windows by their number in their epoch, plus `count` for each epoch before it."""
        epochs, indices = np.divmod(numbers if rows is None else numbers[rows], count)
        batch = Batch(*(np.empty((len(indices), seq_len), np.int32) for _ in Batch._fields))
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            part = read_checked(source, corpus(int(epoch)), indices[chosen], seq_len)
            for array, some in zip(batch, part, strict=True):
                array[chosen] = some
        return batch

    # Numbers are grouped; only the windows of `rows` are read. Epochs are repeated before the grouping, so that no
    # remainder of an epoch is lost.
    if source.shards is None:
        order = grain.MapDataset.range(count).seed(seed).shuffle().repeat(_ENDLESS // count)
    else:
        order = grain.MapDataset.range(_ENDLESS)
    # Reading from memory takes a fraction of a step; a file may be on a slow disk, so it is read ahead.
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
    """Return batches of validation windows, in order.

    All batches are full: the last one is filled with rows of padding, which have segment 0 and label -1.

    Args:
        source: The data.
        seq_len: The tokens per window.
        batch_size: The windows per batch.
        limit: The number of windows to read, evenly spaced; 0 for all.
        rows: The rows of each batch to read and return; None for all.

    Raises:
        UserError: `batch_size` is below 1.
    """
    _check(batch_size)
    indices = validation_indices(source.validation, limit=limit, seq_len=seq_len)
    # A window with this index or a later one holds no token at all, so it is a row of padding.
    beyond = np.full(-len(indices) % batch_size, window_count(source.validation, seq_len) + 1)
    grouped = np.concatenate([indices, beyond]).reshape(-1, batch_size)
    chosen = grouped if rows is None else grouped[:, rows]
    return (read_checked(source, source.validation, indices, seq_len) for indices in chosen)


def _check(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
