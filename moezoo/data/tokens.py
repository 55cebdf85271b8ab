"""Data: files of token ids, which stay on disk during training. `moezoo prepare-data` writes them."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moezoo.data.base import HeldOutSettings
from moezoo.data.corpus import Ids
from moezoo.data.documents import all_of_text, tokenize
from moezoo.data.files import find_files
from moezoo.data.held_out import hold_out, own_validation
from moezoo.data.jsonl import Jsonl
from moezoo.data.records import SUFFIXES
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.text import describe_skipped, read_texts
from moezoo.data.token_files import TokenFiles, beside, hash_documents, hash_ids, read_token_files, write_token_files
from moezoo.data.tokenizer import NO_TOKENS, Bytes, HuggingFace, Numbers, Tokenizer, text_tokenizer
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
        corpus, metadata = _read(path, vocab, key="data.path")
        needed = metadata["vocab"]
        # Not that of NAME.json: the ids may have been edited since.
        sha256 = hash_ids(path, corpus)
        hashes = hash_documents(corpus, sha256)
        if self.validation is None:
            split = hold_out(corpus, self.held_out, hashes=hashes)
        else:
            other = Path(os.path.expanduser(self.validation))
            validation, its_metadata = _read(other, vocab, key="data.validation")
            if path.samefile(other):
                raise UserError(f"data.validation={other} is the file data.path; give another, or leave it out")
            needed = max(needed, its_metadata["vocab"])
            its_hashes = hash_documents(validation, hash_ids(other, validation))
            how = f"data.validation={other}"
            split = own_validation(corpus, validation, how, hashes=(hashes, its_hashes))
        return make_source("tokens", split, _tokenizer(path, metadata), vocab=needed, sha256=sha256[:16])

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
    dtype = np.dtype(np.uint16 if coder.vocab <= 2**16 else np.uint32)
    copied = None if tokenizer is None else Path(os.path.expanduser(tokenizer))
    names: set[str] = set()

    def documents() -> Iterator[Ids]:
        tokens = 0
        for document, made in tokenize(texts, all_of_text(coder, dtype)):
            names.add(document.name)
            tokens += len(made.ids)
            yield made
        if not tokens:
            raise UserError(f"{found.shown}: {NO_TOKENS}")

    unit = "byte" if tokenizer is None else "token"
    about = {"vocab": coder.vocab, "unit": unit, "tokenizer": None if copied is None else copied.name}
    try:
        metadata = write_token_files(target, documents(), dtype, lambda: about, copied)
    except OSError as error:
        shown = show(f"out={out}")
        raise UserError(f"{shown} cannot be written ({error.strerror}); name a file in another folder") from error
    skipped = 0 if field is not None else len(found.paths) - len(names)
    line = f"{target}: {metadata['tokens']:,} {unit}s in {metadata['documents']:,} documents, {dtype}"
    return line + f"; skipped {describe_skipped(skipped)}" * (skipped > 0)


def _read(path: Path, vocab: int, *, key: str) -> TokenFiles:
    files = read_token_files(path, key=key)
    needed = files.metadata["vocab"]
    require_vocab(f"{key}={path} has a vocabulary of {needed} tokens", needed, vocab)
    return files


def _tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    copy = beside(path).tokenizer
    if metadata["unit"] == "byte":
        return Bytes()
    return (
        HuggingFace(copy, key=f"data.path={path}: tokenizer")
        if copy.is_file()
        else Numbers(metadata["vocab"], f"data.path={path}")
    )
