"""What counting alone achieves: the loss that a language model on bytes has to beat."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from moezoo.data.source import Source, check_ids
from moezoo.data.windows import Batch, read_windows, validation_indices, window_count

_LARGEST_VOCAB = 256  # a table of its cube takes 64 MiB
_MOST_COUNTED = 2**26  # tokens of the training split; more change bytes' trigrams little, and take minutes
_CHUNK = 2**18  # tokens handled together


class _Trigrams(NamedTuple):
    """Tokens to predict, and the two before; `first` is -1 where a row or document begins with `second`."""

    first: Int32[np.ndarray, "predicted"]
    second: Int32[np.ndarray, "predicted"]
    third: Int32[np.ndarray, "predicted"]


def trigram_loss(source: Source, *, limit: int, seq_len: int) -> float | None:
    """Loss of an interpolated trigram model, in nats per predicted token; None for more than 256 tokens.

    It is counted on (the first 64 Mi tokens of) the training split, and measured on the very windows that evaluation
    reads, seeing no token before a window's first. With c the counts after a history h, T the number of different
    tokens that followed it, and h' the history without its oldest token,

        p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),

    down to a uniform distribution: Witten-Bell smoothing (Witten and Bell, 1991, method C; Chen and Goodman, 1999,
    section 2.4).
    """
    vocab = source.vocab
    if vocab > _LARGEST_VOCAB:
        return None
    unigrams, bigrams = np.zeros(vocab, np.int64), np.zeros((vocab, vocab), np.int64)
    trigrams = np.zeros((vocab, vocab, vocab), np.uint32)
    for index in range(min(window_count(source.train, _CHUNK), _MOST_COUNTED // _CHUNK)):
        first, second, third = _trigrams(source, read_windows(source.train, np.array([index]), _CHUNK))
        unigrams += np.bincount(third, minlength=vocab)
        bigrams += np.bincount(second * vocab + third, minlength=vocab**2).reshape(vocab, vocab)
        seen = first >= 0
        keys = (first[seen] * vocab + second[seen]) * vocab + third[seen]
        np.add.at(trigrams.reshape(-1), keys, np.uint32(1))

    after_none = _witten_bell(unigrams, *_history(unigrams), np.full(vocab, 1 / vocab))
    after_one = _witten_bell(bigrams, *_history(bigrams), after_none)
    total, different = (x[..., 0] for x in _history(trigrams))

    nats, predicted = 0.0, 0
    indices = validation_indices(source.validation, limit=limit, seq_len=seq_len)
    for group in np.array_split(indices, max(1, len(indices) * seq_len // _CHUNK)):
        first, second, third = _trigrams(source, read_windows(source.validation, group, seq_len))
        shorter, seen = after_one[second, third], first >= 0
        h = first[seen], second[seen]
        longer = _witten_bell(trigrams[(*h, third[seen])], total[h], different[h], shorter[seen])
        nats -= np.log(shorter[~seen]).sum() + np.log(longer).sum()
        predicted += len(third)
    return float(nats / max(predicted, 1))


def _history(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c(h) and T(h) [..., 1] of counts c(h w) [..., vocab]."""
    return counts.sum(-1, dtype=np.int64, keepdims=True), np.count_nonzero(counts, axis=-1, keepdims=True)


def _witten_bell(count: np.ndarray, total: np.ndarray, different: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """p(w | h) from c(h w), c(h), T(h) and p(w | h'); the last alone where the history was never seen."""
    unseen = total == 0
    return (count + np.where(unseen, 1, different) * shorter) / np.where(unseen, 1, total + different)


def _trigrams(source: Source, batch: Batch) -> _Trigrams:
    check_ids(batch.tokens.view(np.uint32), source)
    check_ids(batch.labels, source)
    first = np.full_like(batch.tokens, -1)
    first[:, 1:] = np.where(batch.positions[:, 1:] > 0, batch.tokens[:, :-1], -1)
    predicted = batch.labels >= 0
    return _Trigrams(first[predicted], batch.tokens[predicted], batch.labels[predicted])
