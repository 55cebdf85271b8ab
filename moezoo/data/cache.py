"""The ids of documents, kept on disk: text that was tokenized once is mapped into memory by later runs.

An entry is a folder of token files. Its name is a hash of everything that the ids follow from: the bytes of all files,
how documents are read from them, and the tokenizer. A file that changes gives another entry.
"""

import collections
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from moezoo.data.corpus import Corpus, Ids, concatenate
from moezoo.data.documents import Document, Make, all_of_text, describe_nul, tokenize
from moezoo.data.files import Found
from moezoo.data.token_files import hash_documents, read_token_files, verify, write_token_files
from moezoo.data.tokenizer import NO_TOKENS, Bytes, Tokenizer
from moezoo.errors import UserError
from moezoo.host import processors, user_cache
from moezoo.typed import show

# The bytes of text in a shard of the training order; in Parquet a row group is one.
SHARD = 2**26
_FORMAT = 4  # of an entry; another number makes older entries unused


class Kept(NamedTuple):
    """An entry.

    - `corpus`: the documents; their ids stay on disk;
    - `names`: the name of each document, or none;
    - `shards`: the index in the ids at which each shard begins;
    - `sha256`: of all ids and, with one, of the mask;
    - `hashes`: of the content of each document, as `hash_contents` returns them;
    - `about`: what `How.about` returned, with a note of NUL characters.
    """

    corpus: Corpus
    names: list[str]
    shards: Int64[np.ndarray, "shards"]
    sha256: str
    hashes: UInt64[np.ndarray, "documents"]
    about: Mapping[str, Any]


class How(NamedTuple):
    """How text becomes ids.

    - `reader`: what documents are read from the files, and how `make` works, in words;
    - `tokenizer`, `tokenizer_path`: what makes the ids, and its file; None for bytes;
    - `end`: the id at the end of each document; None for none;
    - `dtype`: it holds every id;
    - `make`: makes the ids of a document, and its mask; None for those of all its text;
    - `about`: returns what else is to be known of the documents that were made, as JSON: `notes`, lines for a user;
    - `nothing`: what is wrong, and what to do, where no document has a token;
    - `skips`: whether a document without tokens is left out.
    """

    reader: str
    tokenizer: Tokenizer
    tokenizer_path: Path | None
    end: int | None
    dtype: np.dtype
    make: Make | None = None
    about: Callable[[], Mapping[str, Any]] = dict
    nothing: str = NO_TOKENS
    skips: bool = False


def nothing(dtype: np.dtype) -> Kept:
    """Return what an entry without documents would hold."""
    return Kept(
        concatenate([], dtype), [], np.zeros(1, np.int64), hashlib.sha256().hexdigest(), np.zeros(0, np.uint64), {}
    )


def cache_folder(cache: str) -> Path:
    """Return the folder of entries for the setting `data.cache`, which is made.

    Raises `UserError` if it cannot be written.
    """
    folder = user_cache() / "tokens" if cache == "auto" else Path(os.path.expanduser(cache)).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(
            f"{show(f'data.cache={cache}')}: {show(str(folder))} cannot be written ({error.strerror}); "
            "name a folder for token ids"
        ) from None
    return folder


def kept(folder: Path, found: Found, documents: Iterable[Document], how: How) -> Kept:
    """Return the entry of the files `found` in `folder`; it is made of `documents` if there is none yet.

    Processes that need the same entry wait for the one that makes it.

    Raises:
        UserError: Text cannot be read, or has no tokens; a file changed while it was read; the entry is damaged.
    """
    before = [_state(found, path) for path in found.paths]
    entry = folder / _key(found, how)
    path = entry / "tokens.npy"
    try:
        with _locked(entry):
            if not path.exists():
                _write(path, found, documents, how, before)
    except OSError as error:
        raise UserError(
            f"{show(str(entry))} cannot be written ({error.strerror}); make room, or set data.cache=FOLDER"
        ) from error
    try:
        files = read_token_files(path, key="cache", dtypes=(how.dtype.name,))
        verify(path, files)
        metadata = files.metadata
        shards = np.array(metadata["shards"], np.int64)
        hashes = hash_documents(files.corpus, metadata["sha256"])
        return Kept(files.corpus, list(metadata["names"]), shards, metadata["sha256"], hashes, metadata["about"])
    except (UserError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{show(str(entry))} is damaged; remove this folder, and start again ({error})") from error


def _write(path: Path, found: Found, documents: Iterable[Document], how: How, before: Sequence[object]) -> None:
    for left in path.parent.glob(".*.partial"):  # of a process that was killed
        left.unlink()
    names: list[str] = []
    shards: list[int] = []
    nul = collections.Counter[str]()

    def ids() -> Iterator[Ids]:
        tokens, size, group = 0, 0, None
        for document, made in tokenize(documents, how.make or all_of_text(how.tokenizer, how.dtype, how.end)):
            if not shards or size >= SHARD or document.group != group:
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
        for file, state in zip(found.paths, before, strict=True):
            if _state(found, file) != state:
                raise UserError(f"{found.describe(file)} changed while it was read; start again when it is complete")

    unit = "byte" if isinstance(how.tokenizer, Bytes) else "token"
    about = {"vocab": how.tokenizer.vocab, "unit": unit, "shards": shards, "names": names}

    def further() -> dict[str, Any]:
        found = how.about()
        return {**about, "about": {**found, "notes": [*found.get("notes", ()), *describe_nul(nul)]}}

    write_token_files(path, ids(), how.dtype, further)


def _state(found: Found, path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written."""
    try:
        now = path.stat()
    except OSError as error:
        raise UserError(f"{found.describe(path)} cannot be read ({error.strerror}); make it readable") from error
    return now.st_size, now.st_mtime_ns, now.st_ino


def _key(found: Found, how: How) -> str:
    """Return the name of an entry."""

    def hashed(path: Path) -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{found.describe(path)} cannot be read ({error.strerror}); make it readable") from error

    made_by = "bytes"
    if how.tokenizer_path is not None:
        made_by = f"{importlib.metadata.version('tokenizers')} {hashed(how.tokenizer_path)}"
    facts = [_FORMAT, SHARD, how.reader, made_by, how.end, how.dtype.name]
    with ThreadPoolExecutor(processors()) as pool:
        digests = list(pool.map(hashed, found.paths))
    files = list(zip(map(found.name, found.paths), digests, strict=True))
    return hashlib.sha256(repr((facts, files)).encode(errors="surrogateescape")).hexdigest()[:32]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block; the folder exists meanwhile, and after it if it is not empty."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed since
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            break
        os.close(descriptor)  # the process that had the lock has removed it
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what is not empty stays
            folder.rmdir()
        os.close(descriptor)
