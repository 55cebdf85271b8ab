"""Text files and folders."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moezoo.data.base import DataSettings
from moezoo.data.corpus import Corpus, Split, concatenate, digest, dtype_for, hold_out, select_held_out_by_name
from moezoo.data.files import find_documents, read_documents
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import Tokenizer, document_ids, text_tokenizer
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Text(DataSettings):
    """UTF-8 text: a file, or a folder with one document a file.

    `tokenizer` is a Hugging Face `tokenizer.json`; without one a token is a raw byte. `validation` is a second file or
    folder to validate on; without one a part of `path` is held out.
    """

    path: str | None = None
    tokenizer: str | None = None
    validation: str | None = None

    def load(self, *, seed: int, vocab: int) -> Source:
        """Read all of it into memory.

        Raises `UserError` for a path that is not there, is not UTF-8 text, or holds no file that validation leaves.
        """
        del seed
        path, own = self.path, self.validation
        if path is None:
            raise UserError("data.path is required for data=text; pass data.path=FILE_OR_FOLDER")
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        if self.tokenizer is None:
            require_vocab("data=text without data.tokenizer has 256 byte values", tokenizer.vocab, vocab)
        else:
            require_vocab(f"data.tokenizer has {tokenizer.vocab} tokens", tokenizer.vocab, vocab)
        paths = find_documents(path, key="data.path")
        if own is None:
            read = _read(paths, path, tokenizer, key="data.path")
            split = hold_out(read.corpus, select_held_out_by_name(read.names), read.names)
        else:
            apart = find_documents(own, key="data.validation")
            # Validation files may lie in a subfolder of the training ones, and must not be trained on.
            withheld = {file.resolve() for file in apart}
            paths = [file for file in paths if file.resolve() not in withheld]
            if not paths:
                raise UserError(f"data.validation={own} holds every file of data.path={path}; give different files")
            read = _read(paths, path, tokenizer, key="data.path")
            held_out = _read(apart, own, tokenizer, key="data.validation")
            split = Split(read.corpus, held_out.corpus, f"data.validation={own}", tuple(held_out.names))
        extra = {"passed over": f"{read.passed_over} files that are not UTF-8 text"} if read.passed_over else {}
        return make_source("text", split, tokenizer, vocab=tokenizer.vocab, sha256=digest(read.corpus), **extra)


class _NamedCorpus(NamedTuple):
    """Documents with a name each, and how many files were passed over because they are not text."""

    corpus: Corpus
    names: list[str]
    passed_over: int


def _read(paths: Sequence[Path], path: str, tokenizer: Tokenizer, *, key: str) -> _NamedCorpus:
    names, documents = [], []
    dtype = dtype_for(tokenizer.vocab)
    for name, content in read_documents(paths, path, key=key):
        names.append(name)
        documents.append(document_ids(tokenizer, content, dtype))
    return _NamedCorpus(concatenate(documents, dtype), names, len(paths) - len(names))
