"""Files of token ids: how they are written, and mapped into memory.

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

import array
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

import moezoo.interrupts as interrupts
from moezoo.data.corpus import Corpus
from moezoo.data.tokenizer import one_line
from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import show

_MAKE = "make the files again with moezoo prepare-data"
_OFFSETS = "the index of each document's first token, then the number of tokens, as int64 [documents + 1]"


def beside(path: Path) -> tuple[Path, Path, Path, Path]:
    """Return the paths of tokens, offsets, metadata and tokenizer."""
    return path, path.with_suffix(".offsets.npy"), path.with_suffix(".json"), path.with_suffix(".tokenizer.json")


def write_token_files(
    path: Path,
    documents: Iterable[np.ndarray],
    dtype: np.dtype,
    about: Callable[[], Mapping[str, Any]],
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write the ids of documents, arrays [length], one after another; the files appear complete or not at all.

    Args:
        path: The file of ids; the others are next to it.
        documents: What is written; one at a time is in memory.
        dtype: Of the documents and of the file.
        about: Returns what NAME.json holds besides sizes and hash; called after the last document.
        tokenizer: A file to copy.

    Returns:
        The contents of NAME.json.
    """
    tokens, offsets, described, copy = beside(path)
    # Files are renamed at the end, the tokens last: if they exist, the others do.
    finals = [file for file in (offsets, described, copy, tokens) if file != copy or tokenizer is not None]
    partial = {file: file.with_name(f".{file.name}.{os.getpid()}.partial") for file in finals}

    def remove() -> None:
        for file in (*partial.values(), *(() if tokens.exists() else finals)):
            file.unlink(missing_ok=True)

    with interrupts.undoing(remove):
        with partial[tokens].open("wb") as file:
            ends, digest = _append_all(file, documents, dtype)
        places = np.array(ends, np.int64)
        with partial[offsets].open("wb") as file:
            np.save(file, places)
        sizes = {"tokens": ends[-1], "documents": len(ends) - 1}
        sums = {"sha256": digest, "offsets_sha256": hashlib.sha256(places.data).hexdigest()}
        metadata = {**about(), **sizes, **sums}
        partial[described].write_text(json.dumps(metadata, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial[copy])
        for file in finals:
            os.replace(partial[file], file)
    return metadata


def _append_all(file: BinaryIO, documents: Iterable[np.ndarray], dtype: np.dtype) -> tuple[array.array, str]:
    """Write an array document by document, so that one is in memory; return offsets and the SHA-256 of the ids."""
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False}
    # The length is known at the end; numpy leaves space in the header for it.
    npy.write_array_header_1_0(file, {**header, "shape": (0,)})
    begin = file.tell()
    ends, digest = array.array("q", [0]), hashlib.sha256()
    for document in documents:
        file.write(document.data)
        digest.update(document.data)
        ends.append(ends[-1] + len(document))
    file.seek(0)
    npy.write_array_header_1_0(file, {**header, "shape": (ends[-1],)})
    assert file.tell() == begin
    return ends, digest.hexdigest()


def verify(path: Path, files: "TokenFiles") -> None:
    """Raise `UserError` unless the ids in `path` and the offsets are those that were written. All of both are read."""
    tokens = files.corpus.tokens
    assert isinstance(tokens, np.memmap)
    # Read, not mapped: mapped pages would count as memory of the process.
    with path.open("rb") as file:
        file.seek(tokens.offset)
        ids = hashlib.file_digest(file, "sha256").hexdigest()
    found = {"sha256": ids, "offsets_sha256": hashlib.sha256(files.corpus.offsets.data).hexdigest()}
    for name, what in (("sha256", "ids"), ("offsets_sha256", "offsets")):
        if files.metadata.get(name) != found[name]:
            raise UserError(f"its {what} are not those that were written")


class TokenFiles(NamedTuple):
    """What token files hold: the documents, which stay on disk, and the contents of NAME.json."""

    corpus: Corpus
    metadata: dict[str, Any]


def read_token_files(path: Path, *, key: str, dtypes: tuple[str, ...] = ("uint16", "uint32")) -> TokenFiles:
    """Map token files into memory; ids have one of `dtypes`. Raises `UserError`, naming `key`, if they are damaged."""
    tokens = _open(path, key=key)
    _, places, described, _ = beside(path)
    if str(tokens.dtype) not in dtypes or tokens.ndim != 1:
        raise UserError(
            f"{key}={path} has dtype {tokens.dtype} and shape {list(tokens.shape)}, "
            f"expected {' or '.join(dtypes)} [tokens]; "
            f"convert it: np.save('{path.name}', ids.reshape(-1).astype(np.uint32))"
        )
    if not len(tokens):
        raise UserError(f"{key}={path} holds no tokens; give a file of token ids")
    if not places.is_file():
        raise UserError(
            f"{key}={path} needs {places.name} next to it: {_OFFSETS}; for one document "
            f"np.save('{places.name}', np.array([0, {len(tokens)}]))"
        )
    offsets = np.asarray(_open(places, key=key))
    if fault := _find_fault(offsets, len(tokens), places.name):
        raise UserError(f"{key}={path}{fault}; it must hold {_OFFSETS}")
    metadata = _read_metadata(described, tokens, key=f"{key}={path}")
    return TokenFiles(Corpus.from_tokens(tokens, offsets), metadata)


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
