"""Rows of Parquet and Arrow files as JSON objects. Only this module uses pyarrow."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moezoo.data.json_values import without_nulls
from moezoo.data.tokenizer import one_line
from moezoo.errors import UserError, describe_class

_ROWS = 256  # to have in memory at once
# Chooses the columns to read of their names; raises `UserError` for a file without those that it needs.
Choose = Callable[[Sequence[str]], Sequence[str]]


class Row(NamedTuple):
    """A row: a JSON object, as UTF-8; its number, from 1; and the number, from 0, of its row group or batch."""

    text: bytes
    number: int
    group: int


def read_rows(file: BinaryIO, path: Path | None, kind: str, shown: str, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a file. Columns without a value in a row are null; inside of a column they are left out.

    Args:
        file: The open file; read from its beginning.
        path: Where it is, if it is not compressed.
        kind: What it is, "Parquet" or "Arrow", which may be with or without a footer.
        shown: Begins messages.
        choose: Chooses columns.

    Raises:
        UserError: The library pyarrow is missing; the file is damaged; two chosen columns have one name; not UTF-8.
    """
    pyarrow = _library(shown)
    number = 0
    with tempfile.TemporaryFile() as unpacked:  # both formats begin with a table at the end of the file
        try:
            if path is None:
                shutil.copyfileobj(file, unpacked)
                unpacked.seek(0)
            source: Any = pyarrow.PythonFile(unpacked) if path is None else pyarrow.OSFile(str(path))
            for group, batch in _batches(pyarrow, source, kind, shown, choose):
                for begin in range(0, len(batch), _ROWS):
                    for row in _rows(batch.slice(begin, _ROWS), shown, number):
                        number += 1
                        yield Row(_encode(row, f"{shown} row {number}"), number, group)
        except UserError:
            raise
        except (pyarrow.ArrowException, OSError, LookupError, TypeError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise UserError(f"{shown} cannot be read ({reason}); copy or make it again") from error


def _batches(pyarrow: Any, source: Any, kind: str, shown: str, choose: Choose) -> Iterator[tuple[int, Any]]:
    if kind == "Parquet":
        with pyarrow.parquet.ParquetFile(source, buffer_size=2**20, pre_buffer=False) as file:
            columns = _choose(file.schema_arrow, shown, choose)
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    yield group, batch
        return
    if source.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        source.seek(0)
        reader = batches = pyarrow.ipc.open_stream(source)
    columns = _choose(reader.schema, shown, choose)
    for group, batch in enumerate(batches):
        yield group, batch.select(columns)


def _choose(schema: Any, shown: str, choose: Choose) -> list[str]:
    """Return the columns to read. Raises `UserError` if several have one of the names."""
    try:
        chosen = list(choose(schema.names))
    except UserError as error:
        raise UserError(f"{shown} {error}") from None
    for name in chosen:
        if len(at := schema.get_all_field_indices(name)) > 1:
            both = " and ".join(f"number {i + 1} ({schema.field(i).type})" for i in at)
            raise UserError(f"{shown} has several columns {name}: {both}; rename all but one")
    return chosen


def _rows(batch: Any, shown: str, before: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        for number in range(len(batch)):
            try:
                batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as first:
                where = f"{shown} row {before + number + 1}"
                raise UserError(f"{where} is not UTF-8: byte {first.start} of its string; write it again") from error
        raise


def _encode(row: dict[str, Any], where: str) -> bytes:
    def refuse(value: Any) -> Any:
        raise UserError(f"{where} holds {describe_class(value)}, and no text or number; convert the column")

    return json.dumps(
        {key: without_nulls(value) for key, value in row.items()}, ensure_ascii=False, default=refuse
    ).encode()


def _library(shown: str) -> Any:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{shown} needs pyarrow; pip install 'moezoo[parquet]', or convert the file to JSONL") from None
    return pyarrow
