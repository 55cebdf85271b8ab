"""Files of token ids: how they are written, and mapped into memory. The cache of ids has the same files.

    NAME.npy               uint8, uint16 or uint32 [tokens]: the ids of all documents, joined
    NAME.offsets.npy       int64 [documents + 1]: the index of each document's first token, then the number of tokens
    NAME.mask.npy          optional: bool [tokens]: whether a token is predicted; absent if all are
    NAME.json              optional: vocabulary size, unit, SHA-256 of ids and mask, name of the tokenizer's file, and
                           with a mask the number of tokens that are predicted; in the cache also the index at which
                           each shard begins, the names of documents, and notes about them
    NAME.tokenizer.json    optional: the Hugging Face tokenizer; absent if each token is a byte

NumPy alone makes such files from int64 ids, here of two documents:

    ids, lengths = np.arange(20_000) % 699, np.full(100, 200)  # int64 ids of 100 documents, and their lengths
    np.save("tokens.npy", ids.astype(np.uint32))
    np.save("tokens.offsets.npy", np.cumsum([0, *lengths]))

Without NAME.json the vocabulary size is the largest id plus 1.
"""

import array
import collections
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64
from numpy.lib import format as npy

import moezoo.interrupts as interrupts
from moezoo.data.corpus import Corpus, Ids, concatenate
from moezoo.data.documents import Document, How, all_of_text, describe_nul, tokenize
from moezoo.data.files import Found
from moezoo.data.held_out import hash_contents
from moezoo.data.tokenizer import Bytes, one_line
from moezoo.errors import UserError
from moezoo.host import check_file, user_cache
from moezoo.typed import show

_MAKE = "make the files again with moezoo prepare-data"
# Hashes of files from this size on are kept. The time of a file says that it is unchanged only when it is older than
# this: what a program writes into a mapped file can reach the disk, and its time, much later.
_KEPT_BYTES, _SETTLED_SECONDS = 2**26, 600
_DTYPES = ("uint8", "uint16", "uint32")
_PREDICTED = "predicted"  # the key of NAME.json that belongs to a mask
_OFFSETS = "the index of each document's first token, then the number of tokens, as int64 [documents + 1]"


class Beside(NamedTuple):
    """The paths of token files."""

    tokens: Path
    offsets: Path
    mask: Path
    metadata: Path
    tokenizer: Path


def beside(path: Path) -> Beside:
    """Return the paths of the files that belong to the ids in the file `path`."""
    suffixes = (".offsets.npy", ".mask.npy", ".json", ".tokenizer.json")
    return Beside(path, *map(path.with_suffix, suffixes))


class Read(NamedTuple):
    """What is known of documents once they are read, besides their tokens.

    - `names`: the name of each document, or none;
    - `shards`: the index in the ids at which each shard begins;
    - `notes`: lines about NUL characters.
    """

    names: list[str]
    shards: list[int]
    notes: list[str]


