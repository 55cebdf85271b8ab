# In moezoo: moezoo/data/lines.py
import dataclasses
from pathlib import Path

import numpy as np

from moezoo.data.base import HeldOutSettings
from moezoo.data.corpus import concatenate, digest, dtype_for
from moezoo.data.held_out import hold_out
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Bytes
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lines(HeldOutSettings):
    """The lines of the file `path`; a token is a byte."""

    path: str | None = None

    def load(self, *, seed: int, vocab: int) -> Source:
        """Read the file and hold out a share of the lines. Raises `UserError` for a file that cannot be read."""
        del seed
        if self.path is None:
            raise UserError("data.path is required for data=lines; pass data.path=FILE")
        require_vocab("data=lines has 256 byte values", 256, vocab)
        try:
            lines = Path(self.path).expanduser().read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"data.path={self.path}: cannot be read ({error.strerror}); pass a text file") from None
        corpus = concatenate([np.frombuffer(line, np.uint8) for line in lines], dtype_for(256))
        return make_source("lines", hold_out(corpus, self.held_out), Bytes(), vocab=256, sha256=digest(corpus))
