"""Data: files of token ids, which stay on disk during training.

`moezoo prepare-data` writes four files; `data=tokens data.path=NAME.npy` reads them:

    NAME.npy               uint16 or uint32 [tokens]: the ids of all documents, joined
    NAME.offsets.npy       int64 [documents + 1]: the index of each document's first token, then the number of tokens
    NAME.json              optional: vocabulary size, unit, SHA-256 of the ids, name of the tokenizer's file
    NAME.tokenizer.json    optional: the Hugging Face tokenizer; absent if each token is a byte

NumPy alone makes such files from int64 ids, here of two documents:

    ids, lengths = np.arange(20_000) % 700, np.full(100, 200)  # int64 ids of 100 documents, and their lengths
    np.save("tokens.npy", ids.astype(np.uint32))
    np.save("tokens.offsets.npy", np.cumsum([0, *lengths]))

Without NAME.json the vocabulary size is the largest id plus 1, and a resumed run cannot check that the data are the
same.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

import moezoo.interrupts as interrupts
from moezoo.data.base import DataSettings
from moezoo.data.corpus import Corpus, Split, hold_out, select_held_out_by_index
from moezoo.data.files import describe_skipped, find_documents, read_documents
from moezoo.data.source import Source, make_source, require_vocab
from moezoo.data.tokenizer import (
    NO_TOKENS,
    Bytes,
    HuggingFace,
    Numbers,
    Tokenizer,
    document_ids,
    one_line,
    text_tokenizer,
)
from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import convert, show

_MAKE = "make the files again with moezoo prepare-data"
_OFFSETS = "the index of each document's first token, then the number of tokens, as int64 [documents + 1]"


@dataclasses.dataclass(frozen=True)
class Tokens(DataSettings):
    """Files of token ids, which stay on disk; `moezoo.data.tokens` describes their format.

    - `path`: the `.npy` file of ids; its `.offsets.npy` file must be next to it;
    - `validation`: a second such file to validate on; None holds out a part of `path`: 1 document in 20 by a hash of
      its index, or the last 5% of the tokens if there are few documents.
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
        corpus, metadata = _read_tokens(path, vocab, key="data.path")
        needed = metadata["vocab"]
        if self.validation is None:
            split = hold_out(corpus, select_held_out_by_index(corpus.documents))
        else:
            other = Path(os.path.expanduser(self.validation))
            validation, its_metadata = _read_tokens(other, vocab, key="data.validation")
            if path.samefile(other):
                raise UserError(f"data.validation={other} is the file data.path; give another, or leave it out")
            needed = max(needed, its_metadata["vocab"])
            split = Split(corpus, validation, f"data.validation={other}")
        extra = {"sha256": metadata["sha256"][:16]} if "sha256" in metadata else {}
        return make_source("tokens", split, _tokenizer(path, metadata), vocab=needed, **extra)

    def tokenizer_file(self) -> Path | None:
        if self.path is None:
            return None
        *_, copy = _beside(Path(os.path.expanduser(self.path)))
        return copy if copy.is_file() else None


def tokenize_files(path: str, out: str, tokenizer: str | None = None) -> str:
    """Write token files from text, and return a line that describes them. Files appear complete or not at all.

    Args:
        path: A text file, or a folder in which each text file is a document.
        out: The `.npy` file to write; the other files are next to it. None of them may exist.
        tokenizer: A Hugging Face `tokenizer.json`; None makes each byte a token.

    Raises:
        UserError: The text or the tokenizer cannot be read, there is no text, or a file to write exists.
    """
    path, out = convert(str, path, "path"), convert(str, out, "out")
    target = Path(os.path.expanduser(out))
    if target.suffix != ".npy":
        raise UserError(f"{show(f'out={out}')} is not the name of a .npy file; write out=NAME.npy")
    for file in _beside(target):
        if os.path.lexists(file):
            raise UserError(f"{show(str(file))} already exists; remove it or write to another name")
    paths = find_documents(path, key="path")
    coder = text_tokenizer(tokenizer, key="tokenizer")
    dtype = np.dtype(np.uint16 if coder.vocab <= 2**16 else np.uint32)
    texts = read_documents(paths, path, key="path")
    copied = None if tokenizer is None else Path(os.path.expanduser(tokenizer))

    def documents() -> Iterator[np.ndarray]:
        tokens = 0
        for _, text in texts:
            ids = document_ids(coder, text, dtype)
            tokens += len(ids)
            yield ids
        if not tokens:
            raise UserError(f"{show(f'path={path}')}: {NO_TOKENS}")

    try:
        metadata = _write(target, documents(), dtype, coder.vocab, copied)
    except OSError as error:
        shown = show(f"out={out}")
        raise UserError(f"{shown} cannot be written ({error.strerror}); name a file in another folder") from error
    written, skipped = metadata["documents"], len(paths) - metadata["documents"]
    line = f"{target}: {metadata['tokens']:,} {metadata['unit']}s in {written:,} documents, {dtype}"
    return line + f"; skipped {describe_skipped(skipped)}" * (skipped > 0)


def _beside(path: Path) -> tuple[Path, Path, Path, Path]:
    """Return the paths of tokens, offsets, metadata and tokenizer."""
    return path, path.with_suffix(".offsets.npy"), path.with_suffix(".json"), path.with_suffix(".tokenizer.json")