def write_documents(
    path: Path,
    found: Found,
    documents: Iterable[Document],
    how: How,
    shard: int,
    describe: Callable[[Read], Mapping[str, Any]],
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write the documents of files as token files, and return the contents of NAME.json.

    Args:
        path: The file of ids; the others are next to it.
        found: The files.
        documents: Those of the files; few of them are in memory at once.
        how: How they become ids.
        shard: The bytes of text in a shard; a group of documents is one too.
        describe: Returns what NAME.json holds besides vocabulary, unit, sizes and hashes; called after the last
            document.
        tokenizer: A file to copy.

    Raises:
        UserError: Text cannot be read, or has no tokens.
    """
    names: list[str] = []
    shards: list[int] = []
    nul = collections.Counter[str]()

    def ids() -> Iterator[Ids]:
        tokens, size, group = 0, 0, None
        for document, made in tokenize(documents, how.make or all_of_text(how.tokenizer, how.dtype, how.end)):
            if not shards or size >= shard or document.group != group:
                shards.append(tokens)
                size, group = 0, document.group
            size += len(document.text)
            tokens += len(made.ids)
            if count := document.text.count(b"\0"):
                nul[document.where] += count
            if how.skips and not len(made.ids):
                continue
            if document.name:
                names.append(document.name)
            yield made
        if not shards:
            raise UserError(f"{found.shown}: there is no document; name files that have some")
        if not tokens:
            how.about()  # may know why
            raise UserError(f"{found.shown}: {how.nothing}")

    base = {"vocab": how.tokenizer.vocab, "unit": "byte" if isinstance(how.tokenizer, Bytes) else "token"}
    about = lambda: {**base, **describe(Read(names, shards, describe_nul(nul)))}  # noqa: E731
    return write_token_files(path, ids(), how.dtype, about, tokenizer)


def write_token_files(
    path: Path,
    documents: Iterable[Ids],
    dtype: np.dtype,
    about: Callable[[], Mapping[str, Any]],
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write documents one after another; the files appear complete or not at all.

    Args:
        path: The file of ids; the others are next to it.
        documents: What is written; one at a time is in memory.
        dtype: Of all ids.
        about: Returns what NAME.json holds besides sizes and hash; called after the last document.
        tokenizer: A file to copy.

    Returns:
        The contents of NAME.json.
    """
    files = beside(path)
    # Files are renamed at the end, the tokens last: if they exist, the others do.
    partial = {file: file.with_name(f".{file.name}.{os.getpid()}.partial") for file in (*files[1:], path)}

    def remove() -> None:
        for file in (*partial.values(), *(() if path.exists() else partial)):
            file.unlink(missing_ok=True)

    with interrupts.undoing(remove):
        with contextlib.ExitStack() as opened:
            ids = _Growing(opened.enter_context(partial[path].open("wb")), dtype)
            mask, ends, predicted = None, array.array("q", [0]), 0
            for document in documents:
                ids.append(document.ids)
                ends.append(ids.length)
                if document.mask is not None:
                    if mask is None:
                        mask = _Growing(opened.enter_context(partial[files.mask].open("wb")), np.dtype(bool))
                    mask.append(document.mask)
                    predicted += int(document.mask.sum())
            assert mask is None or mask.length == ids.length, "a document without a mask among others with one"
            digest = _digest(ids.finish(), None if mask is None else mask.finish())
        places = np.array(ends, np.int64)
        with partial[files.offsets].open("wb") as file:
            np.save(file, places)
        sizes: dict[str, Any] = {"tokens": ends[-1], "documents": len(ends) - 1}
        sums = {"sha256": digest, "offsets_sha256": hashlib.sha256(places.data).hexdigest()}
        metadata = {**about(), **sizes, **sums, **({} if mask is None else {_PREDICTED: predicted})}
        partial[files.metadata].write_text(json.dumps(metadata, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial[files.tokenizer])
        for file, written in partial.items():
            if written.exists():
                os.replace(written, file)
    return metadata


class _Growing:
    """A `.npy` file of one dimension, written part by part, so that one is in memory."""

    def __init__(self, file: BinaryIO, dtype: np.dtype):
        self.length, self._file, self._digest = 0, file, hashlib.sha256()
        self._header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False}
        # The length is known at the end; numpy leaves space in the header for it.
        npy.write_array_header_1_0(file, {**self._header, "shape": (0,)})
        self._begin = file.tell()

    def append(self, part: np.ndarray) -> None:
        """Write `part` [length], of the dtype of the file."""
        self._file.write(part.data)
        self._digest.update(part.data)
        self.length += len(part)

    def finish(self) -> str:
        """Write the length; return the SHA-256 of all parts."""
        self._file.seek(0)
        npy.write_array_header_1_0(self._file, {**self._header, "shape": (self.length,)})
        assert self._file.tell() == self._begin
        return self._digest.hexdigest()


def _digest(ids: str, mask: str | None) -> str:
    """Return the SHA-256 of ids and mask from that of each."""
    return ids if mask is None else hashlib.sha256(f"{ids} {mask}".encode()).hexdigest()


def _hash_ids(path: Path, corpus: Corpus, *, is_known: bool) -> str:
    """Return the SHA-256 of the ids in the file `path` and of the mask, as NAME.json has it, from the files themselves.

    Where `is_known`, that of a large file that is unchanged since it was last read is taken from the user's cache.
    """

    def digest(array: np.ndarray, path: Path) -> str:
        assert isinstance(array, np.memmap)
        # Read, not mapped: mapped pages would count as memory of the process.
        with path.open("rb") as file:
            file.seek(array.offset)
            state = os.fstat(file.fileno())
            entry = _kept_hash(path, state) if is_known and state.st_size >= _KEPT_BYTES else None
            with contextlib.suppress(OSError):
                if entry and len(kept := entry.read_text()) == hashlib.sha256().digest_size * 2:
                    return kept
            found, after = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno())
        if entry and _kept_hash(path, after) == entry:
            _keep(entry, lambda file: file.write(found.encode()))
        return found

    mask = None if corpus.mask is None else digest(corpus.mask, beside(path).mask)
    return _digest(digest(corpus.tokens, path), mask)


