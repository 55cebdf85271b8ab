"""Text files and the standard library: reading, held-out files, and errors."""

import hashlib
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from moezoo.data import Jsonl, PythonStdlib, Source, Text, load, train_batches
from moezoo.data import text as text_module
from moezoo.data.files import find_files
from moezoo.data.text import read_texts
from moezoo.errors import UserError


def text(source: Source, split: str) -> bytes:
    corpus = getattr(source, split)
    lengths = np.diff(corpus.offsets)
    return b"".join(corpus.tokens[s : s + n].tobytes() for s, n in zip(corpus.starts, lengths, strict=True))


def load_text(path: Path, **settings) -> Source:
    return load(Text(path=str(path), **settings), seq_len=4, seed=0, vocab=256)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Forty files in two folders, and some that are not text."""
    root = tmp_path / "texts"
    for i in range(40):
        file = root / ("a" if i % 2 else "b") / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {i} äöü\n")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (root / "zeros.bin").write_bytes(b"\0\0\0")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    (root / ".hidden").write_text("hidden")
    return root


def test_python_stdlib():
    source = load(PythonStdlib(), seq_len=512, seed=0, vocab=256)
    assert (source.vocab, source.unit, source.train.tokens.dtype) == (256, "byte", np.uint8)
    assert 4e6 < len(source.train) < 2e7
    assert 0.02 < len(source.validation) / len(source.train) < 0.15
    assert source.validation.documents == len(source.held_out)
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in source.held_out:
        assert int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        assert not {"test", "tests", "encodings", "site-packages"} & set(Path(name).parts)
    assert text(source, "validation") == b"".join((root / name).read_bytes() for name in source.held_out)
    facts = [title for title in source.summary if title != "duplicates"]  # some versions have a few
    assert facts == ["train", "validation", "held out", "sha256", "of"]
    assert source.decode(source.encode("def f(x):")) == "def f(x):"


def test_a_missing_python_stdlib(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"^data=python_stdlib finds no \*.py file in .*; use data=text"):
        load(PythonStdlib(), seq_len=8, seed=0, vocab=256)


def test_the_whole_of_one_file_is_evaluated(tmp_path):
    """Without a second file; there is nothing to train on."""
    (tmp_path / "one.txt").write_text("twelve bytes")
    settings = Text(validation=str(tmp_path / "one.txt"))
    source = load(settings, seq_len=4, seed=0, vocab=256, use="validation")
    assert text(source, "validation") == b"twelve bytes"
    assert len(source.train) == 0
    with refused("data.path is required to train with data=text"):
        load(settings, seq_len=4, seed=0, vocab=256)
    with refused("data.path is required for data=text"):
        load(Text(), seq_len=4, seed=0, vocab=256, use="validation")


def test_a_folder_is_split_by_file(folder):
    source = load_text(folder)
    names = sorted(f"{'a' if i % 2 else 'b'}/{i}.txt" for i in range(40))
    held_out = [name for name in names if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0]
    assert 0 < len(held_out) < 8
    assert source.held_out == tuple(held_out)
    assert text(source, "validation") == b"".join((folder / name).read_bytes() for name in held_out)
    rest = [name for name in names if name not in held_out]
    assert text(source, "train") == b"".join((folder / name).read_bytes() for name in rest)
    assert source.summary["skipped"] == "2 files that are not UTF-8 text"
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()
    assert source.summary["sha256"] == digest[:16]
    assert source.summary["held out"] == "1 in 20, by a hash of its name"


def test_one_file_holds_out_its_end(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 101)))
    source = load_text(tmp_path / "one.txt")
    assert text(source, "train") == bytes(range(1, 96))
    assert text(source, "validation") == bytes(range(96, 101))
    assert source.summary["train"] == "95 bytes in 1 document"


def test_own_validation_files_are_not_trained_on(folder):
    source = load_text(folder, validation=str(folder / "b"))
    assert text(source, "validation").startswith(b"document 0 ")
    assert source.validation.documents == source.train.documents == 20
    assert b"document 2 " not in text(source, "train")
    assert source.held_out[0] == "0.txt"
    assert source.summary["held out"] == f"data.validation={folder / 'b'}"


def test_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_text(Path("~/texts")).held_out == load_text(folder).held_out


def test_a_tokenizer(folder, tokenizer_file):
    source = load(Text(path=str(folder), tokenizer=str(tokenizer_file)), seq_len=4, seed=0, vocab=1000)
    assert (source.vocab, source.unit, source.train.tokens.dtype) == (301, "token", np.uint16)
    begin, document, number = source.encode("document 7")
    assert (begin, document, number) == (0, 1, 9)
    row = next(train_batches(source, seq_len=12, batch_size=1, seed=0))
    assert (row.tokens[0] == begin).sum() >= 2  # one before every document


def test_a_name_with_a_line_end(tmp_path):
    with refused(rf"'data.path={tmp_path}/a\nb' does not exist; give a text file"):
        load_text(tmp_path / "a\nb")


def test_a_long_file_is_several_documents(tmp_path, monkeypatch):
    """It is cut after line ends, or between characters; nothing is lost, and it is on one side of the split."""
    monkeypatch.setattr(text_module, "MOST_TEXT", 8)
    text = "ab\ncdef\nghijklmöpqrs\ntuvwxy€z".encode()
    (tmp_path / "long.txt").write_bytes(text)
    parts = [document.text for document in read_texts(find_files(str(tmp_path), key="data.path"))]
    assert parts == [b"ab\ncdef\n", b"ghijklm", "öpqrs\n".encode(), b"tuvwxy", "€z".encode()]
    (tmp_path / "wrong.txt").write_bytes(text + b"\xe2\x82")  # the beginning of a character
    with refused(f"data.path={tmp_path}/wrong.txt is not UTF-8 text: byte 32 is 0xe2"):
        list(read_texts(find_files(str(tmp_path / "wrong.txt"), key="data.path")))
    assert len(list(read_texts(find_files(str(tmp_path), key="data.path")))) == 5  # skipped as a whole


def test_the_mark_of_utf8_is_no_text(tmp_path, monkeypatch):
    """At the beginning of a file alone, be it one document or several."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"abc" + mark)
    (tmp_path / "b.txt").write_bytes(mark + b"abc\ndef\nghi")
    monkeypatch.setattr(text_module, "MOST_TEXT", 9)
    parts = [document.text for document in read_texts(find_files(str(tmp_path), key="data.path"))]
    assert parts == [b"abc" + mark, b"abc\ndef\n", b"ghi"]
    (tmp_path / "a.txt").write_bytes(mark)
    with refused(f"data.path={tmp_path}/a.txt is an empty file"):
        list(read_texts(find_files(str(tmp_path / "a.txt"), key="data.path")))


