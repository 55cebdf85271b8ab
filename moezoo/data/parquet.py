"""Data: Parquet files. Only this module uses pyarrow."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found
from moezoo.data.tokenizer import one_line
from moezoo.errors import UserError, nearest
from moezoo.host import check_file
from moezoo.typed import show

_ROWS = 1024  # to have in memory at once


@dataclasses.dataclass(frozen=True)
class Parquet(FileSettings):
    """Parquet files: each row is a document, the string in the column `field`. A shard is a row group."""

    field: str = "text"

    kind: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @property
    def reader(self) -> str:
        return f"parquet {self.field}"

    def documents(self, found: Found) -> Iterator[Document]:
        groups = itertools.count()
        for path in found.paths:
            shown = found.describe(path)
            pyarrow, read = _libraries(shown)
            check_file(path, shown, "give a .parquet file or a folder of them")
            try:
                with path.open("rb") as opened, read.ParquetFile(opened) as file:
                    self._check(file.schema_arrow, pyarrow.types, shown)
                    row = 1
                    for group in range(file.num_row_groups):
                        number = next(groups)
                        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[self.field]):
                            for text in batch.column(0):
                                where = f"{shown} row {row}"
                                yield Document(self._encode(text, where), where, group=number)
                                row += 1
            except (pyarrow.ArrowException, OSError) as error:
                reason = getattr(error, "strerror", None) or one_line(error)
                raise UserError(f"{shown} cannot be read as Parquet ({reason}); copy or make it again") from error

    def _check(self, schema: Any, types: Any, shown: str) -> None:
        """Raise `UserError` unless one such column is there and holds strings."""
        if self.field not in schema.names:
            near = nearest(self.field, schema.names) if schema.names else "there is none"
            raise UserError(f"{shown} has no column {show(self.field)}; {near}; set data.field")
        at = schema.get_all_field_indices(self.field)
        if len(at) > 1:
            both = " and ".join(f"number {i + 1} ({schema.field(i).type})" for i in at)
            raise UserError(f"{shown} has several columns {show(self.field)}: {both}; rename all but one")
        kind = schema.field(at[0]).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UserError(f"{shown}: column {show(self.field)} has type {kind}, not string; set data.field")

    def _encode(self, text: Any, where: str) -> bytes:
        """Return one value of the column as UTF-8."""
        try:
            value = text.as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8: byte {error.start} of its string; write it again") from error
        if value is None:
            raise UserError(f"{where}: column {show(self.field)} is null, not a string; leave the row out")
        return value.encode()


def _libraries(shown: str) -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
        import pyarrow.types  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{shown} needs pyarrow; pip install 'moezoo[parquet]', or convert the file to JSONL") from None
    return pyarrow, parquet
