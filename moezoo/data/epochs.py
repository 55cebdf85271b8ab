"""The training rows of all epochs, numbered one after another: the order in which a run reads its data."""

import abc
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.base import naming
from moezoo.data.order import Draws, reorder
from moezoo.data.packing import Fitted, Packed, count_kept, fit, pack
from moezoo.data.rows import Batch, Rows, Windows
from moezoo.data.source import Source, read_checked
from moezoo.data.stream import Batches, Json, Reader, Stream, StreamBatches
from moezoo.errors import UserError

# More rows than a run can read. The length of grain's own endless repetition overflows in batches of one.
ENDLESS = 2**62

# A warning comes where more than `_MUCH` percent of the tokens to predict are lost. It names the next multiple of
# `_STEP` that keeps `_ENOUGH` percent of them.
_MUCH, _ENOUGH, _STEP = 10, 95, 128

_Numbers = Integer[np.ndarray, "batch"]


class _Places(NamedTuple):
    """Where rows are: the epoch of each, and its index there."""

    epochs: Int64[np.ndarray, "batch"]
    indices: Int64[np.ndarray, "batch"]


class Epochs(abc.ABC):
    """The training rows of a source, in an order that follows from the seed."""

    @abc.abstractmethod
    def batches(
        self, batch_size: int, rows: Integer[np.ndarray, " rows"] | None, start: int, places: Sequence[Json] | None
    ) -> Batches:
        """Return endless batches.

        Args:
            batch_size: The rows per batch.
            rows: The rows of each batch to read and return; None for all.
            start: The number of batches to skip, without reading them.
            places: The places of a stream behind the batches to skip, of all processes; None for other data.
        """

    @abc.abstractmethod
    def count(self, epochs: int) -> int:
        """Return the number of rows of the first `epochs` epochs. Raises `UserError` where data have none."""

    def by_source(self, numbers: _Numbers) -> dict[str, int]:
        """Return how many tokens of each source of a mixture are in rows; nothing for other data."""
        del numbers
        return {}

    def describe(self) -> list[str]:
        """Return lines for the summary of a run; none where rows are windows."""
        return []

    def warnings(self) -> list[str]:
        """Return a line where much of what the documents would teach is lost, with a length of rows that keeps it."""
        return []


class Numbered(Epochs):
    """Rows that have numbers, by which they are read. Threads may read at the same time."""

    @abc.abstractmethod
    def read(self, numbers: _Numbers) -> Batch:
        """Return rows by their numbers, which count on from epoch to epoch. Raises `UserError` as `read_checked`."""

    @abc.abstractmethod
    def sizes(self, numbers: _Numbers) -> Int64[np.ndarray, "batch"]:
        """Return the number of tokens in each row, padding not counted, without reading any."""

    @property
    @abc.abstractmethod
    def on_disk(self) -> bool:
        """Whether tokens are read from a file, which may be on a slow disk."""

    def batches(
        self, batch_size: int, rows: Integer[np.ndarray, " rows"] | None, start: int, places: Sequence[Json] | None
    ) -> Batches:
        del places
        import grain  # takes a second to import, and a configuration can be read without it

        def read(numbers: np.ndarray) -> Batch:
            return self.read(numbers if rows is None else numbers[rows])

        # Reading from memory takes a fraction of a step; a file is read ahead.
        ahead = 4 if self.on_disk else 0
        options = grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)
        batches: Any = iter(grain.MapDataset.range(ENDLESS).batch(batch_size).map(read).to_iter_dataset(options))
        batches.set_state({"next_index": start})
        return _NumberedBatches(batches)


