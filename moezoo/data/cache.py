"""The ids of documents, kept on disk: text that was tokenized once is mapped into memory by later runs.

An entry is a folder of token files. Its name is a hash of everything that the ids follow from: the bytes of all files,
how documents are read from them, and the tokenizer. A file that changes gives another entry.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moezoo.data.documents import Document, How
from moezoo.data.files import Found
from moezoo.data.token_files import Read, TokenFiles, read_token_files, write_documents
from moezoo.errors import UserError
from moezoo.host import processors, user_cache
from moezoo.typed import show

# The bytes of text in a shard of the training order; in Parquet a row group is one.
SHARD = 2**26
_FORMAT = 4  # of an entry; another number makes older entries unused


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


def kept(folder: Path, found: Found, documents: Iterable[Document], how: How) -> TokenFiles:
    """Return the entry of the files `found` in `folder`; it is made of `documents` if there is none yet.

    Processes that need the same entry wait for the one that makes it.

    Raises:
        UserError: Text cannot be read, or has no tokens; a file changed while it was read; the entry is damaged.
    """
    before = [_state(found, path) for path in found.paths]
    entry = folder / _key(found, how)
    path = entry / "tokens.npy"

    def unchanged() -> Iterator[Document]:
        yield from documents
        for file, state in zip(found.paths, before, strict=True):
            if _state(found, file) != state:
                raise UserError(f"{found.describe(file)} changed while it was read; start again when it is complete")

    def describe(read: Read) -> dict[str, Any]:
        about = how.about()
        about = {**about, "notes": [*about.get("notes", ()), *read.notes]}
        return {"shards": read.shards, "names": read.names, "about": about}

    try:
        with _locked(entry):
            if not path.exists():
                for left in entry.glob(".*.partial"):  # of a process that was killed
                    left.unlink()
                write_documents(path, found, unchanged(), how, SHARD, describe)
    except OSError as error:
        raise UserError(
            f"{show(str(entry))} cannot be written ({error.strerror}); make room, or set data.cache=FOLDER"
        ) from error
    try:
        files = read_token_files(path, key="cache", is_known=False)
        if files.corpus.tokens.dtype != how.dtype or not files.metadata.keys() >= {"shards", "names", "about"}:
            raise UserError("it is not what was written")
        return files
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{show(str(entry))} is damaged; remove this folder, and start again ({error})") from error


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
