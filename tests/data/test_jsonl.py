"""JSONL files, their cache and their order, compared with a naive reading; and every error."""

import gzip
import hashlib
import json
import os
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import naive_files as naive
import numpy as np
import pytest
from refusals import by_table, refused

from moezoo.data import Jsonl, Source, Text, cache, documents, load, records, train_batches
from moezoo.data.corpus import Ids
from moezoo.data.tokenizer import HuggingFace
from moezoo.errors import UserError

SEQ = 7
SHARD = 200


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many shards, and many tasks of the threads."""
    monkeypatch.setattr(cache, "SHARD", SHARD)
    monkeypatch.setattr(documents, "_TASK", 50)


def lines(texts) -> bytes:
    return b"".join(json.dumps({"n": i, "text": text}).encode() + b"\n" for i, text in enumerate(texts))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three files, one of them packed, of documents with 0 to 20 words; and a file that is not read."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    some = [" ".join(["document", *(str((i * k) % 41) for k in range(i % 20))]) for i in range(90)]
    (root / "b.jsonl").write_bytes(lines([*some[:30], "", "äöü €"]) + b"\n  \n")
    (root / "a.jsonl.gz").write_bytes(gzip.compress(lines(some[30:60])))
    (root / "sub" / "c.jsonl").write_bytes(lines(some[60:])[:-1])  # without a line end at its end
    (root / "notes.txt").write_text("no JSON")
    return root


def load_jsonl(path: Path, **settings) -> Source:
    return load(Jsonl(path=str(path), **settings), seq_len=SEQ, seed=3, vocab=1000)


def take(source: Source, count: int, *, start: int = 0, chosen: list[int] | None = None) -> list[np.ndarray]:
    """Return the rows of `count` batches of 4: tokens, labels, segments and positions [4, row, seq]."""
    read = None if chosen is None else np.array(chosen)
    batches = train_batches(source, seq_len=SEQ, batch_size=4, seed=3, rows=read, start=start)
    return [np.stack(next(batches)) for _ in range(count)]


@pytest.mark.parametrize("end", [None, "<unk>"])
def test_against_a_naive_reading(folder, tokenizer_file, end):
    """Three epochs, which end inside batches: without and with the cache, in parts, and resumed."""
    from tokenizers import Tokenizer

    library: Any = Tokenizer.from_file(str(tokenizer_file))
    library.no_truncation()
    library.no_padding()
    after = [] if end is None else [library.get_vocab()[end]]

    def encode(text: str) -> list[int]:
        ids = library.encode(text).ids
        return ids if ids[-1:] == after else ids + after

    expected = naive.rows(naive.cut_by_size(naive.read_lines(folder), encode, SHARD), seed=3, seq_len=SEQ)
    cold = load_jsonl(folder, tokenizer=str(tokenizer_file), end_token=end)
    assert isinstance(cold.train.tokens, np.memmap)
    count = 3 * -(-(len(cold.train) - 1) // SEQ) // 4 + 1
    batches = take(cold, count)
    for batch in batches:
        assert batch.transpose(1, 0, 2).tolist() == [next(expected) for _ in range(4)]
    warm = load_jsonl(folder, tokenizer=str(tokenizer_file), end_token=end)
    np.testing.assert_array_equal(take(warm, count), batches)
    halves = [take(warm, count, chosen=part) for part in ([0, 1], [2, 3])]
    np.testing.assert_array_equal(np.concatenate(halves, axis=2), batches)
    middle = count // 2
    np.testing.assert_array_equal(take(warm, count - middle, start=middle), batches[middle:])
    assert cold.summary == warm.summary
    assert cold.summary["held out"] == "1 in 20, by a hash of its content"


def test_bytes_are_those_of_the_texts(folder):
    source = load_jsonl(folder)
    texts = [text.encode() for text in naive.read_lines(folder)]
    assert source.train.tokens.tobytes() == b"".join(texts)
    held_out = [text for text in texts if naive.is_held_out(list(text))]
    starts, lengths = source.validation.starts, np.diff(source.validation.offsets)
    stored = source.validation.tokens
    assert [stored[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)] == held_out
    assert source.shards is not None
    assert len(source.shards) == len(
        naive.cut_by_size(naive.read_lines(folder), lambda text: list(text.encode()), SHARD)
    )
    assert source.summary["shards"] == str(len(source.shards))


def test_a_shard_is_full_at_its_size(folder):
    """Documents of exactly a quarter of it, so the ninth begins the third shard."""
    (folder / "b.jsonl").write_bytes(lines([f"{i:050d}" for i in range(9)]))
    source = load_jsonl(folder / "b.jsonl", held_out=0.3)
    assert source.whole is not None
    assert SHARD == 4 * 50
    assert source.summary["shards"] == "3"


def test_a_mistake_ends_the_work_of_all_threads(monkeypatch):
    """They do not go on with the other documents of their tasks, which may take long."""
    monkeypatch.setattr(documents, "processors", lambda: 2)
    made, other = [], threading.Event()

    def make(document: documents.Document) -> Ids:
        if document.where == "line 1":
            assert other.wait(60)
            raise UserError("refused")
        other.set()
        made.append(time.sleep(0.02))
        return Ids(np.zeros(1, np.uint8))

    # Two tasks of 50 bytes.
    texts = [b"x" * 50, *[b"x"] * 50]
    with refused("line 1: refused"):
        list(documents.tokenize((documents.Document(text, f"line {i}") for i, text in enumerate(texts, 1)), make))
    assert len(made) < 25


def test_files_as_windows_writes_them(tmp_path):
    """Each begins with the mark of UTF-8, and lines end with a carriage return."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + lines(["one", "two"]).replace(b"\n", b"\r\n"))
    source = load(Jsonl(validation=str(tmp_path)), seq_len=SEQ, seed=0, vocab=256, use="validation")
    assert source.validation.tokens.tobytes() == b"onetwo" * 2


