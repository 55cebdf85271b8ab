"""A data source that is loaded: two splits, their vocabulary and their tokenizer."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Int32

from moezoo.data.corpus import Corpus, fingerprint
from moezoo.data.held_out import Split
from moezoo.data.packing import Packing, TooLong
from moezoo.data.rows import Windows
from moezoo.data.stream import Stream
from moezoo.data.token_text import TokenBytes
from moezoo.data.tokenizer import Bytes, Tokenizer
from moezoo.errors import UserError


class Part(NamedTuple):
    """A source of a mixture, and how often a row is of it, relative to the others."""

    source: "Source"
    weight: float


@dataclasses.dataclass(frozen=True)
class Source:
    """Data to train and validate on.

    - `name`: its key in `moezoo.data.SOURCES`;
    - `train`, `validation`: the two splits;
    - `vocab`: every token id is below it;
    - `unit`: what a token is, "byte" or "token"; losses are in nats per unit;
    - `summary`: facts about the data, as title and text: the size of both splits ("train", "validation"), the choice
      of validation documents ("held out"), how many documents equal others, if any ("duplicates"), and those of the
      kind of data, such as "sha256" of all token ids;
    - `held_out`: the names of the validation documents, if documents have names and whole ones are held out;
    - `shards`: int64 [shards], the index in the stored training tokens at which each shard begins: an epoch reads
      shards in a random order, and the documents of each; None shuffles windows instead;
    - `packing`: whether rows are windows of the stream of documents, or hold whole documents;
    - `too_long`: what packing does with a document that is longer than a row;
    - `weighted`: the sources of a mixture, by name; then `train` and `validation` hold nothing;
    - `encode`, `decode`: convert text to token ids and back; data without a tokenizer has ids as decimal numbers;
    - `token_bytes`: returns the bytes of text that each id stands for; raises `UserError` where that is not known;
    - `unsettled`: returns the ids whose text may be another once more ids follow; None where any may;
    - `stream`: the training documents, where they are read one after another; then `train` holds nothing;
    - `whole`: the documents of both splits in their order, where validation documents are held out of them;
    - `ends`: the tokens that end an answer;
    - `notes`, `warnings`: what a user should know, and should look at, of how the data were read, in lines.
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
    token_bytes: Callable[[], TokenBytes]
    shards: np.ndarray | None = None
    packing: Packing = "stream"
    too_long: TooLong = "parts"
    weighted: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    stream: Stream | None = None
    whole: Corpus | None = None
    ends: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unsettled: Callable[[], frozenset[int] | None] = lambda: None

    @property
    def parts(self) -> dict[str, "Source"]:
        """The sources of a mixture by name; of any other data, these alone, without a name."""
        return {name: part.source for name, part in self.weighted.items()} or {"": self}

    @functools.cached_property
    def documents_hash(self) -> str:
        """A hash of the training documents: where each begins and, of many tokens, of evenly spaced parts.

        Of a stream, a hash of its first documents.
        """
        parts = [part.stream.fingerprint if part.stream else fingerprint(part.train) for part in self.parts.values()]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def question(self, longest: int) -> Int32[np.ndarray, "length"] | None:
        """Return a validation document up to its first token that is predicted, for a model to answer.

        It is the first document of which that is less than `longest` tokens, or else the last tokens of the first; None
        if all tokens are predicted.
        """
        corpus = self.validation
        if corpus.mask is None:
            return None
        last = None
        for start, length in zip(corpus.starts, np.diff(corpus.offsets), strict=True):
            predicted = corpus.mask[start + 1 : start + length]
            if predicted.any():
                ids = corpus.tokens[start : start + 1 + predicted.argmax()].astype(np.int32)
                if len(ids) < longest:
                    return ids
                last = ids[1 - longest :] if last is None else last
        return last

    def facts(self, seq_len: int) -> dict[str, str | int | float | None]:
        """Return what is the same for the same data, as title and value; rows have `seq_len` tokens."""
        if self.weighted:
            return {
                f"{title} of data.sources.{name}": fact
                for name, part in self.weighted.items()
                for title, fact in {"the weight": part.weight, **part.source.facts(seq_len)}.items()
            }
        sides = {"training": self.train, "validation": self.validation}
        return {
            "the vocabulary": self.vocab,
            "the packing": f"{self.packing}, {self.too_long}",
            **{f"the number of {side} windows": len(Windows(corpus, seq_len)) for side, corpus in sides.items()},
            "the sha256 of all token ids": self.summary.get("sha256"),
            "the first documents of the stream": self.stream and self.stream.fingerprint,
            **{f"the hash of the {side} tokens": fingerprint(corpus) for side, corpus in sides.items()},
        }


def make_source(name: str, split: Split, tokenizer: Tokenizer, /, *, vocab: int, **summary: str) -> Source:
    """Return a source whose summary has the facts common to all kinds of data, then those of `summary`."""
    unit = "byte" if isinstance(tokenizer, Bytes) else "token"
    sizes = {
        side: f"{len(corpus):,} {unit}s in {corpus.documents:,} document{'s' * (corpus.documents != 1)}"
        for side, corpus in (("train", split.train), ("validation", split.validation))
    }
    duplicates = {"duplicates": split.duplicates} if split.duplicates else {}
    return Source(
        name=name,
        train=split.train,
        validation=split.validation,
        vocab=vocab,
        unit=unit,
        summary={**sizes, "held out": split.how, **duplicates, **summary},
        held_out=split.held_out,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        token_bytes=tokenizer.token_bytes,
        unsettled=tokenizer.unsettled,
        whole=split.whole,
    )


def require_vocab(what: str, needed: int, vocab: int, *, or_else: str = "") -> None:
    """Raise `UserError` unless a model of `vocab` tokens can read `what`, whose ids are below `needed`."""
    if needed > vocab:
        raise UserError(f"{what} but model.vocab={vocab}; set model.vocab={needed}{or_else}")
