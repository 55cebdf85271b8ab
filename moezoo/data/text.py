"""Data: text files and folders of them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moezoo.data.base import DataSettings
from moezoo.data.corpus import Corpus, Split, concatenate, digest, dtype_for, hold_out, select_held_out_by_name
from moezoo.data.files import check_size, describe_skipped, find_documents, read_documents
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import NO_TOKENS, Tokenizer, document_ids, text_tokenizer
from moezoo.errors import UserError
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class Text(DataSettings):
    """UTF-8 text.

    - `path`: a file, or a folder in which each file is a document; an evaluation on `validation` needs none;
    - `tokenizer`: a Hugging Face `tokenizer.json`; None makes each byte a token;
    - `validation`: a second file or folder to validate on; None holds out a part of `path`: 1 file in 20 by a hash of
      its name, or the last 5% of the tokens if there are few files.
    """

    path: str | None = None
    tokenizer: str | None = None
    validation: str | None = None

    def load(self, *, seed: int, vocab: int) -> Source:
        """Read all text into memory.

        Raises:
            UserError: A path does not exist or holds no UTF-8 text, or every file of `path` is also in `validation`.
        """
        del seed
        path, own = self.path, self.validation
        if path is None and own is None:
            raise UserError("data.path is required for data=text; pass data.path=FILE_OR_FOLDER")
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        bytes_ = "data=text without data.tokenizer has 256 byte values"
        what = bytes_ if self.tokenizer is None else f"data.tokenizer has {tokenizer.vocab} tokens"
        require_vocab(what, tokenizer.vocab, vocab)
        paths = [] if path is None else find_documents(path, key="data.path")
        if own is None:
            assert path is not None
            read = _read(paths, path, tokenizer, key="data.path")
            split = hold_out(read.corpus, select_held_out_by_name(read.names), read.names)
        else:
            apart = find_documents(own, key="data.validation")
            # Validation files may be in a subfolder of the training files, and must not be trained on.
            withheld = {file.resolve() for file in apart}
            paths = [file for file in paths if file.resolve() not in withheld]
            if path is not None and not paths:
                raise UserError(f"data.validation={own} holds every file of data.path={path}; give different files")
            nothing = _NamedCorpus(concatenate([], dtype_for(tokenizer.vocab)), [], 0)
            read = nothing if path is None else _read(paths, path, tokenizer, key="data.path")
            held_out = _read(apart, own, tokenizer, key="data.validation")
            split = Split(read.corpus, held_out.corpus, f"data.validation={own}", tuple(held_out.names))
        extra = {"skipped": describe_skipped(read.skipped)} if read.skipped else {}
        return make_source("text", split, tokenizer, vocab=tokenizer.vocab, sha256=digest(read.corpus), **extra)

    def tokenizer_file(self) -> Path | None:
        return None if self.tokenizer is None else Path(os.path.expanduser(self.tokenizer))


class _NamedCorpus(NamedTuple):
    """Documents, their names, and the number of files that were skipped because they are not text."""

    corpus: Corpus
    names: list[str]
    skipped: int


def _read(paths: Sequence[Path], path: str, tokenizer: Tokenizer, *, key: str) -> _NamedCorpus:
    check_size(paths, show(f"{key}={path}"), "convert it with moezoo prepare-data, and train with data=tokens")
    names, documents = [], []
    dtype = dtype_for(tokenizer.vocab)
    for name, content in read_documents(paths, path, key=key):
        names.append(name)
        documents.append(document_ids(tokenizer, content, dtype))
    corpus = concatenate(documents, dtype)
    if not len(corpus):
        raise UserError(f"{show(f'{key}={path}')}: {NO_TOKENS}")
    return _NamedCorpus(corpus, names, len(paths) - len(names))
