# In moezoo: moezoo/data/lines.py
import dataclasses
from pathlib import Path

import numpy as np

from moezoo.data.base import DataSettings
from moezoo.data.corpus import concatenate, digest, dtype_for, hold_out, select_held_out_by_index
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Bytes
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lines(DataSettings):
    """The lines of the file `path`; a token is a byte."""

    path: str | None = None

    def load(self, *, seed: int, vocab: int) -> Source:
        """Read the file and hold out one line in twenty. Raises `UserError` for a file that cannot be read."""
        del seed
        if self.path is None:
            raise UserError("data.path is required for data=lines; pass data.path=FILE")
        require_vocab("data=lines has 256 byte values", 256, vocab)
        try:
            lines = Path(self.path).expanduser().read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"data.path={self.path}: cannot be read ({error.strerror}); pass a text file") from None
        corpus = concatenate([np.frombuffer(line, np.uint8) for line in lines], dtype_for(256))
        split = hold_out(corpus, select_held_out_by_index(corpus.documents))
        return make_source("lines", split, Bytes(), vocab=256, sha256=digest(corpus))
