"""Documents as one long array of tokens, and how a part of them is held out."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped

# One document in twenty is held out; so is the last twentieth where whole documents cannot be.
HELD_OUT = 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, read one after another as one stream of tokens.

    - `tokens`: uint8, uint16 or uint32 [stored], in memory or mapped from a file; may hold other documents too;
    - `starts`: where each document begins in `tokens`;
    - `offsets`: where each document begins in the stream, and at last the stream's length; never falls, and two equal
      offsets make an empty document.
    """

    tokens: Shaped[np.ndarray, "stored"]
    starts: Int64[np.ndarray, "documents"]
    offsets: Int64[np.ndarray, "documents+1"]

    @classmethod
    def whole(cls, tokens: np.ndarray, offsets: np.ndarray) -> "Corpus":
        """All of `tokens` [stored], cut into documents at `offsets` int64 [documents + 1]."""
        return cls(tokens, offsets[:-1], offsets)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts)

    def __len__(self) -> int:
        """Number of tokens in the stream."""
        return int(self.offsets[-1])

    def select(self, chosen: Bool[np.ndarray, "documents"]) -> "Corpus":
        """The chosen documents, in the same order; no token is copied."""
        lengths = np.diff(self.offsets)[chosen]
        return Corpus(self.tokens, self.starts[chosen], np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    def cut(self, at: int) -> tuple["Corpus", "Corpus"]:
        """The stream's first `at` tokens and the others; the document that lies across becomes two."""
        before, after = np.minimum(self.offsets, at), np.maximum(self.offsets, at)
        moved = np.maximum(at - self.offsets[:-1], 0)  # by how much each document's second half starts later
        first = Corpus(self.tokens, self.starts, before)
        second = Corpus(self.tokens, self.starts + np.minimum(moved, np.diff(self.offsets)), after - at)
        return first.select(np.diff(before) > 0), second.select(np.diff(after) > 0)


def concatenate(documents: list[np.ndarray], dtype: np.dtype) -> Corpus:
    """One corpus of arrays of tokens [length], stored as `dtype`."""
    lengths = np.array([0, *map(len, documents)], np.int64)
    tokens = np.concatenate([np.zeros(0, dtype), *(document.astype(dtype, copy=False) for document in documents)])
    return Corpus.whole(tokens, np.cumsum(lengths))


def dtype_for(vocab: int) -> np.dtype:
    """The smallest dtype that holds the ids of `vocab` tokens."""
    return np.dtype(np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.uint32)


def select_held_out_by_name(names: Sequence[str]) -> Bool[np.ndarray, "documents"]:
    """Which documents are for validation: a name's fate does not depend on what other documents there are."""
    hashes = [int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest(), 16) for name in names]
    return np.array([value % HELD_OUT == 0 for value in hashes], bool)


def select_held_out_by_index(documents: int) -> Bool[np.ndarray, "documents"]:
    """Which of so many nameless documents are for validation, by splitmix64 (Steele et al., 2014) of their number.

    There may be many millions, too many for a cryptographic hash of each.
    """
    x = np.arange(1, documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) % np.uint64(HELD_OUT) == 0


def digest(corpus: Corpus) -> str:
    """The first 16 digits of the SHA-256 of the stored tokens, those of both splits."""
    return hashlib.sha256(corpus.tokens.data).hexdigest()[:16]


class Split(NamedTuple):
    """Training and validation documents, in words how they were parted, and the validation documents' names if any."""

    train: Corpus
    validation: Corpus
    how: str
    held_out: tuple[str, ...] = ()


def hold_out(corpus: Corpus, chosen: Bool[np.ndarray, "documents"], names: Sequence[str] = ()) -> Split:
    """Hold out the chosen documents; where that leaves no token on one side, the last tokens of the stream instead."""
    train, validation = corpus.select(~chosen), corpus.select(chosen)
    if len(train) and len(validation):
        how = f"1 document in {HELD_OUT}, by a hash of its {'name' if names else 'number'}"
        return Split(train, validation, how, tuple(itertools.compress(names, chosen)))
    train, validation = corpus.cut(len(corpus) - len(corpus) // HELD_OUT)
    return Split(train, validation, f"the last {100 // HELD_OUT}% of the tokens")
