"""Data: a random Markov chain, whose best possible loss is known."""

import dataclasses
import math
from typing import Annotated

import numpy as np

from moezoo.data.base import HeldOutSettings
from moezoo.data.corpus import Corpus, dtype_for
from moezoo.data.held_out import hash_numbers, hold_out
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Numbers
from moezoo.host import check_host
from moezoo.typed import AtMost, Range, Size

# Python draws the successors of one token after the other, and the tokens of all documents step by step: seconds.
_MOST = 2**20


@dataclasses.dataclass(frozen=True)
class Synthetic(HeldOutSettings):
    """A random Markov chain: each token has `successors` equally likely next tokens.

    No model can reach a loss below ln(`successors`) nats per token. There are `documents` documents of
    `document_length` tokens; the seed of the run decides the chain and the documents.
    """

    vocab: Annotated[int, Range(at_least=1, at_most=_MOST)] = 256
    successors: Annotated[Size, AtMost("vocab")] = 4
    documents: Size = 2000
    document_length: Annotated[int, Range(at_least=2, at_most=_MOST)] = 1000

    def load(self, *, seed: int, vocab: int) -> Source:
        """Draw the chain, then the documents: first tokens uniformly, each next token from the successors.

        The first token of a document is never predicted, so every label has an entropy of exactly ln(`successors`).
        """
        require_vocab(f"data.vocab={self.vocab}", self.vocab, vocab, or_else=f" or data.vocab={vocab}")
        chain, per_document = 8 * self.vocab * self.successors, self.document_length * dtype_for(self.vocab).itemsize
        check_host(f"data.vocab={self.vocab} x data.successors={self.successors}", chain, "choose fewer")
        check_host(
            f"data.documents={self.documents} x data.document_length={self.document_length}",
            self.documents * (per_document + 2 * 8),  # its tokens, where it begins, and one random number
            "choose fewer or shorter documents",
        )
        random = np.random.default_rng(seed)
        successors = np.stack([random.choice(self.vocab, self.successors, replace=False) for _ in range(self.vocab)])
        tokens = np.empty((self.documents, self.document_length), dtype_for(self.vocab))
        tokens[:, 0] = random.integers(self.vocab, size=self.documents)
        for step in range(1, self.document_length):
            choice = random.integers(self.successors, size=self.documents)
            tokens[:, step] = successors[tokens[:, step - 1], choice]
        offsets = np.arange(self.documents + 1, dtype=np.int64) * self.document_length
        corpus = Corpus.from_tokens(tokens.reshape(-1), offsets)
        # By index, so that the sizes of both splits are the same for every seed.
        split = hold_out(corpus, self.held_out, hashes=hash_numbers(self.documents), by="index")
        floor = f"ln {self.successors} = {math.log(self.successors):.4f} nats per token (the lowest possible loss)"
        return make_source("synthetic", split, Numbers(self.vocab), vocab=self.vocab, entropy=floor)
