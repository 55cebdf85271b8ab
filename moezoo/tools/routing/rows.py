"""The rows of a text that a model reads, batch by batch, as often as wanted."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from moezoo.config.settings import TrainConfig
from moezoo.data import Batch, Source, validation_batches
from moezoo.data.tokenizer import Numbers
from moezoo.models.arguments import as_integers, check_inside
from moezoo.models.base import LanguageModel


class TextRows(NamedTuple):
    """Batches of one shape, and single rows of them.

    Attributes:
        batches: A function that returns the batches from the first on, NumPy arrays [batch, seq] each.
        row: A function from the number of a row, counted over all batches, to a batch of this row.
        count: The number of batches.
        shape: The rows per batch and tokens per row.
        decode: A function from token ids to text.
        unit: What a token is, "byte" or "token".
    """

    batches: Callable[[], Iterator[Batch]]
    row: Callable[[int], Batch]
    count: int
    shape: tuple[int, int]
    decode: Callable[[Iterable[SupportsIndex]], str]
    unit: str


def rows_of_source(source: Source, cfg: TrainConfig) -> TextRows:
    """Return the rows that an evaluation of `cfg` reads: `data.eval_sequences` validation rows of each source."""
    sizes: Any = {"seq_len": cfg.seq_len, "batch_size": cfg.batch_size, "limit": cfg.data.eval_sequences}
    parts = [validation_batches(part, **sizes) for part in source.parts.values()]
    counts = list(map(len, parts))
    starts = np.cumsum([0, *counts]) * cfg.batch_size

    def row(number: int) -> Batch:
        part = int(np.searchsorted(starts, number, side="right")) - 1
        return parts[part].row(number - int(starts[part]))

    def batches() -> Iterator[Batch]:
        return itertools.chain.from_iterable(validation_batches(part, **sizes) for part in source.parts.values())

    return TextRows(batches, row, sum(counts), (cfg.batch_size, cfg.seq_len), source.decode, source.unit)


def rows_of_tokens(tokens: object, model: LanguageModel) -> TextRows:
    """Return the rows of one batch: a `Batch`, or integers [batch, seq] whose rows are one document each.

    Raises `UserError` for anything else, and for what `model` cannot read.
    """
    if not isinstance(tokens, Batch):
        ids = np.asarray(as_integers("data", tokens))
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        tokens = Batch(ids, np.full(ids.shape, -1), np.ones(ids.shape, np.int32), positions)
    batch = Batch(*map(np.asarray, tokens))
    valid, limit, vocab = batch.segments > 0, model.config.longest, model.vocab
    check_inside("data", batch.tokens[valid], vocab, f"model.vocab={vocab}")
    check_inside("positions of data", batch.positions[valid], limit.tokens, str(limit))
    batch = Batch(*(x.astype(np.int32) for x in batch))

    def row(number: int) -> Batch:
        return Batch(*(x[number : number + 1] for x in batch))

    shape = batch.tokens.shape[0], batch.tokens.shape[1]
    return TextRows(lambda: iter([batch]), row, 1, shape, Numbers(vocab).decode, "token")
