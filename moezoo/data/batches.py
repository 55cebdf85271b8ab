"""Endless batches for training, and ordered batches for validation."""

from collections.abc import Iterator, Sequence, Sized

import numpy as np
from jaxtyping import Integer

from moezoo.data.epochs import OneSource, make_epochs, validation_rows
from moezoo.data.rows import Batch
from moezoo.data.source import Source
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
    `numbers` [batches, batch] are those of the rows that are read, -1 for a row of padding.
    """

    def __init__(self, held_out: OneSource, numbers: Integer[np.ndarray, "batches batch"], chosen: int):
        self.rows, self.all_rows, self._count = chosen, held_out.count(1), len(numbers)
        self._held_out, self._numbers = held_out, numbers
        self._batches = map(self._read, numbers)

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> Batch:
        return next(self._batches)

    def read(self, first: int, rows: int) -> Batch:
        """Return `rows` rows from number `first` on, counted over the rows of these batches."""
        return self._read(self._numbers.reshape(-1)[first : first + rows])

    def _read(self, numbers: Integer[np.ndarray, "rows"]) -> Batch:
        batch, real = self._held_out.read(np.maximum(numbers, 0)), numbers[:, None] >= 0
        nothing = Batch(tokens=0, labels=-1, segments=0, positions=0)
        return Batch(*(np.where(real, array, np.int32(none)) for array, none in zip(batch, nothing, strict=True)))


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
    held_out = validation_rows(source, seq_len)
    chosen = held_out.choose(limit)
    numbers = np.concatenate([chosen, np.full(-len(chosen) % batch_size, -1)]).reshape(-1, batch_size)
    return ValidationBatches(held_out, numbers if rows is None else numbers[:, rows], len(chosen))


def _check(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
