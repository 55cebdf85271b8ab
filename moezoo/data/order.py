"""The order of training rows: of the documents of an epoch, and which source of a mixture a row is of."""

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.corpus import Corpus

# Rows whose draws are made together.
_BLOCK = 2**14
# With the seed, a key of Philox; orders of documents have epochs there.
_STREAM = 2**64 - 1


def reorder(corpus: Corpus, shards: Int64[np.ndarray, "shards"], *, seed: int, epoch: int) -> Corpus:
    """Return the documents in the order of an epoch, without copying tokens.

    Each shard and each document has a random number of 64 bits. Documents are sorted by their shard's number, then by
    their own. The numbers are what Philox yields for the key [seed, epoch]: those of the shards, then of the documents.
    NumPy keeps this sequence the same in all versions, unlike its permutations.

    Args:
        corpus: The documents of a split.
        shards: The index in the stored tokens at which each shard begins.
        seed: The seed of the run.
        epoch: From 0.
    """
    numbers = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(len(shards) + corpus.documents)
    shard = np.searchsorted(shards, corpus.starts, side="right") - 1
    order = np.lexsort((numbers[len(shards) :], numbers[shard]))
    return corpus.take(order)


class Drawn(NamedTuple):
    """The source of each row, and the number of the row among those of its source."""

    sources: Int64[np.ndarray, "batch"]
    indices: Int64[np.ndarray, "batch"]


class Draws:
    """Sources of rows, drawn by weight. Threads may draw at the same time.

    The source of a row follows from the seed and the number of the row: it is that of the Philox number of this place,
    as a fraction of 2**53, in the cumulative weights. Which of its source's rows it is follows from the draws before,
    which are counted block by block: 10 million rows take about a second.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        """`weights` are not negative, and not all zero."""
        total = np.cumsum(np.array(weights, np.float64))
        self._until = total / total[-1]
        self._seed, self._lock = seed, threading.Lock()
        self._before = np.zeros((1, len(weights)), np.int64)  # the rows of each source before each block
        self._block = functools.lru_cache(maxsize=4)(self._draw)

    def _draw(self, block: int) -> Drawn:
        """Return the draws of a block; `indices` count from its first row."""
        philox = np.random.Philox(key=np.array([self._seed, _STREAM], np.uint64), counter=[0, block, 0, 0])
        fraction = (philox.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
        sources = np.searchsorted(self._until, fraction, side="right").astype(np.int64)
        indices = np.empty(_BLOCK, np.int64)
        for source in range(len(self._until)):
            chosen = sources == source
            indices[chosen] = np.arange(chosen.sum())
        return Drawn(sources, indices)

    def locate(self, numbers: Integer[np.ndarray, "batch"]) -> Drawn:
        """Return the source and the index of the rows of these numbers."""
        blocks, places = np.divmod(numbers.astype(np.int64), _BLOCK)
        found = Drawn(np.empty_like(places), np.empty_like(places))
        with self._lock:
            self._count(int(blocks.max(initial=0)))
            for block in np.unique(blocks):
                chosen, drawn = blocks == block, self._block(int(block))
                sources = drawn.sources[places[chosen]]
                found.sources[chosen] = sources
                found.indices[chosen] = self._before[block, sources] + drawn.indices[places[chosen]]
        return found

    def _count(self, last: int) -> None:
        """Count the rows of each source before each block up to `last`."""
        known = len(self._before)
        if last >= known:
            each = [np.bincount(self._block(i).sources, minlength=len(self._until)) for i in range(known - 1, last)]
            self._before = np.concatenate([self._before, self._before[-1] + np.cumsum(each, axis=0)])
