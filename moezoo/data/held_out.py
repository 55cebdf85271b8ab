"""The choice of the documents that are held out for validation.

It is by content: equal documents, which have the same ids whatever is predicted of them, are on the same side, in
whatever order they stand, and the side of a document does not depend on others. Files with names are chosen by name,
and one that equals an earlier one is on its side.
"""

import hashlib
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from moezoo.data.corpus import Corpus
from moezoo.errors import UserError
from moezoo.host.machine import processors

SHARE = 0.05  # of the documents, or of the tokens where whole documents cannot be held out
_PART = 2**18  # tokens that a thread hashes at once
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_Hashes = UInt64[np.ndarray, "hashes"]


class Split(NamedTuple):
    """Training and validation documents.

    - `how`: how validation documents were chosen, in words;
    - `held_out`: the names of the validation documents, if any;
    - `whole`: the documents of both in their order, where validation documents are held out of them;
    - `duplicates`: how many documents equal others, in words; empty without any.
    """

    train: Corpus
    validation: Corpus
    how: str
    held_out: tuple[str, ...] = ()
    whole: Corpus | None = None
    duplicates: str = ""


def hash_contents(corpus: Corpus) -> UInt64[np.ndarray, "documents"]:
    """Return a hash of the ids of each document, whatever their dtype; that of the empty document is never held out.

    It is the sum of hashes of each id with its index in the document, hashed with the length: it takes a few operations
    of NumPy per token, also for many short documents. The documents lie one after another in the stored tokens.
    """
    offsets, tokens = corpus.offsets, corpus.tokens
    assert np.array_equal(corpus.starts, offsets[:-1]), "documents of a selection"
    lengths = np.diff(offsets)
    full = np.flatnonzero(lengths)
    begins, sums = offsets[full], np.zeros(len(full), np.uint64)
    threads, adding = processors(), threading.Lock()

    def hash_parts(thread: int) -> None:
        for begin in range(thread * _PART, len(corpus), threads * _PART):
            end = min(begin + _PART, len(corpus))
            first, last = np.searchsorted(begins, begin, "right") - 1, np.searchsorted(begins, end)
            edges = np.maximum(begins[first:last], begin)
            index = np.arange(begin, end) - np.repeat(begins[first:last], np.diff(edges, append=end))
            hashed = _mix(index.view(np.uint64) << np.uint64(32) | _read(tokens, begin, end))
            with adding:  # a document may be in several parts
                sums[first:last] += np.add.reduceat(hashed, edges - begin)

    with ThreadPoolExecutor(threads, "hash") as pool:
        list(pool.map(hash_parts, range(threads)))
    found = np.zeros(len(lengths), np.uint64)
    found[full] = sums
    return _mix(found + _GOLDEN * (lengths + 1).view(np.uint64))


