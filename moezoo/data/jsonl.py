"""Data: files of JSON objects, one per line."""

import codecs
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, ClassVar

from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found, opened
from moezoo.errors import UserError, nearest
from moezoo.typed import show

MOST_LINE = 2**28  # bytes


@dataclasses.dataclass(frozen=True)
class Jsonl(FileSettings):
    """JSON objects, one per line: the text in `field` of each is a document. Lines of white space are passed over."""

    field: str = "text"

    kind: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    @property
    def reader(self) -> str:
        return f"jsonl {self.field}"

    def documents(self, found: Found) -> Iterator[Document]:
        for line in read_lines(found):
            yield line._replace(text=self._parse(line.text, line.where))

    def _parse(self, line: bytes, where: str) -> bytes:
        """Return the text of a line, as UTF-8."""
        value = parse_object(line, where, f"{{{json.dumps(self.field)}: ...}}")
        if self.field not in value:
            near = nearest(self.field, value) if value else "the object is empty"
            raise UserError(f"{where} has no field {show(self.field)}; {near}; set data.field")
        text = value[self.field]
        if not isinstance(text, str):
            raise UserError(f"{where}: field {show(self.field)} is {kind(text)}, not a string; set data.field")
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: field {show(self.field)} has half of a surrogate pair at character {error.start}, "
                "which no UTF-8 can hold; correct it"
            ) from error


def read_lines(found: Found) -> Iterator[Document]:
    """Yield all lines of files as they are, except those of white space; a file may begin with the mark of UTF-8.

    Raises `UserError` for a file that cannot be read, and a line that is too long.
    """
    for path in found.paths:
        shown = found.describe(path)
        with opened(path, shown) as file:
            # Bounded: a file of another kind may have no line end, and be larger than memory.
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
                where = f"{shown} line {number}"
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > MOST_LINE:
                    raise UserError(f"{where} has more than {MOST_LINE:,} bytes; write one object per line")
                if not line.isspace():
                    yield Document(line, where)


def load_json(text: str) -> Any:
    """Return what JSON text holds. Raises `ValueError` for any other text, and for what readers take differently.

    That is a key that an object has twice, of which Python takes the last one, and NaN and infinities, which Python
    reads although they are not JSON.
    """
    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {show(max(names, key=names.count))[:80]} twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse_object(line: bytes, where: str, like: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises `UserError`, which tells to write one `like` that, if there is none."""
    try:
        value = load_json(line.decode())
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{line[error.start]:02x}"
        raise UserError(f"{where} is not UTF-8: {byte}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        # The library counts the line as the first one.
        reason = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where} is not JSON ({reason}); write one object per line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is {kind(value)}, not an object; write {like}")
    return value


def kind(value: object) -> str:
    """Return what JSON calls a value."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
