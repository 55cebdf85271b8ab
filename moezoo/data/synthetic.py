"""Made-up data whose best possible loss is known."""

import math

import numpy as np

from moezoo.data.corpus import Corpus, dtype_for, hold_out, select_held_out_by_index
from moezoo.data.settings import Synthetic
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Numbers


def load_synthetic(settings: Synthetic, *, seed: int, vocab: int) -> Source:
    """Documents drawn from the Markov chain that `seed` gives: first tokens uniformly, then one of the successors.

    A document's first token is never predicted, so every label has exactly ln(`settings.successors`) nats.
    """
    require_vocab(f"data.vocab={settings.vocab}", settings.vocab, vocab, or_else=f" or data.vocab={vocab}")
    random = np.random.default_rng(seed)
    successors = np.stack(
        [random.choice(settings.vocab, settings.successors, replace=False) for _ in range(settings.vocab)]
    )
    tokens = np.empty((settings.documents, settings.document_length), dtype_for(settings.vocab))
    tokens[:, 0] = random.integers(settings.vocab, size=settings.documents)
    for step in range(1, settings.document_length):
        choice = random.integers(settings.successors, size=settings.documents)
        tokens[:, step] = successors[tokens[:, step - 1], choice]
    offsets = np.arange(settings.documents + 1, dtype=np.int64) * settings.document_length
    split = hold_out(Corpus.whole(tokens.reshape(-1), offsets), select_held_out_by_index(settings.documents))
    floor = f"ln {settings.successors} = {math.log(settings.successors):.4f} nats a token, the lowest loss possible"
    return make_source("synthetic", split, Numbers(settings.vocab), vocab=settings.vocab, entropy=floor)