def test_the_tokenizer_may_end_documents_itself(tmp_path, tokenizer_file):
    (tmp_path / "a.jsonl").write_bytes(lines(["1 word", "1", "2 3"]))
    settings = {"tokenizer": str(tokenizer_file), "validation": str(tmp_path / "a.jsonl"), "path": None}
    source = load(Jsonl(**settings, end_token="<unk>"), seq_len=2, seed=0, vocab=400, use="validation")
    unknown = HuggingFace(tokenizer_file, key="key").token_id("<unk>")
    assert source.validation.tokens.tolist() == [0, 3, unknown, 0, 3, unknown, 0, 4, 5, unknown]


def test_packed_files_are_read_as_they_are(folder, tmp_path):
    pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    from moezoo.data.files import _zstd

    plain = load_jsonl(folder)
    content = (folder / "b.jsonl").read_bytes()
    (folder / "b.jsonl").unlink()
    (folder / "b.jsonl.zst").write_bytes(_zstd("").compress(content))
    packed = load_jsonl(folder)
    assert packed.facts(SEQ) == plain.facts(SEQ)
    np.testing.assert_array_equal(take(packed, 9), take(plain, 9))
    text = tmp_path / "text.txt.zst"
    text.write_bytes(_zstd("").compress(content))
    assert load(Text(path=str(text)), seq_len=SEQ, seed=0, vocab=256).train.tokens.tobytes() == content
    text.write_bytes(_zstd("").compress(content)[:-3])
    with refused(f"data.path={text} is damaged (Compressed file ended before the end-of-stream marker was reached)"):
        load(Text(path=str(text)), seq_len=SEQ, seed=0, vocab=256)
    text.write_bytes(content)  # a file is what it holds, whatever its name
    assert load(Text(path=str(text)), seq_len=SEQ, seed=0, vocab=256).train.tokens.tobytes() == content


