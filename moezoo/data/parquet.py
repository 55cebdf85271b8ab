"""Data: Parquet files, of which one column has the documents."""

import dataclasses
from typing import ClassVar

from moezoo.data.jsonl import Jsonl
from moezoo.data.records import PARQUET


@dataclasses.dataclass(frozen=True)
class Parquet(Jsonl):
    """Parquet files: each row is a document, the string in the column `field`. A shard is a row group."""

    kind: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)
    only: ClassVar[str | None] = PARQUET
