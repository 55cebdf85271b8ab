"""Rows by number: those of training, which count on from epoch to epoch, and those of validation, which are one epoch.

Both are of a split of a source, whose documents are put into an order for each epoch, and then into rows.
"""

import abc
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.base import naming
from moezoo.data.corpus import Corpus
from moezoo.data.order import Draws, reorder
from moezoo.data.packing import Fitted, Packed, count_kept, fit, pack
from moezoo.data.rows import Batch, Rows, Windows
from moezoo.data.source import Source
from moezoo.data.stream import Batches, Json, Reader, Stream, StreamBatches
from moezoo.errors import UserError

# More rows than a run can read. The length of grain's own endless repetition overflows in batches of one.
ENDLESS = 2**62

# A warning comes where more than `_MUCH` percent of the tokens to predict are lost. It names the next multiple of
# `_STEP` that keeps `_ENOUGH` percent of them.
_MUCH, _ENOUGH, _STEP = 10, 95, 128

_Numbers = Integer[np.ndarray, "batch"]
# Returns documents in the order of an epoch, from 0.
Order = Callable[[Corpus, int], Corpus]


def in_order(documents: Corpus, epoch: int) -> Corpus:
    """Return documents in their own order, which every epoch has."""
    del epoch
    return documents


class Located(NamedTuple):
    """Where rows are: the epoch of each or, of a mixture, its source; and the index there."""

    groups: Int64[np.ndarray, "batch"]
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
    def locate(self, numbers: _Numbers) -> Located:
        """Return where the rows of these numbers are."""

    @abc.abstractmethod
    def rows(self, group: int) -> "Rows | Numbered":
        """Return all rows of a group."""

    @abc.abstractmethod
    def read_rows(self, group: int, indices: Integer[np.ndarray, "some"]) -> Batch:
        """Return rows of a group.

        Raises `UserError` for ids outside the vocabulary, which a model would take for another token. Only token files
        can hold such ids. They are too long to be searched before a run, so each batch is checked.
        """

    def read(self, numbers: _Numbers) -> Batch:
        """Return rows by their numbers, which count on from epoch to epoch. Raises `UserError` as `read_rows`."""
        found = self.locate(numbers)
        places = {int(group): np.flatnonzero(found.groups == group) for group in np.unique(found.groups)}
        batches = [self.read_rows(group, found.indices[chosen]) for group, chosen in places.items()]
        order = np.argsort(np.concatenate(list(places.values())))
        return Batch(*(np.concatenate(arrays)[order] for arrays in zip(*batches, strict=True)))

    def sizes(self, numbers: _Numbers) -> Int64[np.ndarray, "batch"]:
        """Return the number of tokens in each row, padding not counted, without reading any."""
        found, sizes = self.locate(numbers), np.empty(len(numbers), np.int64)
        for group in np.unique(found.groups):
            chosen = found.groups == group
            sizes[chosen] = self.rows(int(group)).sizes(found.indices[chosen])
        return sizes

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


class OneSource(Numbered):
    """The rows of one split of a source that is no mixture, epoch after epoch.

    Args:
        source: The data.
        documents: Those of the split.
        make: Returns the rows of an epoch, from 0.
    """

    def __init__(self, source: Source, documents: Corpus, make: Callable[[int], Rows]):
        self._source, self.documents, self._lock = source, documents, threading.Lock()
        self._make = functools.lru_cache(maxsize=2)(make)  # a batch may have rows of two epochs

    @property
    def on_disk(self) -> bool:
        return isinstance(self.documents.tokens, np.memmap)

    def rows(self, group: int) -> Rows:
        """Return the rows of an epoch."""
        with self._lock:
            return self._make(group)

    def choose(self, limit: int) -> Int64[np.ndarray, "chosen"]:
        """Return the rows of an evaluation: `limit` of the first epoch, evenly spaced, or all for 0 or a larger one."""
        count = self.count(1)
        chosen = min(limit, count) if limit else count
        return np.arange(chosen, dtype=np.int64) * count // max(chosen, 1)

    def read_rows(self, group: int, indices: Integer[np.ndarray, "some"]) -> Batch:
        source, rows = self._source, self.rows(group)
        batch = rows.read(indices)
        # Ids too large for int32 are negative in tokens.
        for later, ids in enumerate((batch.tokens.view(np.uint32), batch.labels)):
            top = int(ids.max(initial=0))
            if top >= source.vocab:
                at = int(rows.locate(indices).ravel()[ids.argmax()]) + later
                file = f" ({rows.stored.filename})" if isinstance(rows.stored, np.memmap) else ""
                raise UserError(
                    f"data={source.name}{file} holds token {top} at index {at} but its vocabulary is "
                    f"{source.vocab} tokens; make the file again with moezoo prepare-data, or correct vocab in the "
                    ".json file next to it"
                )
        return batch