def hash_numbers(count: int) -> UInt64[np.ndarray, "count"]:
    """Return the hashes of the numbers from 1 to `count`."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def hash_names(names: Sequence[str]) -> UInt64[np.ndarray, "names"]:
    """Return hashes of names; names of files need not be UTF-8."""
    hashes = (int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest(), 16) for name in names)
    return np.array([value % (20 * 2**32) for value in hashes], np.uint64)  # all that `choose` reads


def choose(hashes: _Hashes, share: float) -> Bool[np.ndarray, "hashes"]:
    """Return which hashes are in a share of all; of 1/20 these are the multiples of 20, and a larger share has them."""
    return hashes % 20 + hashes // 20 % 2**32 / 2**32 < 20 * share


def hold_out(
    corpus: Corpus,
    share: float = SHARE,
    *,
    hashes: _Hashes | None = None,
    names: Sequence[str] = (),
    by: Literal["content", "index"] = "content",
) -> Split:
    """Hold out a share of the documents, or the last tokens of different ones where a split would be empty otherwise.

    Args:
        corpus: The documents.
        share: The share of documents that is held out on average, up to 0.5.
        hashes: Those of `hash_contents`, which are computed if there are none; other ones choose `by` something else.
        names: The names of the documents, by which they are chosen.
        by: What `hashes` are of.
    """
    hashes = hash_contents(corpus) if hashes is None else hashes
    full = np.diff(corpus.offsets) > 0
    if names:
        same = np.arange(corpus.documents)  # the first document that equals each; those without tokens are apart
        same[full] = same[full][_find_first(hashes[full])]
        chosen = choose(hash_names(names), share)[same]
    else:
        chosen = choose(hashes, share)
    duplicates = _describe_equal(hashes, full, "document")
    if _divides(chosen[full]):
        how = f"1 in {1 / share:.4g}, by a hash of its {'name' if names else by}"
        held_out = tuple(itertools.compress(names, chosen))
        return Split(corpus.select(~chosen), corpus.select(chosen), how, held_out, corpus, duplicates)
    train, validation, left_out = _cut_end(corpus.select(full), share, hashes[full])
    how = f"the last {_percent(share)} of the tokens"
    if duplicates:
        how += f" of different documents; {left_out:,} copies of these are left out"
    return Split(train, validation, how, (), corpus, duplicates)


def hold_out_chats(
    corpus: Corpus, share: float, *, hashes: _Hashes, chats: Int64[np.ndarray, "documents"], shown: str
) -> Split:
    """Hold out a share of the chats or, where a split would be empty otherwise, one of those with the fewest copies.

    Args:
        corpus: The documents.
        share: The share of chats that is held out on average.
        hashes: Those of `hash_contents`.
        chats: The chat that each document is a part of; they rise from 0.
        shown: What the user wrote, as messages begin.

    Raises:
        UserError: There are not two different chats.
    """
    first = np.flatnonzero(np.diff(chats, prepend=-1))
    index = (np.arange(corpus.documents) - first[chats]).view(np.uint64)
    of_chats = _mix(np.add.reduceat(_mix(hashes + _GOLDEN * (index + np.uint64(1))), first))
    full = np.add.reduceat(np.diff(corpus.offsets), first) > 0
    different, copies = np.unique(of_chats[full], return_counts=True)
    if len(different) < 2:
        one = f"{full.sum():,} chats that are all equal" if full.sum() > 1 else "one chat alone"
        raise UserError(f"{shown} has {one}; give more, or set data.validation")
    if _divides(choose(different, share)):
        chosen, how = choose(of_chats, share), f"1 chat in {1 / share:.4g}, by a hash of its content"
    else:
        chosen = of_chats == different[copies.argmin()]
        how = (
            f"one of the fewest copies, with the smallest hash, since {len(different)} different chats are too few to "
            f"hold out {_percent(share)}; set data.validation=FILE to choose others"
        )
    held_out = (chosen & full)[chats]
    return Split(
        corpus.select(~held_out), corpus.select(held_out), how, (), corpus, _describe_equal(of_chats, full, "chat")
    )


def own_validation(
    train: Corpus,
    validation: Corpus,
    how: str,
    *,
    hashes: tuple[UInt64[np.ndarray, " train"], UInt64[np.ndarray, " validation"]],
    names: tuple[str, ...] = (),
) -> Split:
    """Return a split into documents that were given apart; those in both are counted by the `hashes` of contents."""
    full = [np.diff(corpus.offsets) > 0 for corpus in (train, validation)]
    both = int(np.isin(hashes[1][full[1]], hashes[0][full[0]]).sum())
    counts = [_describe_equal(hashes[0], full[0], "document")]
    counts += [f"{both:,} of {_count(full[1], 'validation document')} are trained on too"] if both else []
    return Split(train, validation, how, names, duplicates="; ".join(filter(None, counts)))


class _Ends(NamedTuple):
    """A corpus without its last tokens, these, and how many documents are in neither."""

    train: Corpus
    validation: Corpus
    left_out: int


def _cut_end(corpus: Corpus, share: float, hashes: _Hashes) -> _Ends:
    """Cut off a share of the tokens of different documents; copies of a document that the cut is in or before go."""
    first = _find_first(hashes)
    is_first = first == np.arange(len(first))
    once = corpus.select(is_first)
    held_out = int(share * len(once))
    ends = np.zeros(len(first), np.int64)
    ends[is_first] = once.offsets[1:]
    late = ends[first] > len(once) - held_out
    stream = corpus.take(np.concatenate([np.flatnonzero(~late), np.flatnonzero(late & is_first)]))
    return _Ends(*stream.cut(len(stream) - held_out), int((late & ~is_first).sum()))


def _find_first(hashes: _Hashes) -> Int64[np.ndarray, "hashes"]:
    """Return the index of the first hash that is equal to each."""
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    return first[number]


def _divides(chosen: Bool[np.ndarray, "documents"]) -> bool:
    return bool(chosen.any() and not chosen.all())


def _describe_equal(hashes: _Hashes, full: Bool[np.ndarray, "hashes"], what: str) -> str:
    """Return how many of those with tokens equal an earlier one; empty for none."""
    again = int(full.sum()) - len(np.unique(hashes[full]))
    return f"{again:,} of {_count(full, what)} equal an earlier one" if again else ""


def _count(full: Bool[np.ndarray, "documents"], what: str) -> str:
    empty = len(full) - int(full.sum())
    return f"{int(full.sum()):,} {what}s{f' ({empty:,} empty left out)' * bool(empty)}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _mix(x: _Hashes) -> _Hashes:
    """Return the last step of splitmix64 (Steele et al., 2014) of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _read(tokens: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return a part of the stored tokens; of a file, without mapping it: pages would count as memory of the process."""
    if not isinstance(tokens, np.memmap):
        return tokens[begin:end]
    at = tokens.offset + begin * tokens.itemsize
    return np.fromfile(str(tokens.filename), tokens.dtype, end - begin, offset=at)
