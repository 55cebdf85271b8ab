"""Token files: written by the script, read back, made by NumPy, and every error."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import naive_files as naive
import numpy as np
import pytest
from refusals import refused

from moezoo.data import Jsonl, Tokens, load, token_files, tokenize_files, train_batches
from moezoo.errors import UserError
from moezoo.typed import show


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}" * (i != 3))
    return folder


@pytest.fixture
def made(texts, tmp_path) -> Path:
    tokenize_files(str(texts), str(tmp_path / "out.npy"))
    return tmp_path / "out.npy"


def load_tokens(path: Path, *, vocab: int = 256, **settings):
    return load(Tokens(path=str(path), **settings), seq_len=4, seed=0, vocab=vocab)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "texts")


def test_bytes_round_trip(texts, made):
    documents = [file.read_bytes() for file in sorted(texts.iterdir())]
    tokens, offsets = np.load(made), np.load(made.with_suffix(".offsets.npy"))
    assert (tokens.dtype, offsets.dtype) == (np.uint16, np.int64)
    assert bytes(tokens.tolist()) == b"".join(documents)
    assert offsets.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    assert json.loads(made.with_suffix(".json").read_text()) == {
        "vocab": 256,
        "unit": "byte",
        "tokens": len(tokens),
        "documents": 40,
        "sha256": digest,
        "offsets_sha256": hashlib.sha256(offsets.tobytes()).hexdigest(),
        "tokenizer": None,
    }
    assert names(made.parent) == ["out.json", "out.npy", "out.offsets.npy"]

    source = load_tokens(made)
    assert (source.vocab, source.unit) == (256, "byte")
    assert source.summary["sha256"] == digest[:16]
    assert source.summary["held out"] == "1 in 20, by a hash of its content"
    held_out = [i for i, document in enumerate(documents) if naive.is_held_out(list(document))]
    assert source.validation.starts.tolist() == offsets[held_out].tolist()
    assert source.train.documents + source.validation.documents == 40
    assert len(source.train) + len(source.validation) == len(tokens)
    assert isinstance(source.train.tokens, np.memmap)
    assert source.decode(source.encode("ä7")) == "ä7"
    assert next(train_batches(source, seq_len=4, batch_size=2, seed=0)).tokens.shape == (2, 4)


def test_the_tokenizer_is_copied(texts, tmp_path, tokenizer_file):
    line = tokenize_files(str(texts), str(tmp_path / "out.npy"), str(tokenizer_file))
    assert line == f"{tmp_path / 'out.npy'}: 118 tokens in 40 documents, uint16"
    assert names(tmp_path) == ["out.json", "out.npy", "out.offsets.npy", "out.tokenizer.json"]
    assert np.load(tmp_path / "out.npy")[:6].tolist() == [0, 1, 2, 0, 1, 3]
    source = load_tokens(tmp_path / "out.npy", vocab=301)
    assert (source.vocab, source.unit) == (301, "token")
    assert source.decode(source.encode("document 7")) == "document 7"
    (tmp_path / "out.tokenizer.json").unlink()
    assert load_tokens(tmp_path / "out.npy", vocab=301).decode([0, 1, 9]) == "0 1 9"


def test_files_made_by_numpy(tmp_path, monkeypatch):
    """The lines in the documentation of the module; of one document the end is held out."""
    documented = inspect.getdoc(token_files) or ""
    lines = [line for line in documented.splitlines() if line.startswith("    ") and "np." in line]
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    exec("\n".join(line.strip() for line in lines), {"np": np})
    source = load_tokens(Path("tokens.npy"), vocab=700)
    digest = hashlib.sha256(np.load("tokens.npy").tobytes()).hexdigest()
    assert (source.vocab, source.unit, source.summary["sha256"]) == (699, "token", digest[:16])
    assert sorted((len(source.train), len(source.validation))) == [1000, 19000]
    np.save("tokens.offsets.npy", np.array([0, 20_000]))
    source = load_tokens(Path("tokens.npy"), vocab=700)
    assert (len(source.train), len(source.validation)) == (19_000, 1000)
    assert source.summary["held out"] == "the last 5% of the tokens"


@pytest.mark.parametrize("known", [False, True], ids=["read", "known"])
def test_edited_files_are_other_data(made, monkeypatch, tmp_path, known):
    """NAME.json stays as it was; a resumed run compares both hashes."""
    if known:  # every file counts as large, and as unchanged for long
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(token_files, "_KEPT_BYTES", 0)
        monkeypatch.setattr(token_files, "_SETTLED_SECONDS", -1)

    def hashes() -> tuple[str, str]:
        source = load_tokens(made)
        return source.summary["sha256"], source.documents_hash

    first = hashes()
    assert hashes() == first
    kept = [file for file in (tmp_path / "cache").rglob("hashes/*") if not file.suffix]  # the others are by content
    assert len(kept) == known  # of the ids
    for entry in kept:
        entry.write_text("0" * 64)
        assert hashes()[0] == "0" * 16
        entry.write_text("cut off")
        assert hashes() == first
    time = made.stat().st_mtime_ns
    ids = np.load(made, mmap_mode="r+")
    ids[7] += 1
    ids.flush()
    os.utime(made, ns=(time, time))  # by its size, inode and this time it is the same file
    edited = hashes()
    assert edited[0] == hashlib.sha256(ids.tobytes()).hexdigest()[:16] != first[0]
    offsets = np.load(made.with_suffix(".offsets.npy"))
    offsets[1] -= 1
    np.save(made.with_suffix(".offsets.npy"), offsets)
    found = hashes()
    assert found[0] == edited[0]
    assert found[1] not in (first[1], edited[1])


def test_a_file_that_was_just_written_is_read_again(made, monkeypatch, tmp_path):
    """Its time may not change once more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_files, "_KEPT_BYTES", 0)
    load_tokens(made)
    assert [file.suffix for file in (tmp_path / "cache").rglob("hashes/*")] == [".npy"]  # which is by content


