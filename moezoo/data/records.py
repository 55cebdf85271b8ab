"""Records, JSON values, of files of several kinds. What a file is follows from its content, not from its name."""

import codecs
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from moezoo.data.arrow import Choose, read_rows
from moezoo.data.documents import Document
from moezoo.data.files import Found, check_begin, opened
from moezoo.data.json_values import is_array, read_values
from moezoo.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
MOST_LINE = 2**28  # bytes
LINES, ARRAY, VALUES, PARQUET, ARROW = "JSON lines", "a JSON array", "JSON values", "Parquet", "Arrow"


def all_columns(names: Sequence[str]) -> Sequence[str]:
    """Choose all columns of a table."""
    return names


def read_records(
    found: Found, choose: Choose = all_columns, only: str | None = None, *, chats: bool = False
) -> Iterator[Document]:
    """Yield the records of all files: JSON text, its place, and as `container` what the file is.

    A file has JSON lines, JSON objects over several lines, one JSON array, or a table, packed or not. In memory at once
    are a record of JSON, or a few hundred rows of a table, and what is read ahead.

    Args:
        found: The files.
        choose: Chooses the columns to read of tables, whose rows are records.
        only: What every file must be; None for any of these.
        chats: Whether a list of messages is a record.

    Raises:
        UserError: A file cannot be read, is of another kind, or is damaged.
    """
    groups = itertools.count()
    for path in found.paths:
        shown = found.describe(path)
        kind = _find_kind(path, shown, chats=chats)
        if only is not None and kind != only:
            raise UserError(
                f"{shown} is no {only} file; copy it again, or choose data=jsonl, which reads JSON and Arrow too"
            )
        with opened(path, shown) as file:
            where = shown if kind in (LINES, VALUES) else f"{shown} ({kind})"
            if kind in (PARQUET, ARROW):
                last, group = None, 0
                plain = path if isinstance(getattr(file, "raw", None), io.FileIO) else None
                for row in read_rows(file, plain, kind, where, choose):
                    if row.group != last:
                        last, group = row.group, next(groups)
                    yield Document(row.text, f"{where} row {row.number}", group=group, container=kind)
            elif kind == LINES:
                yield from _read_lines(file, where)
            else:
                for number, value in enumerate(read_values(file, where, array=kind == ARRAY), 1):
                    place = f"item {number}" if kind == ARRAY else f"line {value.line}"
                    yield Document(value.text.encode(errors="surrogatepass"), f"{where} {place}", container=kind)


def _find_kind(path: Path, shown: str, *, chats: bool) -> str:
    """Return what a file holds; text that is no JSON counts as lines of it."""
    with opened(path, shown) as file:
        first = file.read(512)
    if first.startswith(b"PAR1"):
        return PARQUET
    if first.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")):
        return ARROW
    check_begin(first, shown)
    with opened(path, shown) as file:
        lines = (line.removeprefix(codecs.BOM_UTF8) for line in iter(lambda: file.readline(MOST_LINE + 1), b""))
        text = next((line for line in lines if not line.isspace()), b"")
    if text.lstrip().startswith(b"["):
        with opened(path, shown) as file:
            return ARRAY if is_array(file, shown, chats=chats) else VALUES
    return VALUES if text.startswith(b"{") and _is_open(text) else LINES


def _is_open(line: bytes) -> bool:
    """Return whether a line is the beginning of JSON that goes on behind it."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):
        pass
    return False


def _read_lines(file: BinaryIO, shown: str) -> Iterator[Document]:
    """Yield all lines as they are, except those of white space; a file may begin with the mark of UTF-8."""
    # Bounded: a file of another kind may have no line end, and be larger than memory.
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
        where = f"{shown} line {number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) > MOST_LINE:
            raise UserError(f"{where} has more than {MOST_LINE:,} bytes; write one object per line")
        if not line.isspace():
            yield Document(line, where, container=LINES)