class Windowed(OneSource):
    """Windows of documents, which each epoch puts into an order; or the same ones, which are shuffled.

    `shuffled` returns the window of a number.
    """

    def __init__(
        self,
        source: Source,
        documents: Corpus,
        seq_len: int,
        order: Order = in_order,
        shuffled: Callable[[int], int] | None = None,
    ):
        self._count, self._shuffled = len(Windows(documents, seq_len)), shuffled
        super().__init__(source, documents, lambda epoch: Windows(order(documents, epoch), seq_len))

    def count(self, epochs: int) -> int:
        return epochs * self._count

    def locate(self, numbers: _Numbers) -> Located:
        if self._shuffled is None:
            return Located(*np.divmod(numbers.astype(np.int64), self._count))
        indices = np.array([self._shuffled(int(number)) for number in numbers], np.int64)
        return Located(np.zeros_like(indices), indices)


class PackedEpochs(OneSource):
    """Whole documents in the order of each epoch, which packs them anew. `fitted` describes them."""

    def __init__(self, source: Source, documents: Corpus, seq_len: int, order: Order = in_order):
        self.fitted: Fitted = fit(documents, seq_len, source.too_long)
        self._seq_len = seq_len
        inputs = self.fitted.inputs
        super().__init__(source, documents, lambda epoch: pack(order(inputs, epoch), seq_len))
        self._ends = [0]  # the numbers of rows before each epoch

    def rows(self, group: int) -> Packed:
        found = super().rows(group)
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
        kept = count_kept(self.documents, source.too_long)
        whole = int(kept[-1])
        lost = whole - int(kept[self._seq_len])
        if 100 * lost <= _MUCH * whole:
            return []
        enough = int(np.searchsorted(kept, -(-_ENOUGH * whole // 100)))
        part, chosen = f"{lost / whole:.0%} of the {source.unit}s to predict", -(-enough // _STEP) * _STEP
        return [
            f"{part} are lost, since {longer:,} of {self.documents.documents:,} documents are longer than "
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

    def locate(self, numbers: _Numbers) -> Located:
        ends = self._pack_while(lambda ends: ends[-1] <= numbers.max(initial=0))
        epochs = np.searchsorted(ends, numbers, side="right") - 1
        return Located(epochs, numbers - np.array(ends, np.int64)[epochs])


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

    def locate(self, numbers: _Numbers) -> Located:
        return Located(*self._draws.locate(numbers))

    def rows(self, group: int) -> Numbered:
        return self._epochs[group]

    def read_rows(self, group: int, indices: Integer[np.ndarray, "some"]) -> Batch:
        with naming(self._names[group]):
            return self._epochs[group].read(indices)

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


def validation_rows(source: Source, seq_len: int) -> OneSource:
    """Return the validation rows of a source that is no mixture, of `seq_len` tokens: an epoch, in documents' order."""
    kind = PackedEpochs if source.packing == "whole" else Windowed
    return kind(source, source.validation, seq_len)


def _make_numbered(source: Source, seq_len: int, seed: int) -> OneSource:
    """Return the training rows of a source that is neither a mixture nor a stream."""
    shards = np.zeros(1, np.int64) if source.shards is None else source.shards

    def order(documents: Corpus, epoch: int) -> Corpus:
        return reorder(documents, shards, seed=seed, epoch=epoch)

    if source.packing == "whole":
        return PackedEpochs(source, source.train, seq_len, order)
    if source.shards is not None:
        return Windowed(source, source.train, seq_len, order)
    import grain  # takes a second to import, and a configuration can be read without it

    count = len(Windows(source.train, seq_len))
    # Epochs are repeated before rows are grouped, so that no remainder of an epoch is lost.
    shuffled: Any = grain.MapDataset.range(count).seed(seed).shuffle().repeat(ENDLESS // count)
    return Windowed(source, source.train, seq_len, shuffled=shuffled.__getitem__)