def test_own_validation_file(made, tmp_path):
    np.save(tmp_path / "val.npy", np.array([1, 2, 3, 4, 5, 299], np.uint16))
    np.save(tmp_path / "val.offsets.npy", np.array([0, 6]))
    source = load_tokens(made, validation=str(tmp_path / "val.npy"), vocab=300)
    assert (source.vocab, len(source.validation)) == (300, 6)
    assert len(source.train) == len(np.load(made))
    with pytest.raises(
        UserError, match=r"^data.validation=.*val.npy has a vocabulary of 300 tokens but model.vocab=256; "
    ):
        load_tokens(made, validation=str(tmp_path / "val.npy"))
    with pytest.raises(UserError, match=r"^data.validation=.* is the file data.path; give another"):
        load_tokens(made, validation=str(made))


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[:-10])


def save(array, suffix=".npy", **options):
    return lambda path: np.save(path.with_suffix(suffix), array, **options)


def replace_by_pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


def change_header(before: bytes, after: bytes):
    def change(path: Path):
        content = path.read_bytes()
        assert content.count(before) == 1
        room = len(before) + content.partition(before)[2].index(b"\n")  # spaces follow
        at = content.index(before)
        path.write_bytes(content[:at] + after.ljust(room) + content[at + room :])

    return change


def change_metadata(**changes):
    def change(path: Path):
        file = path.with_suffix(".json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "{0} does not exist; give a .npy file of token ids"),
        (lambda path: path.write_text("hello, this is text"), "{0} cannot be read as a .npy array (the magic"),
        (lambda path: path.write_text(""), "{0} is an empty file; give a .npy file of token ids"),
        (truncate, "{0} cannot be read as a .npy array (mmap length is greater than file size); make the"),
        (
            save(np.zeros(9)),
            "{0} has dtype float64 and shape [9], expected uint8, uint16 or uint32 [tokens]; convert it",
        ),
        (
            save(np.arange(9)),
            "{0} has dtype int64 and shape [9], expected uint8, uint16 or uint32 [tokens]; convert it: np.save('",
        ),
        (save(np.zeros(0, np.uint16)), "{0} holds no tokens"),
        (replace_by_pipe, "{0} is a pipe, not a file; give a .npy file of token ids"),
        (save(np.array([{}, None]), allow_pickle=True), "{0} cannot be read as a .npy array (Array can't be memory"),
        (change_header(b"(420,), }", b"(420,"), "{0} cannot be read as a .npy array ("),
        (change_header(b"(420,), }", b"(42**9,),"), "{0} cannot be read as a .npy array ("),
        (change_header(b"(420,), }", b"(%d,)}" % 10**25), "{0} cannot be read as a .npy array ("),
        (save(np.zeros((3, 3), np.uint16)), "{0} has dtype uint16 and shape [3, 3], expected uint8, uint1"),
        (save(np.zeros(9, ">u2")), "{0} has dtype >u2 and shape [9], expected uint8, uint16 or uint32"),
        (
            lambda p: p.with_suffix(".offsets.npy").unlink(),
            "{0} needs out.offsets.npy next to it: the index of each document's first token",
        ),
        (
            save(np.zeros(2, np.int32), ".offsets.npy"),
            "{0}: out.offsets.npy has dtype int32 and shape [2]; it must hold ",
        ),
        (
            save(np.array([0, 900]), ".offsets.npy"),
            "{0} has 420 tokens but out.offsets.npy goes from 0 to 900; it must hold ",
        ),
        (save(np.array([1, 420]), ".offsets.npy"), "{0} has 420 tokens but out.offsets.npy goes from 1 to 420"),
        (save(np.zeros(0, np.int64), ".offsets.npy"), "{0} has 420 tokens but out.offsets.npy goes from 0 to 0"),
        (save(np.array([0, 9, 5, 420]), ".offsets.npy"), "{0}: out.offsets.npy decreases at document 1; it must hold "),
        (lambda path: path.with_suffix(".json").write_text("{"), "{0}: out.json is damaged (Expecting "),
        (lambda path: path.with_suffix(".json").write_text("[]"), "{0}: out.json is damaged (list indices"),
        (lambda path: path.with_suffix(".json").write_text("[" * 100_000), "{0}: out.json is damaged (maximum rec"),
        (change_metadata(vocab=True), "{0}: out.json has vocab=True, unit='byte'; make the files again"),
        (change_metadata(vocab=10**30), "{0}: out.json has vocab=1000000000000000000000000000000, unit="),
        (change_metadata(vocab="256"), "{0}: out.json has vocab='256', unit='byte'; make the files again"),
        (change_metadata(unit="word"), "{0}: out.json has vocab=256, unit='word'; make the files again"),
        (change_metadata(vocab=512), "{0} has a vocabulary of 512 tokens but model.vocab=256; set model.vocab=512"),
    ],
)
def test_refusals(made, damage, message):
    damage(made)
    with pytest.raises(UserError) as error:
        load_tokens(made)
    assert str(error.value).startswith(message.format(f"data.path={made}"))
    assert "\n" not in str(error.value)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"^path=.*a.txt .*empty file; give a text file"):
        tokenize_files(str(tmp_path / "a.txt"), str(tmp_path / "a.npy"))
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "text", "parts"),
    [
        ({}, "a", ["tokenizer=", "has an empty vocabulary", "another tokenizer.json"]),
        ({"b": 0}, "a", ["path=a.txt: tokenizer=", "cannot encode the text (WordLevel error: Missing [UNK]"]),
        ({"b": 0}, " ", ["path=a.txt", "makes no token of this text", "another text or tokenizer"]),
    ],
)
def test_a_tokenizer_without_tokens_for_the_text(tmp_path, words, text, parts):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel(words))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tok.json"))
    (tmp_path / "a.txt").write_text(text)
    with refused(*parts):
        tokenize_files("a.txt", "a.npy", "tok.json")
    assert names(tmp_path) == ["a.txt", "tok.json"]


