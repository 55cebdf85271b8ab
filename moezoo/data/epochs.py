"""The training rows of all epochs, numbered one after another: the order in which a run reads its data."""

import abc
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.order import reorder
from moezoo.data.packing import Fitted, Packed, fit, pack
from moezoo.data.rows import Batch, Rows
from moezoo.data.source import Source, read_checked
from moezoo.data.windows import Windows

# More rows than a run can read. The length of grain's own endless repetition overflows in batches of one.
ENDLESS = 2**62

_Numbers = Integer[np.ndarray, "batch"]


class _Places(NamedTuple):
    """Where rows are: the epoch of each, and its index there."""

    epochs: Int64[np.ndarray, "batch"]
    indices: Int64[np.ndarray, "batch"]


class Epochs(abc.ABC):
    """The training rows of a source, in an order that follows from the seed. Threads may read at the same time."""

    def __init__(self, source: Source, make: Callable[[int], Rows]):
        """`make` returns the rows of an epoch, from 0."""
        self._source, self._lock = source, threading.Lock()
        self._make = functools.lru_cache(maxsize=2)(make)  # a batch may have rows of two epochs

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch."""
        with self._lock:
            return self._make(epoch)

    @abc.abstractmethod
    def locate(self, numbers: _Numbers) -> _Places:
        """Return where the rows of these numbers are."""

    def describe(self) -> list[str]:
        """Return lines for the summary of a run; none where rows are windows."""
        return []

    def read(self, numbers: _Numbers) -> Batch:
        """Return rows by their numbers, which count on from epoch to epoch. Raises `UserError` as `read_checked`."""
        places, parts = self.locate(numbers), {}
        for epoch in np.unique(places.epochs):
            chosen = np.flatnonzero(places.epochs == epoch)
            parts[epoch] = chosen, read_checked(self._source, self.rows(int(epoch)), places.indices[chosen])
        order = np.argsort(np.concatenate([chosen for chosen, _ in parts.values()]))
        return Batch(*(np.concatenate(arrays)[order] for arrays in zip(*(b for _, b in parts.values()), strict=True)))


class _Shuffled(Epochs):
    """Windows in random order."""

    def __init__(self, source: Source, seq_len: int, seed: int):
        import grain  # takes a second to import, and a configuration can be read without it

        windows = Windows(source.train, seq_len)
        super().__init__(source, lambda epoch: windows)
        count = len(windows)
        # Epochs are repeated before rows are grouped, so that no remainder of an epoch is lost.
        self._order: Any = grain.MapDataset.range(count).seed(seed).shuffle().repeat(ENDLESS // count)

    def locate(self, numbers: _Numbers) -> _Places:
        indices = np.array([self._order[int(number)] for number in numbers], np.int64)
        return _Places(np.zeros_like(indices), indices)


class _Reordered(Epochs):
    """Windows of documents in random order."""

    def __init__(self, source: Source, shards: np.ndarray, seq_len: int, seed: int):
        self._count = len(Windows(source.train, seq_len))
        super().__init__(source, lambda epoch: Windows(reorder(source.train, shards, seed=seed, epoch=epoch), seq_len))

    def locate(self, numbers: _Numbers) -> _Places:
        return _Places(*np.divmod(numbers.astype(np.int64), self._count))


class PackedEpochs(Epochs):
    """Whole documents in random order; each epoch packs them anew. `fitted` describes them."""

    def __init__(self, source: Source, seq_len: int, seed: int):
        self.fitted: Fitted = fit(source.train, seq_len, source.too_long)
        shards = np.zeros(1, np.int64) if source.shards is None else source.shards
        inputs = self.fitted.inputs
        super().__init__(source, lambda epoch: pack(reorder(inputs, shards, seed=seed, epoch=epoch), seq_len))
        self._ends = [0]  # the numbers of rows before each epoch

    def rows(self, epoch: int) -> Packed:
        found = super().rows(epoch)
        assert isinstance(found, Packed)
        return found

    def describe(self) -> list[str]:
        documents, rows, source = self.fitted.inputs.documents, self.rows(0), self._source
        how = {"parts": "are cut into parts", "cut": "are cut at their end", "drop": "are left out"}[source.too_long]
        lines = [f"whole: {documents:,} documents in {len(rows):,} rows in the first epoch, {rows.padding:.2%} padding"]
        if self.fitted.too_long:
            lines.append(f"{self.fitted.too_long:,} documents longer than a row {how}")
        if self.fitted.without_label:
            lines.append(f"{self.fitted.without_label:,} documents without a {source.unit} to predict are left out")
        return lines

    def locate(self, numbers: _Numbers) -> _Places:
        # How many rows an epoch has is known when it is packed. Threads may add the same number at the same time.
        ends = self._ends
        while ends[-1] <= numbers.max(initial=0):
            ends = [*ends, ends[-1] + len(self.rows(len(ends) - 1))]
        self._ends = max(self._ends, ends, key=len)
        epochs = np.searchsorted(ends, numbers, side="right") - 1
        return _Places(epochs, numbers - np.array(ends, np.int64)[epochs])


def make_epochs(source: Source, *, seq_len: int, seed: int) -> Epochs:
    """Return the training rows of a source: the windows of its stream, or its packed documents.

    Windows are shuffled; of a source with shards, documents are, and windows follow their order. Packed documents, and
    parts of long ones, are shuffled in the order of shards, or all together.

    Args:
        source: The data.
        seq_len: The tokens per row.
        seed: The seed of the order.
    """
    if source.packing == "whole":
        return PackedEpochs(source, seq_len, seed)
    if source.shards is None:
        return _Shuffled(source, seq_len, seed)
    return _Reordered(source, source.shards, seq_len, seed)