def test_a_missing_library(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    for name in ("compression", "backports"):
        monkeypatch.setitem(sys.modules, name, None)
    shown = f"data.path={tmp_path}/a.jsonl.zst"
    with refused(f"{shown} needs a library that unpacks Zstandard; pip install 'moezoo[zstd]', or unpack the file"):
        load_jsonl(tmp_path / "a.jsonl.zst")


def test_everything_that_decides_the_ids_makes_another_entry(folder, tmp_path, tokenizer_file):
    """The files, the field, the tokenizer and the end token; a file that changes back gives the first entry again."""
    library = json.loads(tokenizer_file.read_text())
    library["model"]["vocab"] |= {"document": 2, "0": 1}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(library))
    (folder / "b.jsonl").write_bytes(
        (folder / "b.jsonl").read_bytes().replace(b'"n": ', b'"also": "", "n": "').replace(b', "text"', b'", "text"')
    )
    paths: dict[str, Any] = {"tokenizer": str(tokenizer_file), "held_out": 0.3}
    found = [load_jsonl(folder, **paths).facts(SEQ)]
    found.append(load_jsonl(folder, **paths, end_token="<unk>").facts(SEQ))
    found.append(load_jsonl(folder, **paths, end_token="<s>").facts(SEQ))
    found.append(load_jsonl(folder, **{**paths, "tokenizer": str(other)}).facts(SEQ))
    found.append(load_jsonl(folder / "b.jsonl", **paths).facts(SEQ))
    found.append(load_jsonl(folder / "b.jsonl", **paths, field="n").facts(SEQ))
    content, times = (folder / "b.jsonl").read_bytes(), (folder / "b.jsonl").stat()
    (folder / "b.jsonl").write_bytes(content.replace(b"document 0", b"document 1"))
    os.utime(folder / "b.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))  # only its content differs
    found.append(load_jsonl(folder, **paths).facts(SEQ))
    assert len({str(facts) for facts in found}) == len(found)
    (folder / "b.jsonl").write_bytes(content)
    assert load_jsonl(folder, **paths).facts(SEQ) == found[0]


def test_one_process_makes_an_entry(folder, monkeypatch):
    """The others wait for it, and read it."""
    made, write = [], cache.write_documents
    monkeypatch.setattr(cache, "write_documents", lambda *all: made.append(all[0]) or write(*all))
    threads = [threading.Thread(target=load_jsonl, args=(folder,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    # What a killed process has left is removed; the entry of a failed one is made again.
    entry = made[0].parent
    made[0].unlink()
    (entry / ".tokens.npy.1.partial").write_bytes(b"left")
    load_jsonl(folder)
    assert sorted(file.name for file in entry.iterdir()) == ["tokens.json", "tokens.npy", "tokens.offsets.npy"]


def test_a_damaged_entry(folder, tmp_path):
    load_jsonl(folder, cache=str(tmp_path / "ids"))
    (entry,) = (tmp_path / "ids").iterdir()
    for name, what in (("tokens.npy", "ids"), ("tokens.offsets.npy", "offsets")):
        whole = (entry / name).read_bytes()
        (entry / name).write_bytes(whole[:-16] + bytes([whole[-16] ^ 1]) + whole[-15:])  # of the last offset but one
        with refused(f"{entry} is damaged; remove this folder, and start again (its {what} are not those that were"):
            load_jsonl(folder, cache=str(tmp_path / "ids"))
        (entry / name).write_bytes(whole)
    load_jsonl(folder, cache=str(tmp_path / "ids"))
    for name, content in (("tokens.json", "{}"), ("tokens.npy", "")):
        (entry / name).write_text(content)
        with refused(f"{entry} is damaged; remove this folder, and start again ("):
            load_jsonl(folder, cache=str(tmp_path / "ids"))


def test_an_entry_of_another_dtype(folder, tmp_path):
    """The ids are the same, and their hash is what the entry says."""
    load_jsonl(folder, cache=str(tmp_path / "ids"))
    (entry,) = (tmp_path / "ids").iterdir()
    wide = np.load(entry / "tokens.npy").astype(np.uint16)
    np.save(entry / "tokens.npy", wide)
    metadata = json.loads((entry / "tokens.json").read_text())
    (entry / "tokens.json").write_text(json.dumps(metadata | {"sha256": hashlib.sha256(wide.data).hexdigest()}))
    with refused(f"{entry} is damaged; remove this folder, and start again (it is not what was written)"):
        load_jsonl(folder, cache=str(tmp_path / "ids"))


def test_a_folder_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(f"data.cache={tmp_path}/file/ids: {tmp_path}/file/ids cannot be written (Not a directory); name a"):
        load_jsonl(folder, cache=str(tmp_path / "file" / "ids"))


def test_a_file_that_changes_while_it_is_read(folder, monkeypatch):
    parse = Jsonl._parse

    def changing(self, line, where):
        with (folder / "b.jsonl").open("a") as file:
            file.write("\n")
        return parse(self, line, where)

    monkeypatch.setattr(Jsonl, "_parse", changing)
    with refused(f"data.path={folder}: {folder}/b.jsonl changed while it was read; start again when it is complete"):
        load_jsonl(folder)


GOOD = b'{"text": "good"}\n'


@by_table(
    r"""
    content => message
    GOOD\n{'text': 1} => {} line 2 is not JSON (column 2: Expecting property name enclosed
    GOOD\n\nDEEP => {} line 3 is not JSON (
    GOOD\nGOOD\nGOOD\n"text" => {} line 4 is a string, not an object; write {"text": ...}
    {"text": "a", "text": "b"} => {} line 1 is not JSON (an object has the key text twice); write
    {"text": "a", "b": [NaN]} => {} line 1 is not JSON (NaN is no number of JSON); write one
    GOOD\n[1] => {} line 2 is an array, not an object; write {"text": ...}
    {"txt": "a"} => {} line 1 has no field text; did you mean 'txt'?; set data.field
    GOOD\n{} => {} line 2 has no field text; the object is empty; set data.field
    {"text": null} => {} line 1: field text is null, not a string; set data.field
    {"text": 12} => {} line 1: field text is a number, not a string; set data.field
    {"text": "\xff"} => {} line 1 is not UTF-8: byte 10 is 0xff; convert the file to UTF-8
    {"text": "a\ud800"} => {} line 1: field text has half of a surrogate pair at character 1
    """
)
def test_refusals(tmp_path, content, message):
    path, lines = tmp_path / "a.jsonl", content.replace("GOOD", '{"text": "good"}').replace("DEEP", "[" * 10**5)
    path.write_bytes(lines.replace(r"\n", "\n").replace(r"\xff", "\xff").encode("latin-1"))
    with refused(message.replace("{}", f"data.path={path}", 1)):
        load_jsonl(path)
    with refused(message.replace("{}", f"data.path={tmp_path}: {path}", 1)):  # in a folder, it names the file
        load_jsonl(tmp_path)
    assert not list(tmp_path.glob("caches/moezoo/tokens/*"))


def test_lines_are_bounded(tmp_path, monkeypatch):
    """A file that has no line end is not read whole."""
    monkeypatch.setattr(records, "MOST_LINE", len(GOOD))
    (tmp_path / "a.jsonl").write_bytes(GOOD + GOOD[:-1] + b" \n" + GOOD)
    with refused(f"data.path={tmp_path}/a.jsonl line 2 has more than {len(GOOD)} bytes; write one object per line"):
        load_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(GOOD * 60)
    whole = load(Jsonl(validation=str(tmp_path / "a.jsonl")), seq_len=SEQ, seed=0, vocab=256, use="validation")
    assert whole.validation.tokens.tobytes() == b"good" * 60
    (tmp_path / "a.jsonl").write_bytes(b" " * 2**24)
    tracemalloc.start()
    with refused(f"data.path={tmp_path}/a.jsonl line 1 has more than {len(GOOD)} bytes"):
        load_jsonl(tmp_path / "a.jsonl")
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_refusal_while_others_wait(tmp_path):
    """The one that fails removes the folder of the entry, for which the others wait."""
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2000 + b"{}\n")
    found = []

    def read() -> None:
        try:
            load_jsonl(tmp_path / "a.jsonl")
        except UserError as error:
            found.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [" line 2001 has no field text" in each for each in found] == [True] * 3
    assert not list(tmp_path.glob("caches/moezoo/tokens/*"))