@pytest.mark.parametrize("out", [".npy", "folder/.npy", "out", "out.NPY", "out\n.np"])
def test_names_that_are_none_of_a_npy_file(texts, tmp_path, out):
    with refused(show(f"out={out}"), "not the name of a .npy file", "out=NAME.npy"):
        tokenize_files(str(texts), out)
    assert names(tmp_path) == []


def test_existing_files_are_kept(texts, made):
    before = {file: file.read_bytes() for file in made.parent.iterdir() if file.is_file()}
    with pytest.raises(UserError, match=r"out.npy already exists; remove it"):
        tokenize_files(str(texts), str(made))
    made.unlink()
    made.symlink_to("nowhere")
    with refused(str(made), "already exists"):
        tokenize_files(str(texts), str(made))
    made.unlink()
    with pytest.raises(UserError, match=r"^.*out.offsets.npy already exists; "):
        tokenize_files(str(texts), str(made))
    assert all(file.read_bytes() == content for file, content in before.items() if file != made)


def test_files_are_complete_or_absent(texts, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"^out=.*out.npy cannot be written \(No space left on device\); name a file"):
        tokenize_files(str(texts), str(tmp_path / "out.npy"))
    assert names(tmp_path) == []
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\); name a file"):
        tokenize_files(str(texts), str(tmp_path / "none" / "out.npy"))
    with pytest.raises(UserError, match=r"^out=out .*write out=NAME.npy"):
        tokenize_files(str(texts), "out")
    with pytest.raises(UserError, match=r"^path=none does not exist; give a text file"):
        tokenize_files("none", str(tmp_path / "out.npy"))
    with pytest.raises(UserError, match=r"^tokenizer=none does not exist; "):
        tokenize_files(str(texts), str(tmp_path / "out.npy"), "none")


def test_an_entry_of_the_cache_is_token_files(tmp_path):
    """Of bytes, whose ids have eight bits there; both ways of reading it give the same data."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    made = load(
        Jsonl(path=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"), held_out=0.3), seq_len=4, seed=0, vocab=256
    )
    (entry,) = (tmp_path / "cache").iterdir()
    read = load_tokens(entry / "tokens.npy", held_out=0.3)
    assert read.train.tokens.dtype == np.uint8
    assert read.facts(4) == made.facts(4)
    assert read.unit == "byte"


def test_a_vocabulary_beyond_sixteen_bits(tmp_path):
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel({"a": 70_000, "<unk>": 0}, unk_token="<unk>"))
    library.save(str(tmp_path / "large.json"))
    (tmp_path / "a.txt").write_text("a")
    tokenize_files(str(tmp_path / "a.txt"), str(tmp_path / "a.npy"), str(tmp_path / "large.json"))
    tokens = np.load(tmp_path / "a.npy")
    assert (tokens.tolist(), tokens.dtype) == ([70_000], np.uint32)


def test_script(texts, tmp_path):
    out = str(tmp_path / "out.npy")
    command = [sys.executable, "-m", "moezoo", "prepare-data", f"path={texts}", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 420 bytes in 40 documents, uint16\n"
