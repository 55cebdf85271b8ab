"""Data: text files and folders of them."""

import codecs
import dataclasses
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found, check_begin, opened
from moezoo.data.token_files import TokenFiles
from moezoo.errors import UserError

# A longer text file is cut into documents of at most so many bytes: one document is tokenized as a whole.
MOST_TEXT = 2**22


@dataclasses.dataclass(frozen=True)
class Text(FileSettings):
    """UTF-8 text: each file is a document, or one above 4 MiB several. Windows are shuffled."""

    kind: ClassVar[str] = "text"

    @property
    def reader(self) -> str:
        return f"text up to {MOST_TEXT} bytes"

    def documents(self, found: Found) -> Iterator[Document]:
        return read_texts(found)

    def shards(self, read: TokenFiles) -> None:
        # A long file is one document: in the order of documents, all windows of a batch would be parts of it.
        return None

    def describe(self, found: Found, read: TokenFiles) -> dict[str, str]:
        skipped = len(found.paths) - len(set(read.names))
        return {"skipped": describe_skipped(skipped)} if skipped else {}


def read_texts(found: Found) -> Iterator[Document]:
    """Yield each file that is UTF-8 text as a document, or a file above `MOST_TEXT` bytes as several of its name.

    Files that are not UTF-8 are skipped, except one that the user named itself. A mark of UTF-8 at the beginning of a
    file is left out.

    Raises:
        UserError: A file cannot be read or unpacked; the single file is not UTF-8; there is no text.
    """
    empty = True
    for path in found.paths:
        shown, name = found.describe(path), found.name(path)
        with opened(path, shown) as file:
            first = file.read(MOST_TEXT + 1)
            fault = _find_fault(first, file)
            if fault and found.alone:
                check_begin(first, shown)
                raise UserError(f"{shown} is not UTF-8 text: {fault}; convert it to UTF-8")
        # Some binary files, such as files of zeros, decode as UTF-8.
        if fault or (not found.alone and b"\0" in first):
            continue
        text = first.removeprefix(codecs.BOM_UTF8)
        empty &= not text
        if len(first) <= MOST_TEXT:
            yield Document(text, shown, name)
        else:
            with opened(path, shown) as file:
                file.read(len(first) - len(text))
                yield from (Document(part, shown, name) for part in _cut(file))
    if empty:
        files = f"holds no UTF-8 text (files read: {len(found.paths)})"
        what = "is an empty file" if found.alone else files
        raise UserError(f"{found.shown} {what}; give a text file or a folder of them")


def _find_fault(first: bytes, file: BinaryIO) -> str:
    """Return where a file, of which `first` is read, is not UTF-8; empty if it is."""
    decoder, before, part = codecs.getincrementaldecoder("utf-8")(), 0, first
    while part:
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(part)
        except UnicodeDecodeError as error:
            return f"byte {before - pending + error.start} is 0x{error.object[error.start]:02x}"
        before, part = before + len(part), file.read(2**20)
    pending = decoder.getstate()[0]
    return f"byte {before - len(pending)} is 0x{pending[0]:02x}" if pending else ""


def _cut(file: BinaryIO) -> Iterator[bytes]:
    """Yield parts of UTF-8 text, each up to its last line end, or without any to the end of a character."""
    rest = b""
    while part := rest + file.read(MOST_TEXT - len(rest)):
        end = len(part)
        if len(part) == MOST_TEXT:
            end = part.rfind(b"\n") + 1
            if not end:  # then before the last character
                end = len(part)
                while part[end - 1] & 0xC0 == 0x80:
                    end -= 1
                end -= part[end - 1] >= 0xC0
        yield part[:end]
        rest = part[end:]


def describe_skipped(count: int) -> str:
    """Return what is printed about files that `read_texts` has skipped."""
    return f"{count} file{'s that are' if count > 1 else ' that is'} not UTF-8 text"