class _NumberedBatches(Batches):
    """Batches whose place is their number."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches = batches

    def __next__(self) -> Batch:
        return next(self._batches)


class _Streamed(Epochs):
    """The rows of a stream, which has no numbers."""

    def __init__(self, source: Source, stream: Stream, seq_len: int, seed: int):
        self._source, self._stream, self._seq_len, self._seed = source, stream, seq_len, seed

    def batches(
        self, batch_size: int, rows: Integer[np.ndarray, " rows"] | None, start: int, places: Sequence[Json] | None
    ) -> Batches:
        del start
        # Processes have equally many rows. Those that have the same ones have the same readers.
        count = len(places) if places else batch_size // (batch_size if rows is None else len(rows))

        def make(number: int) -> Reader:
            return Reader(
                self._stream,
                number,
                count,
                seq_len=self._seq_len,
                seed=self._seed,
                packing=self._source.packing,
                too_long=self._source.too_long,
                place=places[number] if places else None,
            )

        return StreamBatches(make, count, self._stream.notes(count), batch_size=batch_size, rows=rows)

    def count(self, epochs: int) -> int:
        raise UserError(f"epochs={epochs}: {self._stream.shown} is a stream, whose length is not known; set steps")


class _OneSource(Numbered):
    """The training rows of a source that is no mixture."""

    def __init__(self, source: Source, make: Callable[[int], Rows]):
        """`make` returns the rows of an epoch, from 0."""
        self._source, self._lock = source, threading.Lock()
        self._make = functools.lru_cache(maxsize=2)(make)  # a batch may have rows of two epochs

    @property
    def on_disk(self) -> bool:
        return isinstance(self._source.train.tokens, np.memmap)

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch."""
        with self._lock:
            return self._make(epoch)

    @abc.abstractmethod
    def locate(self, numbers: _Numbers) -> _Places:
        """Return where the rows of these numbers are."""

    def read(self, numbers: _Numbers) -> Batch:
        places = self.locate(numbers)

        def part(epoch: int, chosen: np.ndarray) -> Batch:
            return read_checked(self._source, self.rows(epoch), places.indices[chosen])

        return _join(places.epochs, part)

    def sizes(self, numbers: _Numbers) -> Int64[np.ndarray, "batch"]:
        places = self.locate(numbers)
        sizes = np.empty(len(numbers), np.int64)
        for epoch in np.unique(places.epochs):
            chosen = places.epochs == epoch
            sizes[chosen] = self.rows(int(epoch)).sizes(places.indices[chosen])
        return sizes


def _join(groups: np.ndarray, part: Callable[[int, np.ndarray], Batch]) -> Batch:
    """Return a batch of which each row is of a group; `part` returns the rows `chosen` of a group."""
    chosen = {int(group): np.flatnonzero(groups == group) for group in np.unique(groups)}
    batches = [part(group, rows) for group, rows in chosen.items()]
    order = np.argsort(np.concatenate(list(chosen.values())))
    return Batch(*(np.concatenate(arrays)[order] for arrays in zip(*batches, strict=True)))