def _kept_hash(path: Path, state: os.stat_result) -> Path | None:
    """Return the file with the hash of a file in this state; None where its times do not show whether it changes."""
    if time.time() - max(state.st_mtime, state.st_ctime) < _SETTLED_SECONDS:
        return None
    facts = (path.resolve(), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    with contextlib.suppress(UserError):  # a user without a home folder
        return user_cache() / "hashes" / hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()[:32]


def hash_documents(corpus: Corpus, sha256: str) -> UInt64[np.ndarray, "documents"]:
    """Return `hash_contents` of token files, of which `sha256` is that of ids and mask.

    Those of a large file are kept in the user's cache: a later run reads none of it.
    """
    entry = None
    if corpus.tokens.nbytes >= _KEPT_BYTES:
        facts = f"{sha256} {corpus.tokens.dtype} {hashlib.sha256(corpus.offsets.data).hexdigest()}"
        with contextlib.suppress(UserError):  # a user without a home folder
            entry = user_cache() / "hashes" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npy"
    if entry:
        with contextlib.suppress(OSError, ValueError, EOFError):
            kept = np.load(entry)
            if kept.dtype == np.uint64 and kept.shape == corpus.starts.shape:
                return kept
    found = hash_contents(corpus)
    if entry:
        _keep(entry, lambda file: np.save(file, found))
    return found


def _keep(entry: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` make a file of the user's cache, which appears complete or not at all."""
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        entry.parent.mkdir(parents=True, exist_ok=True)
        with (new := entry.with_suffix(f".{os.getpid()}.partial")).open("wb") as file:
            write(file)
        os.replace(new, entry)


class TokenFiles(NamedTuple):
    """What token files hold.

    - `corpus`: the documents; their ids stay on disk;
    - `metadata`: the contents of NAME.json;
    - `sha256`: of all ids and, with one, of the mask;
    - `hashes`: of the content of each document, as `hash_contents` returns them.
    """

    corpus: Corpus
    metadata: Mapping[str, Any]
    sha256: str
    hashes: UInt64[np.ndarray, "documents"]

    @property
    def names(self) -> list[str]:
        """The name of each document, or none."""
        return self.metadata["names"]

    @property
    def shards(self) -> Int64[np.ndarray, "shards"]:
        """The index in the ids at which each shard begins."""
        return np.array(self.metadata["shards"], np.int64)

    @property
    def about(self) -> Mapping[str, Any]:
        """What `How.about` returned, with a note of NUL characters."""
        return self.metadata["about"]


def nothing(dtype: np.dtype) -> TokenFiles:
    """Return what token files without documents would hold."""
    metadata = {"names": [], "shards": [0], "about": {}}
    return TokenFiles(concatenate([], dtype), metadata, hashlib.sha256().hexdigest(), np.zeros(0, np.uint64))


def read_token_files(
    path: Path,
    *,
    key: str,
    check: Callable[[Mapping[str, Any]], object] | None = None,
    is_known: bool = True,
) -> TokenFiles:
    """Map token files into memory.

    Args:
        path: The file of ids.
        key: The user's name of the setting.
        check: Called with the contents of NAME.json, which it may refuse, before large files are read for their hash.
        is_known: Whether the hash of a large file that has not changed may be one that is kept, and the files may have
            been edited since they were written.

    Raises:
        UserError: The files, named by `key`, are damaged.
    """
    tokens, files = _open(path, key=key), beside(path)
    places = files.offsets
    if str(tokens.dtype) not in _DTYPES or tokens.ndim != 1:
        raise UserError(
            f"{key}={path} has dtype {tokens.dtype} and shape {list(tokens.shape)}, "
            "expected uint8, uint16 or uint32 [tokens]; "
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
    metadata = _read_metadata(files.metadata, tokens, key=f"{key}={path}")
    mask = _read_mask(files, tokens, metadata, key=key)
    if check is not None:
        check(metadata)
    corpus = Corpus.from_tokens(tokens, offsets, mask)
    sha256 = _hash_ids(path, corpus, is_known=is_known)
    if not is_known:
        found = {"sha256": sha256, "offsets_sha256": hashlib.sha256(offsets.data).hexdigest()}
        for name, what in (("sha256", "ids" if mask is None else "ids or its mask"), ("offsets_sha256", "offsets")):
            if metadata.get(name) != found[name]:
                raise UserError(f"its {what} are not those that were written")
    return TokenFiles(corpus, metadata, sha256, hash_documents(corpus, sha256))


def _read_mask(files: Beside, tokens: np.ndarray, metadata: dict[str, Any], *, key: str) -> np.ndarray | None:
    """Map the mask into memory, if there is one. Raises `UserError` where it does not belong to the other files."""
    shown, name, described = f"{key}={files.tokens}", files.mask.name, files.metadata.name
    if not files.mask.is_file():
        if _PREDICTED in metadata:
            raise UserError(f"{shown} needs {name} next to it: {described} says that not all tokens are predicted")
        return None
    mask = _open(files.mask, key=key)
    if mask.dtype != np.bool_ or mask.shape != tokens.shape:
        raise UserError(
            f"{shown}: {name} has dtype {mask.dtype} and shape {list(mask.shape)}, expected bool [{len(tokens)}]: "
            "whether each token is predicted"
        )
    if _PREDICTED not in metadata and files.metadata.is_file():
        raise UserError(f"{shown}: {name} is not of the data in {described}; remove one of the two files")
    return mask


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
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, MemoryError, TokenError) as error:
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
