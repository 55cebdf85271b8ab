"""The loss of a trigram model, which a language model on bytes must beat."""

import numpy as np
from jaxtyping import Int32

from moezoo.data.epochs import Windowed, validation_rows
from moezoo.data.rows import Batch
from moezoo.data.source import Source

_LARGEST_VOCAB = 256  # the table of trigrams takes 64 MiB

_Ids = Int32[np.ndarray, "predicted"]


def trigram_loss(source: Source, *, limit: int, seq_len: int, counted: int = 2**24, chunk: int = 2**18) -> float | None:
    """Return the validation loss of an interpolated trigram model, in nats per token.

    None for more than 256 tokens, for a stream, and for a mixture, whose sources would need one model each.

    With c the counts after a history h, T the number of different tokens that followed it, and h' the history without
    its oldest token, the probability of the next token w is

        p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),

    down to a uniform distribution. This is Witten-Bell smoothing (Witten and Bell, 1991, method C; Chen and Goodman,
    1999, section 2.4).

    Args:
        source: The data.
        limit: The number of validation rows, as in `validation_batches`.
        seq_len: The tokens of each. No row sees tokens of the one before it.
        counted: The number of training tokens to count. More than the default take minutes and change little.
        chunk: The number of tokens to process together.
    """
    vocab = source.vocab
    if vocab > _LARGEST_VOCAB or source.weighted or source.stream:
        return None
    unigrams, bigrams = np.zeros(vocab, np.int64), np.zeros((vocab, vocab), np.int64)
    trigrams = np.zeros((vocab, vocab, vocab), np.uint32)
    windows = Windowed(source, source.train, chunk)
    for index in range(min(windows.count(1), counted // chunk)):
        first, second, third = _trigrams(windows.read(np.array([index])))
        unigrams += np.bincount(third, minlength=vocab)
        bigrams += np.bincount(second * vocab + third, minlength=vocab**2).reshape(vocab, vocab)
        seen = first >= 0
        keys = (first[seen] * vocab + second[seen]) * vocab + third[seen]
        np.add.at(trigrams.reshape(-1), keys, np.uint32(1))

    after_none = _witten_bell(unigrams, *_history(unigrams), np.full(vocab, 1 / vocab))
    after_one = _witten_bell(bigrams, *_history(bigrams), after_none)
    total, different = (x[..., 0] for x in _history(trigrams))

    nats, predicted = 0.0, 0
    held_out = validation_rows(source, seq_len)
    indices = held_out.choose(limit)
    for group in np.array_split(indices, max(1, len(indices) * seq_len // chunk)) if len(indices) else ():
        first, second, third = _trigrams(held_out.read(group))
        shorter, seen = after_one[second, third], first >= 0
        h = first[seen], second[seen]
        longer = _witten_bell(trigrams[(*h, third[seen])], total[h], different[h], shorter[seen])
        nats -= np.log(shorter[~seen]).sum() + np.log(longer).sum()
        predicted += len(third)
    return float(nats / max(predicted, 1))


def _history(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return c(h) and T(h) [..., 1] from counts c(h w) [..., vocab]."""
    return counts.sum(-1, dtype=np.int64, keepdims=True), np.count_nonzero(counts, axis=-1, keepdims=True)


def _witten_bell(count: np.ndarray, total: np.ndarray, different: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Return p(w | h) from c(h w), c(h), T(h) and p(w | h'); it equals p(w | h') if h was never seen."""
    unseen = total == 0
    return (count + np.where(unseen, 1, different) * shorter) / np.where(unseen, 1, total + different)


def _trigrams(batch: Batch) -> tuple[_Ids, _Ids, _Ids]:
    """Return the tokens before the last, the last tokens and those to predict; -1 for one before a row or document."""
    first = np.full_like(batch.tokens, -1)
    first[:, 1:] = np.where(batch.positions[:, 1:] > 0, batch.tokens[:, :-1], -1)
    predicted = batch.labels >= 0
    return first[predicted], batch.tokens[predicted], batch.labels[predicted]