def _write(
    path: Path, documents: Iterable[np.ndarray], dtype: np.dtype, vocab: int, tokenizer: Path | None
) -> dict[str, Any]:
    tokens, offsets, described, copy = _beside(path)
    # Files are renamed at the end, the tokens last: if they exist, the others do.
    finals = [file for file in (offsets, described, copy, tokens) if file != copy or tokenizer is not None]
    partial = {file: file.with_name(f".{file.name}.{os.getpid()}.partial") for file in finals}

    def remove() -> None:
        for file in (*partial.values(), *(() if tokens.exists() else finals)):
            file.unlink(missing_ok=True)

    with interrupts.undoing(remove):
        with partial[tokens].open("wb") as file:
            ends, digest = _append_all(file, documents, dtype)
        with partial[offsets].open("wb") as file:
            np.save(file, np.array(ends, np.int64))
        metadata = {
            "vocab": vocab,
            "unit": "byte" if tokenizer is None else "token",
            "tokens": ends[-1],
            "documents": len(ends) - 1,
            "sha256": digest,
            "tokenizer": None if tokenizer is None else tokenizer.name,
        }
        partial[described].write_text(json.dumps(metadata, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial[copy])
        for file in finals:
            os.replace(partial[file], file)
    return metadata


def _append_all(file: BinaryIO, documents: Iterable[np.ndarray], dtype: np.dtype) -> tuple[list[int], str]:
    """Write an array document by document, so that one is in memory; return offsets and the SHA-256 of the ids."""
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False}
    # The length is known at the end; numpy leaves space in the header for it.
    npy.write_array_header_1_0(file, {**header, "shape": (0,)})
    begin = file.tell()
    ends, digest = [0], hashlib.sha256()
    for document in documents:
        file.write(document.data)
        digest.update(document.data)
        ends.append(ends[-1] + len(document))
    file.seek(0)
    npy.write_array_header_1_0(file, {**header, "shape": (ends[-1],)})
    assert file.tell() == begin
    return ends, digest.hexdigest()


def _read_tokens(path: Path, vocab: int, *, key: str) -> tuple[Corpus, dict[str, Any]]:
    tokens = _open(path, key=key)
    _, beside, described, _ = _beside(path)
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1:
        raise UserError(
            f"{key}={path} has dtype {tokens.dtype} and shape {list(tokens.shape)}, expected uint16 or uint32 [tokens]"
            f"; convert it: np.save('{path.name}', ids.reshape(-1).astype(np.uint32))"
        )
    if not len(tokens):
        raise UserError(f"{key}={path} holds no tokens; give a file of token ids")
    if not beside.is_file():
        raise UserError(
            f"{key}={path} needs {beside.name} next to it: {_OFFSETS}; for one document "
            f"np.save('{beside.name}', np.array([0, {len(tokens)}]))"
        )
    offsets = np.asarray(_open(beside, key=key))
    if fault := _find_fault(offsets, len(tokens), beside.name):
        raise UserError(f"{key}={path}{fault}; it must hold {_OFFSETS}")
    metadata = _read_metadata(described, tokens, key=f"{key}={path}")
    needed = metadata["vocab"]
    require_vocab(f"{key}={path} has a vocabulary of {needed} tokens", needed, vocab)
    return Corpus.from_tokens(tokens, offsets), metadata


def _find_fault(offsets: np.ndarray, tokens: int, name: str) -> str:
    """Return what is wrong with the offsets in the file `name`, after the file of tokens; empty if nothing is."""
    if offsets.dtype != np.int64 or offsets.ndim != 1:
        return f": {name} has dtype {offsets.dtype} and shape {list(offsets.shape)}"
    first, last = (offsets[0], offsets[-1]) if len(offsets) else (0, 0)
    if (first, last) != (0, tokens):
        return f" has {tokens} tokens but {name} goes from {first} to {last}"
    falls = np.diff(offsets)
    return f": {name} decreases at document {falls.argmin()}" if (falls < 0).any() else ""


def _open(path: Path, *, key: str) -> np.ndarray:
    shown, give = show(f"{key}={path}"), "give a .npy file of token ids, made by moezoo prepare-data"
    if not check_file(path, shown, give):
        raise UserError(f"{shown} is an empty file; {give}")
    try:
        with np.errstate(over="ignore"):  # of a damaged shape
            return npy.open_memmap(path, mode="r")
    # NumPy reads the header as Python: a damaged one raises many errors.
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise UserError(f"{shown} cannot be read as a .npy array ({one_line(error)}); {_MAKE}") from error


def _read_metadata(path: Path, tokens: np.ndarray, *, key: str) -> dict[str, Any]:
    if not path.is_file():  # another program made the tokens
        return {"vocab": 1 + int(tokens.max(initial=0)), "unit": "token"}
    try:
        metadata = json.loads(path.read_text())
        vocab, unit, digest = metadata["vocab"], metadata["unit"], metadata["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{key}: {path.name} is damaged ({one_line(error)}); {_MAKE}") from error
    if not (type(vocab) is int and 0 < vocab <= 2**32 and unit in ("byte", "token") and isinstance(digest, str)):
        raise UserError(f"{key}: {path.name} has vocab={vocab!r}, unit={unit!r}; {_MAKE}")
    return metadata


def _tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    *_, copy = _beside(path)
    if metadata["unit"] == "byte":
        return Bytes()
    return HuggingFace(copy, key=f"data.path={path}: tokenizer") if copy.is_file() else Numbers(metadata["vocab"])
