"""Endless batches for training, and ordered batches for validation."""

import functools
from collections.abc import Iterator, Sequence, Sized

import numpy as np
from jaxtyping import Integer

from moezoo.data.epochs import make_epochs
from moezoo.data.rows import Batch, Rows
from moezoo.data.source import Source, read_checked
from moezoo.data.stream import Batches, Json
from moezoo.errors import UserError


def train_batches(
    source: Source,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    rows: Integer[np.ndarray, " rows"] | None = None,
    start: int = 0,
    places: Sequence[Json] | None = None,
) -> Batches:
    """Return endless batches of training rows, in a new order in every epoch (`make_epochs` describes it).

    An epoch may end inside a batch.

    Args:
        source: The data.
        seq_len: The tokens per row.
        batch_size: The rows per batch.
        seed: The seed of the order.
        rows: The rows of each batch to read and return; None for all.
        start: The number of batches to skip, without reading them.
        places: Where the readers of a stream go on after the batches to skip, as `Batches.places` returned it then;
            None to begin, and for data that are no stream.

    Raises:
        UserError: `batch_size` is below 1.
    """
    _check(batch_size)
    epochs = make_epochs(source, seq_len=seq_len, seed=seed)
    return epochs.batches(batch_size, rows, start, places)


class ValidationBatches(Iterator[Batch], Sized):
    """The validation rows of a source as batches, in order; `len` is the number of batches.

    `all_rows` is the number of validation rows that the source has, `rows` how many of them all batches have together.
    """

    def __init__(self, source: Source, rows: Rows, indices: Integer[np.ndarray, "batches batch"], chosen: int):
        self.rows, self.all_rows, self._count = chosen, len(rows), len(indices)
        self._read = functools.partial(read_checked, source, rows)
        self._batches, self._indices = map(self._read, indices), indices

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> Batch:
        return next(self._batches)

    def read(self, first: int, rows: int) -> Batch:
        """Return `rows` rows from number `first` on, counted over the rows of these batches."""
        return self._read(self._indices.reshape(-1)[first : first + rows])


def validation_batches(
    source: Source,
    *,
    seq_len: int,
    batch_size: int,
    limit: int,
    rows: Integer[np.ndarray, " rows"] | None = None,
) -> ValidationBatches:
    """Return batches of validation rows, in order.

    All batches are full: the last one is filled with rows of padding, which have segment 0 and label -1.

    Args:
        source: The data; of a mixture one of its sources.
        seq_len: The tokens per row.
        batch_size: The rows per batch.
        limit: The number of rows to read, evenly spaced; 0 for all.
        rows: The rows of each batch to read and return; None for all.

    Raises:
        UserError: `batch_size` is below 1.
    """
    _check(batch_size)
    held_out = source.rows(source.validation, seq_len)
    indices = held_out.choose(limit)
    # The row after the last may hold a part of the documents that fills no row; those behind it are padding alone.
    beyond = np.full(-len(indices) % batch_size, len(held_out) + 1)
    grouped = np.concatenate([indices, beyond]).reshape(-1, batch_size)
    return ValidationBatches(source, held_out, grouped if rows is None else grouped[:, rows], len(indices))


def _check(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