class _Shuffled(_OneSource):
    """Windows in random order."""

    def __init__(self, source: Source, seq_len: int, seed: int):
        import grain  # takes a second to import, and a configuration can be read without it

        windows = Windows(source.train, seq_len)
        super().__init__(source, lambda epoch: windows)
        count = len(windows)
        # Epochs are repeated before rows are grouped, so that no remainder of an epoch is lost.
        self._order: Any = grain.MapDataset.range(count).seed(seed).shuffle().repeat(ENDLESS // count)

    def count(self, epochs: int) -> int:
        return epochs * len(self.rows(0))

    def locate(self, numbers: _Numbers) -> _Places:
        indices = np.array([self._order[int(number)] for number in numbers], np.int64)
        return _Places(np.zeros_like(indices), indices)


class _Reordered(_OneSource):
    """Windows of documents in random order."""

    def __init__(self, source: Source, shards: np.ndarray, seq_len: int, seed: int):
        self._count = len(Windows(source.train, seq_len))
        super().__init__(source, lambda epoch: Windows(reorder(source.train, shards, seed=seed, epoch=epoch), seq_len))

    def count(self, epochs: int) -> int:
        return epochs * self._count

    def locate(self, numbers: _Numbers) -> _Places:
        return _Places(*np.divmod(numbers.astype(np.int64), self._count))


class PackedEpochs(_OneSource):
    """Whole documents in random order; each epoch packs them anew. `fitted` describes them."""

    def __init__(self, source: Source, seq_len: int, seed: int):
        self.fitted: Fitted = fit(source.train, seq_len, source.too_long)
        self._seq_len = seq_len
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

    def warnings(self) -> list[str]:
        source, longer = self._source, self.fitted.too_long
        if source.too_long == "parts" or not longer:
            return []
        kept = count_kept(source.train, source.too_long)
        whole = int(kept[-1])
        lost = whole - int(kept[self._seq_len])
        if 100 * lost <= _MUCH * whole:
            return []
        enough = int(np.searchsorted(kept, -(-_ENOUGH * whole // 100)))
        part, chosen = f"{lost / whole:.0%} of the {source.unit}s to predict", -(-enough // _STEP) * _STEP
        return [
            f"{part} are lost, since {longer:,} of {source.train.documents:,} documents are longer than "
            f"seq_len={self._seq_len}; seq_len={chosen} keeps {_ENOUGH}%"
        ]

    def count(self, epochs: int) -> int:
        return self._pack_while(lambda ends: len(ends) <= epochs)[epochs]

    def _pack_while(self, wanting: Callable[[list[int]], bool]) -> list[int]:
        """Return the numbers of rows before each epoch, up to an epoch with which `wanting` them is False."""
        # How many rows an epoch has is known when it is packed. Threads may add the same number at the same time.
        ends = self._ends
        while wanting(ends):
            ends = [*ends, ends[-1] + len(self.rows(len(ends) - 1))]
        self._ends = max(self._ends, ends, key=len)
        return ends

    def locate(self, numbers: _Numbers) -> _Places:
        ends = self._pack_while(lambda ends: ends[-1] <= numbers.max(initial=0))
        epochs = np.searchsorted(ends, numbers, side="right") - 1
        return _Places(epochs, numbers - np.array(ends, np.int64)[epochs])


class _Mixed(Numbered):
    """Rows of several sources, drawn by weight. Each source has epochs of its own."""

    def __init__(self, source: Source, seq_len: int, seed: int):
        self._names = list(source.weighted)
        self._draws = Draws([part.weight for part in source.weighted.values()], seed)
        self._epochs = {
            number: _make_numbered(part.source, seq_len, seed)
            for number, part in enumerate(source.weighted.values())
            if part.weight  # another may have no text to train on
        }

    @property
    def on_disk(self) -> bool:
        return any(each.on_disk for each in self._epochs.values())

    def describe(self) -> list[str]:
        return [f"{self._names[i]}: {line}" for i, epochs in self._epochs.items() for line in epochs.describe()]

    def warnings(self) -> list[str]:
        return [f"{self._names[i]}: {line}" for i, epochs in self._epochs.items() for line in epochs.warnings()]

    def read(self, numbers: _Numbers) -> Batch:
        drawn = self._draws.locate(numbers)

        def part(number: int, chosen: np.ndarray) -> Batch:
            with naming(self._names[number]):
                return self._epochs[number].read(drawn.indices[chosen])

        return _join(drawn.sources, part)

    def sizes(self, numbers: _Numbers) -> Int64[np.ndarray, "batch"]:
        drawn = self._draws.locate(numbers)
        sizes = np.empty(len(numbers), np.int64)
        for number in np.unique(drawn.sources):
            chosen = drawn.sources == number
            sizes[chosen] = self._epochs[int(number)].sizes(drawn.indices[chosen])
        return sizes

    def count(self, epochs: int) -> int:
        raise UserError(
            f"epochs={epochs}: rows of a mixture are drawn by weight, so its sources have epochs of their own and all "
            "together have none; set steps"
        )

    def by_source(self, numbers: _Numbers) -> dict[str, int]:
        sources, sizes = self._draws.locate(numbers).sources, self.sizes(numbers)
        return {name: int(sizes[sources == number].sum()) for number, name in enumerate(self._names)}


def make_epochs(source: Source, *, seq_len: int, seed: int) -> Epochs:
    """Return the training rows of a source: the windows of its stream, or its packed documents.

    Windows are shuffled; of a source with shards, documents are, and windows follow their order. Packed documents, and
    parts of long ones, are shuffled in the order of shards, or all together. Rows of a mixture are drawn by weight, and
    a stream has an order of its own.

    Args:
        source: The data.
        seq_len: The tokens per row.
        seed: The seed of the order.
    """
    if source.weighted:
        return _Mixed(source, seq_len, seed)
    if source.stream is not None:
        return _Streamed(source, source.stream, seq_len, seed)
    return _make_numbered(source, seq_len, seed)


def _make_numbered(source: Source, seq_len: int, seed: int) -> Numbered:
    """Return the rows of a source that is neither a mixture nor a stream."""
    if source.packing == "whole":
        return PackedEpochs(source, seq_len, seed)
    if source.shards is None:
        return _Shuffled(source, seq_len, seed)
    return _Reordered(source, source.shards, seq_len, seed)
