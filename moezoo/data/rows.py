"""The contract of rows: documents in one order, cut or packed into rows of a batch."""

import abc
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer


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
        """Return rows as a batch [batch, seq]; beyond the last row, rows of padding."""

    @abc.abstractmethod
    def sizes(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch"]:
        """Return the number of tokens in each row, padding not counted, without reading any."""

    def choose(self, limit: int) -> Int64[np.ndarray, "chosen"]:
        """Return the rows of an evaluation: `limit` rows, evenly spaced, or all if `limit` is 0 or larger."""
        chosen = min(limit, len(self)) if limit else len(self)
        return np.arange(chosen, dtype=np.int64) * len(self) // max(chosen, 1)
