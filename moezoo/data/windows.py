"""Windows: each row of a batch is a part of the stream of documents, with labels, segments and positions."""

import dataclasses

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.corpus import Corpus
from moezoo.data.rows import Batch, Rows


@dataclasses.dataclass(frozen=True)
class Windows(Rows):
    """Rows of which row i reads the stream from token i * `seq_len`, and predicts one token further.

    Together they contain every token to predict once; the last one may end in padding. The first token of a document is
    never predicted, because the token before it belongs to another document; nor is one that the mask leaves out.
    """

    corpus: Corpus
    seq_len: int

    def __len__(self) -> int:
        return max(0, -(-(len(self.corpus) - 1) // self.seq_len))

    def sizes(self, indices: Integer[np.ndarray, "batch"]) -> Int64[np.ndarray, "batch"]:
        return np.clip(len(self.corpus) - indices.astype(np.int64) * self.seq_len, 0, self.seq_len)

    def read(self, indices: Integer[np.ndarray, "batch"]) -> Batch:
        corpus, seq_len = self.corpus, self.seq_len
        begin = indices.astype(np.int64)[:, None] * seq_len
        index = begin + np.arange(seq_len + 1)  # in the stream; the last column is only ever a label
        exists = index < len(corpus)
        # Of documents that share an offset all but the last are empty, so side="right" passes them over.
        document = np.searchsorted(corpus.offsets, np.minimum(index, len(corpus) - 1), side="right") - 1
        within = np.minimum(index, len(corpus) - 1) - corpus.offsets[document]
        stored = corpus.starts[document] + within
        ids = corpus.tokens[stored].astype(np.int32)

        same = (document[:, 1:] == document[:, :-1]) & exists[:, 1:]
        if corpus.mask is not None:
            same &= corpus.mask[stored[:, 1:]]
        segments = np.ones((len(begin), seq_len), np.int32)
        segments[:, 1:] += np.cumsum(document[:, 1:-1] != document[:, :-2], axis=1, dtype=np.int32)
        positions = index - np.maximum(corpus.offsets[document], begin)
        real = exists[:, :-1]
        return Batch(
            tokens=np.where(real, ids[:, :-1], np.int32(0)),
            labels=np.where(same, ids[:, 1:], np.int32(-1)),
            segments=np.where(real, segments, np.int32(0)),
            positions=np.where(real, positions[:, :-1], 0).astype(np.int32),
        )
