"""Data: files of token ids, which stay on disk during training. `moezoo prepare-data` writes them."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moezoo.data.base import HeldOutSettings
from moezoo.data.corpus import dtype_for
from moezoo.data.documents import How
from moezoo.data.files import find_files
from moezoo.data.held_out import hold_out, own_validation
from moezoo.data.jsonl import Jsonl
from moezoo.data.records import SUFFIXES
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.text import describe_skipped, read_texts
from moezoo.data.token_files import Read, TokenFiles, beside, read_token_files, write_documents
from moezoo.data.tokenizer import Bytes, HuggingFace, Numbers, Tokenizer, text_tokenizer
from moezoo.errors import UserError
from moezoo.typed import convert, show


@dataclasses.dataclass(frozen=True)
class Tokens(HeldOutSettings):
    """Files of token ids, which stay on disk; `moezoo.data.token_files` describes their format.

    - `path`: the `.npy` file of ids; its `.offsets.npy` file must be next to it;
    - `validation`: a second such file to validate on; None holds out a part of `path`.
    """

    path: str | None = None
    validation: str | None = None

    def load(self, *, seed: int, vocab: int) -> Source:
        """Map the files into memory.

        Raises:
            UserError: A file is missing, damaged or has another dtype, or files do not belong together.
        """
        del seed
        if self.path is None:
            raise UserError(
                "data.path is required for data=tokens; pass data.path=FILE.npy, made by moezoo prepare-data"
            )
        path = Path(os.path.expanduser(self.path))
        read = _read(path, vocab, key="data.path")
        needed = read.metadata["vocab"]
        if self.validation is None:
            split = hold_out(read.corpus, self.held_out, hashes=read.hashes)
        else:
            other = Path(os.path.expanduser(self.validation))
            if other.exists() and path.samefile(other):
                raise UserError(f"data.validation={other} is the file data.path; give another, or leave it out")
            apart = _read(other, vocab, key="data.validation")
            needed = max(needed, apart.metadata["vocab"])
            hashes = read.hashes, apart.hashes
            split = own_validation(read.corpus, apart.corpus, f"data.validation={other}", hashes=hashes)
        # The hash is not that of NAME.json: the ids may have been edited since.
        return make_source("tokens", split, _tokenizer(path, read.metadata), vocab=needed, sha256=read.sha256[:16])

    @property
    def has_own_validation(self) -> bool:
        return self.validation is not None

    def tokenizer_file(self) -> Path | None:
        if self.path is None:
            return None
        copy = beside(Path(os.path.expanduser(self.path))).tokenizer
        return copy if copy.is_file() else None


def tokenize_files(path: str, out: str, tokenizer: str | None = None, field: str | None = None) -> str:
    """Write token files from text, and return a line that describes them. Files appear complete or not at all.

    Args:
        path: A text file, a folder in which each text file is a document, or a pattern of such files.
        out: The `.npy` file to write; the other files are next to it. None of them may exist.
        tokenizer: A Hugging Face `tokenizer.json`; None makes each byte a token.
        field: The key or column of the text in files of records, as `moezoo.data.Jsonl` reads them; None for files
            of text.

    Raises:
        UserError: The text or the tokenizer cannot be read, there is no text, or a file to write exists.
    """
    path, out = convert(str, path, "path"), convert(str, out, "out")
    target = Path(os.path.expanduser(out))
    if target.suffix != ".npy":
        raise UserError(f"{show(f'out={out}')} is not the name of a .npy file; write out=NAME.npy")
    for file in beside(target):
        if os.path.lexists(file):
            raise UserError(f"{show(str(file))} already exists; remove it or write to another name")
    found = find_files(path, key="path", suffixes=() if field is None else SUFFIXES)
    texts = read_texts(found) if field is None else Jsonl(field=field).documents(found)
    coder = text_tokenizer(tokenizer, key="tokenizer")
    dtype = np.promote_types(np.uint16, dtype_for(coder.vocab))
    copied = None if tokenizer is None else Path(os.path.expanduser(tokenizer))
    how = How("", coder, copied, dtype)
    names: set[str] = set()

    def describe(read: Read) -> dict[str, str | None]:
        names.update(read.names)
        return {"tokenizer": None if copied is None else copied.name}

    unit = "byte" if tokenizer is None else "token"
    try:
        metadata = write_documents(target, found, texts, how, sys.maxsize, describe, copied)
    except OSError as error:
        shown = show(f"out={out}")
        raise UserError(f"{shown} cannot be written ({error.strerror}); name a file in another folder") from error
    skipped = 0 if field is not None else len(found.paths) - len(names)
    line = f"{target}: {metadata['tokens']:,} {unit}s in {metadata['documents']:,} documents, {dtype}"
    return line + f"; skipped {describe_skipped(skipped)}" * (skipped > 0)


def _read(path: Path, vocab: int, *, key: str) -> TokenFiles:
    def check(metadata: Mapping[str, Any]) -> None:
        needed = metadata["vocab"]
        require_vocab(f"{key}={path} has a vocabulary of {needed} tokens", needed, vocab)

    return read_token_files(path, key=key, check=check)


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    copy = beside(path).tokenizer
    if metadata["unit"] == "byte":
        return Bytes()
    return (
        HuggingFace(copy, key=f"data.path={path}: tokenizer")
        if copy.is_file()
        else Numbers(metadata["vocab"], f"data.path={path}")
    )