def test_nul_characters_are_counted(tmp_path):
    """Also those of a cached entry; a file of a folder with one is no text."""
    (tmp_path / "a.txt").write_bytes(b"ab\0cd\0ef" * 40)
    for _ in range(2):
        (note,) = load_text(tmp_path / "a.txt").notes
        assert note.startswith(f"80 NUL characters in 1 document, such as data.path={tmp_path}/a.txt; they are")
    lines = [json.dumps({"text": text}) for text in ("a\0" * 20, "b" * 40, "\\u0000" * 40, *"\0" * 40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (note,) = load(Jsonl(path=str(tmp_path / "a.jsonl"), held_out=0.5), seq_len=4, seed=0, vocab=256).notes
    assert note.startswith(f"60 NUL characters in 41 documents, such as data.path={tmp_path}/a.jsonl line 1;")


def test_patterns(folder, tmp_path):
    source = load_text(folder / "*" / "[0-9].txt")
    names = [f"{'a' if i % 2 else 'b'}/{i}.txt" for i in (1, 3, 5, 7, 9, 0, 2, 4, 6, 8)]
    stored = b"".join((folder / name).read_bytes() for name in names)
    assert source.train.tokens.tobytes() == stored
    with refused(f"data.path={tmp_path}/*.none matches no file; give a text file or a folder of them"):
        load_text(tmp_path / "*.none")


def test_files_that_vanish_while_a_folder_is_read(folder):
    found = find_files(str(folder), key="data.path")
    found.paths[5].unlink()
    with refused(f"data.path={folder}: {found.paths[5]} cannot be read (No such file or directory)"):
        list(read_texts(found))


def test_a_file_that_cannot_be_read(folder, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read every file, whatever its mode
    with pytest.raises(UserError, match=r"^data.path=.*: .*/1.txt cannot be read \(Permission denied\); make it "):
        load_text(folder)
