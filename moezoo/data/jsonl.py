"""Data: records, JSON objects or rows of tables, of which one field is a document."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import ClassVar

from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found
from moezoo.data.json_values import kind, parse_record
from moezoo.data.records import PARQUET, SUFFIXES, read_records
from moezoo.errors import UserError, nearest
from moezoo.typed import show


@dataclasses.dataclass(frozen=True)
class Jsonl(FileSettings):
    """Records, in files as `moezoo.data.records.read_records` takes them: the text in `field` of each is a document."""

    field: str = "text"

    kind: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    only: ClassVar[str | None] = None  # what every file must be

    @property
    def reader(self) -> str:
        return f"{self.kind} {self.field}"

    def documents(self, found: Found) -> Iterator[Document]:
        for record in read_records(found, self._choose, self.only):
            group = record.group if self.only else None  # the same records are the same shards in any kind of file
            yield record._replace(text=self._parse(record.text, record.where), group=group)

    def _choose(self, names: Sequence[str]) -> list[str]:
        """Choose the column to read of a table."""
        if self.field not in names:
            near = nearest(self.field, names) if names else "there is none"
            raise UserError(f"has no column {show(self.field)}; {near}; set data.field")
        return [self.field]

    def _parse(self, line: bytes, where: str) -> bytes:
        """Return the text of a line, as UTF-8."""
        value = parse_record(line, where)
        if not isinstance(value, dict):
            raise UserError(f"{where} is {kind(value)}, not an object; write {{{json.dumps(self.field)}: ...}}")
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


@dataclasses.dataclass(frozen=True)
class Parquet(Jsonl):
    """Parquet files: each row is a document, the string in the column `field`. A shard is a row group."""

    kind: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)
    only: ClassVar[str | None] = PARQUET
