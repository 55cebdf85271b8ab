"""Parquet files: row groups are the shards; compared with a naive reading, and every error."""

import sys
from pathlib import Path
from typing import Any

import naive_files as naive
import numpy as np
import pytest
from refusals import refused

from moezoo.data import Parquet, Source, load, train_batches

SEQ = 7


@pytest.fixture(scope="module")
def pyarrow() -> Any:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install -e '.[parquet]'")
    return sys.modules["pyarrow"]


def load_parquet(path: Path, **settings) -> Source:
    return load(Parquet(path=str(path), **settings), seq_len=SEQ, seed=5, vocab=256)


def write(pyarrow, path: Path, *, row_group_size: int = 100, **columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


def test_against_a_naive_reading(pyarrow, tmp_path):
    """Two epochs; strings of several types, in row groups of different sizes."""
    texts = [f"document {i} äöü" * (i % 4) for i in range(60)]
    write(pyarrow, tmp_path / "a.parquet", row_group_size=7, body=texts[:30], text=list(range(30)))
    kinds = pyarrow.array(texts[30:45]).dictionary_encode(), pyarrow.array(texts[45:], pyarrow.large_string())
    write(pyarrow, tmp_path / "b.parquet", body=kinds[0])
    write(pyarrow, tmp_path / "c.parquet", row_group_size=4, body=kinds[1])
    shards, number = [], 0
    for size in (7, 7, 7, 7, 2, 15, 4, 4, 4, 3):
        numbers = list(range(number, number + size))
        shards.append([list(texts[n].encode()) for n in numbers])
        number += size
    expected = naive.rows(shards, seed=5, seq_len=SEQ)
    for _ in range(2):  # without and with the cache
        source = load_parquet(tmp_path, field="body")
        batches = train_batches(source, seq_len=SEQ, batch_size=4, seed=5)
        read = [np.stack(next(batches)) for _ in range(2 * len(source.train) // (4 * SEQ))]
        if expected is not None:
            for batch in read:
                assert batch.transpose(1, 0, 2).tolist() == [next(expected) for _ in range(4)]
            expected, first = None, read
        np.testing.assert_array_equal(read, first)


def test_refusals(pyarrow, tmp_path):
    path = tmp_path / "a.parquet"
    write(pyarrow, path, text=["a", None, "b"], row_group_size=1)
    with refused(f"data.path={path} (Parquet) row 2: field text is null, not a string; set data.field"):
        load_parquet(path)
    with refused(f"data.path={tmp_path}: {path} (Parquet) has no column txt; did you mean 'text'?; set data.field"):
        load_parquet(tmp_path, field="txt")
    write(pyarrow, path, text=[1, 2])
    with refused(f"data.path={path} (Parquet) row 1: field text is a number, not a string; set data.field"):
        load_parquet(path)
    twice = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array([1])], ["text", "body", "text"])
    pyarrow.parquet.write_table(twice, path)
    with refused(f"data.path={path} (Parquet) has several columns text: number 1 (string) and number 3 (int64); ren"):
        load_parquet(path)
    broken = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    write(pyarrow, path, text=broken)
    with refused(f"data.path={path} (Parquet) row 2 is not UTF-8: byte 0 of its string; write it again"):
        load_parquet(path)
    write(pyarrow, path, text=pyarrow.array([], pyarrow.string()))
    with refused(f"data.path={path}: there is no document; name files that have some"):
        load_parquet(path)
    content = path.read_bytes()
    for damaged in (content[:-3], content[:40] + b"\xff" * 40 + content[80:], content[:8]):
        path.write_bytes(damaged)
        with refused(f"data.path={path} (Parquet) cannot be read (", "); copy or make it again"):
            load_parquet(path)
    for other in (b"", b"text\n", b"\xff" * 40 + content[40:]):
        path.write_bytes(other)
        with refused(f"data.path={path} is no Parquet file; copy it again, or choose data=jsonl"):
            load_parquet(path)


def test_a_missing_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_text("PAR1")
    with refused(f"data.path={tmp_path}/a.parquet (Parquet) needs pyarrow; pip install 'moezoo[parquet]', or"):
        load_parquet(tmp_path / "a.parquet")
