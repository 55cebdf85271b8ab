"""Documents as one long array of tokens."""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt


class Ids(NamedTuple):
    """A document as tokens.

    - `ids`: unsigned integers [length];
    - `mask`: bool [length], whether a token is predicted; None for all. The documents of a corpus all have one, or none
      has.
    """

    ids: UInt[np.ndarray, "length"]
    mask: Bool[np.ndarray, "length"] | None = None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, read one after another as one stream of tokens.

    - `tokens`: uint8, uint16 or uint32 [stored], in memory or mapped from a file; may also hold other documents;
    - `starts`: the index in `tokens` at which each document begins;
    - `offsets`: the index in the stream at which each document begins, then the length of the stream. It never
      decreases; two equal offsets make an empty document;
    - `mask`: bool [stored], in memory or mapped: whether a token is predicted; None for all, except the first of each
      document, which never is.
    """

    tokens: Shaped[np.ndarray, "stored"]
    starts: Int64[np.ndarray, "documents"]
    offsets: Int64[np.ndarray, "documents+1"]
    mask: Bool[np.ndarray, "stored"] | None = None

    @classmethod
    def from_tokens(cls, tokens: np.ndarray, offsets: np.ndarray, mask: np.ndarray | None = None) -> "Corpus":
        """Return the corpus of all `tokens` [stored], cut into documents at `offsets` int64 [documents + 1]."""
        return cls(tokens, offsets[:-1], offsets, mask)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.starts)

    def __len__(self) -> int:
        """Return the number of tokens in the stream."""
        return int(self.offsets[-1])

    def select(self, chosen: Bool[np.ndarray, "documents"]) -> "Corpus":
        """Return the chosen documents, in the same order, without copying tokens."""
        return self.take(np.flatnonzero(chosen))

    def take(self, order: Int64[np.ndarray, "taken"]) -> "Corpus":
        """Return the documents of these numbers, in this order, without copying tokens."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return dataclasses.replace(self, starts=self.starts[order], offsets=offsets)

    def cut(self, at: int) -> tuple["Corpus", "Corpus"]:
        """Return the first `at` tokens of the stream and the rest; a document that contains the cut becomes two."""
        before, after = np.minimum(self.offsets, at), np.maximum(self.offsets, at)
        moved = np.maximum(at - self.offsets[:-1], 0)  # how much later the second part of each document starts
        first = dataclasses.replace(self, offsets=before)
        starts = self.starts + np.minimum(moved, np.diff(self.offsets))
        second = dataclasses.replace(self, starts=starts, offsets=after - at)
        return first.select(np.diff(before) > 0), second.select(np.diff(after) > 0)

    def predicts(self) -> bool:
        """Return whether any token is predicted."""
        documents = zip(self.starts, np.diff(self.offsets), strict=True)
        return any(n > 1 and (self.mask is None or self.mask[at + 1 : at + n].any()) for at, n in documents)


def concatenate(documents: list[np.ndarray], dtype: np.dtype, masks: list[np.ndarray] | None = None) -> Corpus:
    """Return one corpus of documents, arrays of tokens [length], stored as `dtype`; `masks` are their masks."""
    lengths = np.array([0, *map(len, documents)], np.int64)
    tokens = np.concatenate([np.zeros(0, dtype), *(document.astype(dtype, copy=False) for document in documents)])
    mask = None if masks is None else np.concatenate([np.zeros(0, bool), *masks])
    return Corpus.from_tokens(tokens, np.cumsum(lengths), mask)


def dtype_for(vocab: int) -> np.dtype:
    """Return the smallest dtype that holds the ids of `vocab` tokens."""
    return np.dtype(np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.uint32)


def digest(corpus: Corpus) -> str:
    """Return the first 16 digits of the SHA-256 of all tokens that are stored without a mask: those of both splits."""
    assert corpus.mask is None
    return hashlib.sha256(corpus.tokens.data).hexdigest()[:16]


def fingerprint(corpus: Corpus) -> str:
    """Return the first 16 digits of a SHA-256 of a corpus: of its documents' places, its stored tokens, and its mask.

    Of more than 2**24 tokens, which may be on disk, only evenly spaced parts are read.
    """
    hashed = hashlib.sha256(np.concatenate([corpus.starts, corpus.offsets]).data)
    parts = range(0, len(corpus.tokens), 2**16)
    for at in parts[:: max(1, len(parts) // 2**8)]:
        hashed.update(np.ascontiguousarray(corpus.tokens[at : at + 2**16]).data)
        if corpus.mask is not None:
            hashed.update(np.ascontiguousarray(corpus.mask[at : at + 2**16]).data)
    return hashed.hexdigest()[:16]
