"""What every kind of data is read into."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import SupportsIndex

import numpy as np

from moezoo.data.corpus import Corpus, Split
from moezoo.data.tokenizer import Bytes, Tokenizer
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Source:
    """Data to train and validate on.

    - `name`: its key in `moezoo.data.SOURCES`;
    - `train`, `validation`: the two splits;
    - `vocab`: every token id is below it;
    - `unit`: what a token is, "byte" or "token"; losses are nats per unit;
    - `summary`: what was read, as lines of a name and a text;
    - `held_out`: names of the validation documents, where documents have names and whole ones are held out;
    - `encode`, `decode`: from text to token ids and back; data without a tokenizer writes ids as numbers.
    """

    name: str
    train: Corpus
    validation: Corpus
    vocab: int
    unit: str
    summary: Mapping[str, str]
    held_out: tuple[str, ...]
    encode: Callable[[str], list[int]]
    decode: Callable[[Iterable[SupportsIndex]], str]


def make_source(name: str, split: Split, tokenizer: Tokenizer, *, vocab: int, **summary: str) -> Source:
    """A source with the lines of a summary that all kinds have, then those of `summary`."""
    unit = "byte" if isinstance(tokenizer, Bytes) else "token"
    sizes = {
        side: f"{len(corpus):,} {unit}s in {corpus.documents:,} document{'s' * (corpus.documents != 1)}"
        for side, corpus in (("train", split.train), ("validation", split.validation))
    }
    return Source(
        name=name,
        train=split.train,
        validation=split.validation,
        vocab=vocab,
        unit=unit,
        summary={**sizes, "held out": split.how, **summary},
        held_out=split.held_out,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def require_vocab(what: str, needed: int, vocab: int, *, or_else: str = "") -> None:
    """Raises `UserError` unless a model of `vocab` tokens can read `what`, whose ids go up to `needed` - 1."""
    if needed > vocab:
        raise UserError(f"{what} but model.vocab={vocab}; set model.vocab={needed}{or_else}")


def check_ids(ids: np.ndarray, source: Source) -> None:
    """Raises `UserError` for ids outside the vocabulary, which a model would read as some other token.

    Only files of tokens can hold such ids, and they are too long to be searched before a run.
    """
    top = int(ids.max(initial=0))
    if top >= source.vocab:
        raise UserError(
            f"data={source.name} holds token {top} but its vocabulary is {source.vocab} tokens; "
            "make the file at data.path again with moezoo prepare-data"
        )
