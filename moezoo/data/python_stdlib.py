"""Data: the source code of Python's standard library."""

import dataclasses
import platform
import sysconfig
from pathlib import Path

import numpy as np

from moezoo.data.base import HeldOutSettings
from moezoo.data.corpus import concatenate, digest
from moezoo.data.files import files_under
from moezoo.data.held_out import hold_out
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Bytes
from moezoo.errors import UserError

# Leave out installed packages and tests, which are not the library, and tables of characters and help texts.
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "__pycache__")
)


@dataclasses.dataclass(frozen=True)
class PythonStdlib(HeldOutSettings):
    """The source code of the running Python's standard library as raw bytes, one document per file.

    It is on every machine and needs no download. Files are held out by a hash of their path.
    """

    def load(self, *, seed: int, vocab: int) -> Source:
        """Read all files into memory."""
        del seed
        require_vocab("data=python_stdlib has 256 byte values", Bytes.vocab, vocab)
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = files_under(root, (".py",), skip=_NOT_LIBRARY.__contains__)
        if not paths:
            raise UserError(f"data=python_stdlib finds no *.py file in {root}; use data=text data.path=FILE_OR_FOLDER")
        corpus = concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in paths], np.dtype(np.uint8))
        names = [path.relative_to(root).as_posix() for path in paths]
        # The library differs by version, so losses are comparable only if this version and the hash agree.
        version = f"{platform.python_implementation()} {platform.python_version()}"
        split = hold_out(corpus, self.held_out, names=names)
        return make_source("python_stdlib", split, Bytes(), vocab=256, sha256=digest(corpus), of=version)
