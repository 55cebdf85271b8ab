"""Data: text files and folders of them."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from moezoo.data.cache import Kept
from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import MOST_TEXT, Found, describe_skipped, read_texts


@dataclasses.dataclass(frozen=True)
class Text(FileSettings):
    """UTF-8 text: each file is a document, or one above 4 MiB several. Windows are shuffled."""

    kind: ClassVar[str] = "text"

    @property
    def reader(self) -> str:
        return f"text up to {MOST_TEXT} bytes"

    def documents(self, found: Found) -> Iterator[Document]:
        return read_texts(found)

    def shards(self, read: Kept) -> None:
        # A long file is one document: in the order of documents, all windows of a batch would be parts of it.
        return None

    def describe(self, found: Found, read: Kept) -> dict[str, str]:
        skipped = len(found.paths) - len(set(read.names))
        return {"skipped": describe_skipped(skipped)} if skipped else {}
