"""Documents of text, and their tokens, made on several threads."""

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from moezoo.data.tokenizer import Tokenizer, document_ids
from moezoo.errors import UserError
from moezoo.host import processors

# About the bytes of text that a thread takes at once.
_TASK = 2**18


class Document(NamedTuple):
    """A document that is read, before it becomes tokens.

    - `text`: UTF-8;
    - `where`: the file, and the line or row, as messages begin;
    - `name`: the name by which it may be held out; empty without one;
    - `group`: the row group that it belongs to; None in files without row groups.
    """

    text: bytes
    where: str
    name: str = ""
    group: int | None = None


class Tokenized(NamedTuple):
    """A document and its token ids [length]."""

    document: Document
    ids: np.ndarray


def tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype, end: int | None = None
) -> Iterator[Tokenized]:
    """Yield documents in order with their ids, as `dtype`; threads make the ids of those that are read next.

    Args:
        documents: What is read; few of them are in memory at once.
        tokenizer: Makes the ids; the library lets other threads run meanwhile.
        dtype: It must hold every id.
        end: The id to append to each document that does not end with it; None for none.

    Raises:
        UserError: The tokenizer refuses a text; the message begins with its place.
    """

    def ids(document: Document) -> Tokenized:
        try:
            found = document_ids(tokenizer, document.text, dtype)
        except UserError as error:
            raise UserError(f"{document.where}: {error}") from error
        if end is not None and (not len(found) or found[-1] != end):
            found = np.append(found, dtype.type(end))
        return Tokenized(document, found)

    def run(task: list[Document]) -> list[Tokenized]:
        return [ids(document) for document in task]

    threads = processors()
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
