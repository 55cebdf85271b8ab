"""Documents of text, and their tokens, made on several threads."""

import collections
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moezoo.data.corpus import Ids
from moezoo.data.tokenizer import NO_TOKENS, Tokenizer, document_ids
from moezoo.errors import locating
from moezoo.host import processors

# About the bytes of text that a thread takes at once.
_TASK = 2**18


class Document(NamedTuple):
    """A document that is read, before it becomes tokens.

    - `text`: UTF-8;
    - `where`: the file, and the line or row, as messages begin;
    - `name`: the name by which it may be held out; empty without one;
    - `group`: the row group that it belongs to; None in files without row groups;
    - `turn`: the number, from 0, of the message that is trained, in a chat that is several documents; None in others;
    - `container`: what the file is, as `moezoo.data.records` names it; empty for text.
    """

    text: bytes
    where: str
    name: str = ""
    group: int | None = None
    turn: int | None = None
    container: str = ""


class Tokenized(NamedTuple):
    """A document, and the same as tokens."""

    document: Document
    made: Ids


Make = Callable[[Document], Ids]


def all_of_text(tokenizer: Tokenizer, dtype: np.dtype, end: int | None = None) -> Make:
    """Return what makes the ids of a document, as `dtype`, of all its text. Every token is predicted.

    Args:
        tokenizer: Makes the ids; the library lets other threads run meanwhile.
        dtype: It must hold every id.
        end: The id to append to each document that does not end with it; None for none.
    """

    def make(document: Document) -> Ids:
        ids = document_ids(tokenizer, document.text, dtype)
        if end is not None and (not len(ids) or ids[-1] != end):
            ids = np.append(ids, dtype.type(end))
        return Ids(ids)

    return make


class How(NamedTuple):
    """How text becomes ids.

    - `reader`: what documents are read from the files, and how `make` works, in words;
    - `tokenizer`, `tokenizer_path`: what makes the ids, and its file; None for bytes;
    - `dtype`: it holds every id;
    - `end`: the id at the end of each document; None for none;
    - `make`: makes the ids of a document, and its mask; None for those of all its text;
    - `about`: returns what else is to be known of the documents that were made, as JSON: `notes`, lines for a user;
    - `nothing`: what is wrong, and what to do, where no document has a token;
    - `skips`: whether a document without tokens is left out.
    """

    reader: str
    tokenizer: Tokenizer
    tokenizer_path: Path | None
    dtype: np.dtype
    end: int | None = None
    make: Make | None = None
    about: Callable[[], Mapping[str, Any]] = dict
    nothing: str = NO_TOKENS
    skips: bool = False


def describe_nul(counts: Mapping[str, int]) -> list[str]:
    """Return a line about NUL characters, which text has by mistake; none without any. `counts`: by document."""
    found = {where: count for where, count in counts.items() if count}
    if not found:
        return []
    total, first = sum(found.values()), min(found, key=lambda where: (len(where), where))
    many, documents = "s" * (total > 1), f"{len(found):,} document{'s' * (len(found) > 1)}"
    return [f"{total:,} NUL character{many} in {documents}, such as {first}; they are trained on like others"]


def tokenize(documents: Iterable[Document], make: Make) -> Iterator[Tokenized]:
    """Yield documents in order with their ids; threads make the ids of those that are read next.

    Args:
        documents: What is read; few of them are in memory at once.
        make: Makes the ids, and the mask, of a document.

    Raises:
        UserError: `make` refuses a document; the message begins with its place.
    """

    def tokens(document: Document) -> Tokenized:
        with locating(document.where):
            return Tokenized(document, make(document))

    def run(task: list[Document]) -> list[Tokenized]:
        return [tokens(document) for document in task if not over.is_set()]

    threads, over = processors(), threading.Event()
    with ThreadPoolExecutor(threads, "tokenize") as pool:
        pending: collections.deque[Future[list[Tokenized]]] = collections.deque()
        try:
            for task in _tasks(documents):
                pending.append(pool.submit(run, task))
                if len(pending) > 2 * threads:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            over.set()  # leaving the block waits for tasks that run, and a template may take long for each chat
            for future in pending:
                future.cancel()


def _tasks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    task, size = [], 0
    for document in documents:
        task.append(document)
        size += len(document.text)
        if size >= _TASK:
            yield task
            task, size = [], 0
    if task:
        yield task
