"""The order of an epoch: shards in a seeded order, and the documents of each shard in one."""

import numpy as np
from jaxtyping import Int64

from moezoo.data.corpus import Corpus


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
