"""Documents held out by content, against plain lists: no content on both sides, whatever else there is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import naive_files as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import moezoo
from moezoo.data import Jsonl, PythonStdlib, Synthetic, Text, Tokens, held_out, load, token_files
from moezoo.data.corpus import Corpus, concatenate
from moezoo.data.held_out import choose, hash_contents, hash_names, hash_numbers, hold_out, hold_out_chats
from moezoo.training.saved import loader_state, read_batch_count

Ids = tuple[int, ...]
# Few different ones, so that most stand several times.
documents = st.lists(st.lists(st.integers(0, 2), max_size=3).map(tuple), min_size=1, max_size=60)
shares = st.sampled_from([0.01, 0.05, 0.2, 0.5])


def build(texts, dtype: Any = np.uint16) -> Corpus:
    return concatenate([np.array(text, dtype) for text in texts], np.dtype(dtype))


def texts_of(corpus: Corpus) -> list[Ids]:
    lengths = np.diff(corpus.offsets)
    return [tuple(corpus.tokens[s : s + n].tolist()) for s, n in zip(corpus.starts, lengths, strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=9), max_size=12), st.integers(1, 9), st.booleans())
def test_hashes_against_plain_python(texts, part, on_disk):
    """In parts that documents cross, from memory and from a file, of any dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "_PART", part)
        corpus = build(texts, np.uint32 if on_disk else np.uint16)
        if on_disk and len(corpus):
            np.save("ids.npy", corpus.tokens)
            corpus = Corpus.from_tokens(np.load("ids.npy", mmap_mode="r"), corpus.offsets)
        assert hash_contents(corpus).tolist() == [naive.content_hash(text) for text in texts]


@settings(deadline=None, max_examples=200)
@given(documents, shares, st.randoms())
def test_no_content_is_on_both_sides(texts, share, random):
    """The side of a document follows from it alone, unless too few are different: then the last tokens of these."""
    split = hold_out(build(texts), share)
    train, validation = texts_of(split.train), texts_of(split.validation)
    full = [text for text in texts if text]
    again = len(full) - len(set(full))
    counted = f"{len(full)} documents{f' ({len(texts) - len(full)} empty left out)' * (len(texts) > len(full))}"
    assert split.duplicates == (f"{again} of {counted} equal an earlier one" if again else "")
    assert split.whole is not None
    assert texts_of(split.whole) == texts
    if split.how.startswith("1 in "):
        assert sorted(train + validation) == sorted(texts)
        assert not set(train) & set(validation)
        assert () not in validation  # a document without tokens never makes a split
        shuffled = random.sample(texts, len(texts))
        other = hold_out(build(shuffled), share)
        assert sorted(texts_of(other.validation)) == sorted(validation)
        part = hold_out(build(texts[: len(texts) // 2]), share)
        if part.how.startswith("1 in "):
            assert set(texts_of(part.validation)) <= set(validation)
            assert not set(texts_of(part.train)) & set(validation)
        if share == 0.05:
            assert set(validation) == {text for text in full if naive.is_held_out(list(text))}
    else:
        once = list(dict.fromkeys(full))
        at = sum(map(len, once)) - int(share * sum(map(len, once)))
        before = [text for i, text in enumerate(once) if sum(map(len, once[: i + 1])) <= at]
        rest = [id for text in once[len(before) :] for id in text]
        assert validation == [] or [id for text in validation for id in text] == rest[at - sum(map(len, before)) :]
        whole = [text for text in full if text in before]
        assert train[: len(whole)] == whole
        assert [id for text in train[len(whole) :] for id in text] == rest[: at - sum(map(len, before))]
        copies = (
            f" of different documents; {len(full) - len(whole) - len(once) + len(before)} copies of these are left out"
        )
        assert split.how == f"the last {100 * share:g}% of the tokens" + copies * bool(again)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.125, 0.5])
def test_the_share_is_what_was_asked(share):
    """Of contents, numbers and names; a larger share holds out what a smaller one does."""
    random = np.random.default_rng(0)
    texts = random.integers(0, 256, (20_000, 9), np.uint16)
    hashes = [
        hash_contents(Corpus.from_tokens(texts.reshape(-1), 9 * np.arange(20_001))),
        hash_numbers(20_000),
        hash_names([f"folder/{i}.py" for i in range(20_000)]),
    ]
    for each in hashes:
        # Four standard deviations of a share are at most 4 * sqrt(share / 20,000).
        assert abs(choose(each, share).mean() - share) < 4 * (share / 20_000) ** 0.5
        assert not (choose(each, share) & ~choose(each, 0.5)).any()
        np.testing.assert_array_equal(choose(each, 1 / 20), each % 20 == 0)


def test_the_choice_stays():
    """Another hash would move documents from training to validation."""
    assert np.flatnonzero(choose(hash_names([f"folder/{i}.py" for i in range(50)]), 0.05)).tolist() == [12, 15, 47]
    assert np.flatnonzero(choose(hash_numbers(30), 0.05)).tolist() == [1, 7, 23, 26]
    numbers = Corpus.from_tokens(np.arange(99, dtype=np.uint8), np.arange(100))
    assert np.flatnonzero(choose(hash_contents(numbers), 0.05)).tolist()[:3] == [0, 5, 10]
    hash_names(["not\udcff unicode"])  # names of files need not be UTF-8


@settings(deadline=None, max_examples=100)
@given(documents, shares)
def test_named_documents_are_on_the_side_of_an_equal_one(texts, share):
    names = [f"{i}.txt" for i in range(len(texts))]
    split = hold_out(build(texts), share, names=names)
    by_name = choose(hash_names(names), share)
    # Documents without tokens stay where their names are.
    first = {text: i for i, text in reversed([*enumerate(texts)])}
    chosen = [bool(by_name[first[text] if text else i]) for i, text in enumerate(texts)]
    if split.how.startswith("1 in "):
        assert split.how.endswith(", by a hash of its name")
        assert split.held_out == tuple(name for name, out in zip(names, chosen, strict=True) if out)
        assert texts_of(split.validation) == [text for text, out in zip(texts, chosen, strict=True) if out]
        assert texts_of(split.train) == [text for text, out in zip(texts, chosen, strict=True) if not out]
    else:
        assert len({out for text, out in zip(texts, chosen, strict=True) if text}) < 2
        assert split.held_out == ()


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.lists(st.integers(0, 1), max_size=2), min_size=1, max_size=3), max_size=20), shares)
def test_no_chat_is_on_both_sides(chats, share):
    """With all its turns. A chat is equal to another where all its turns are, in their order."""
    number = np.repeat(np.arange(len(chats)), [len(chat) for chat in chats])
    corpus = build([turn for chat in chats for turn in chat])
    hashes, full = hash_contents(corpus), [str(chat) for chat in chats if any(chat)]
    if len(set(full)) < 2:
        with refused("data.path=a has ", "; give more, or set data.validation"):
            hold_out_chats(corpus, share, hashes=hashes, chats=number, shown="data.path=a")
        return
    split = hold_out_chats(corpus, share, hashes=hashes, chats=number, shown="data.path=a")
    sides: dict[str, set[bool]] = {}
    for out, part in ((False, split.train), (True, split.validation)):
        for start in part.starts[np.diff(part.offsets) > 0]:
            sides.setdefault(str(chats[number[np.searchsorted(corpus.starts, start, "right") - 1]]), set()).add(out)
    assert sides.keys() == set(full)
    assert all(len(side) == 1 for side in sides.values())
    assert {True} in sides.values()
    assert {False} in sides.values()
    again = len(full) - len(set(full))
    empty = len(chats) - len(full)
    counted = f"{len(full)} chats{f' ({empty} empty left out)' * bool(empty)}"
    assert split.duplicates == (f"{again} of {counted} equal an earlier one" if again else "")
    if not split.how.startswith("1 chat in "):
        assert sum(side == {True} for side in sides.values()) == 1
        few = f"since {len(set(full))} different chats are too few to hold out {100 * share:g}%; set data.validation="
        assert split.how.startswith(f"one of the fewest copies, with the smallest hash, {few}")


def write_lines(name: str, texts) -> str:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return name


def sides(source) -> tuple[set[bytes], set[bytes]]:
    def read(corpus: Corpus) -> set[bytes]:
        lengths = np.diff(corpus.offsets)
        return {
            corpus.tokens[s : s + n].astype(np.uint8).tobytes() for s, n in zip(corpus.starts, lengths, strict=True)
        }

    return read(source.train), read(source.validation)


LINES = [f"line {i % 150}" for i in range(400)]


def test_a_mixture_of_shares_and_files():
    """Each source has a share of its own or a file; equal documents of two sources are on one side by one share."""
    one, two = write_lines("one.jsonl", LINES), write_lines("two.jsonl", [*LINES[::-1], "another"])
    own = write_lines("own.jsonl", ["line 3", "line 7", "a new line", "a new line"])
    words = (
        "one.name=jsonl",
        f"one.path={one}",
        "one.held_out=0.2",
        "two.name=jsonl",
        f"two.path={two}",
        "two.held_out=0.2",
        "apart.name=jsonl",
        f"apart.path={one}",
        f"apart.validation={own}",
    )
    cfg = moezoo.compose("data=mixture", *(f"data.sources.{word}" for word in words))
    parts = load(cfg.data, seq_len=6, seed=0, vocab=256).parts
    train, validation = sides(parts["one"])
    assert not train & validation
    assert 0.1 < len(validation) / 150 < 0.3
    assert parts["one"].summary["held out"] == "1 in 5, by a hash of its content"
    assert parts["one"].summary["duplicates"] == "250 of 400 documents equal an earlier one"
    others = sides(parts["two"])
    assert others[1] - {b"another"} == validation
    assert not train & others[1]
    assert not validation & others[0]
    assert sides(parts["apart"]) == (train | validation, {b"line 3", b"line 7", b"a new line"})
    assert parts["apart"].summary["held out"] == f"data.validation={own}"
    assert parts["apart"].summary["duplicates"] == (
        "250 of 400 documents equal an earlier one; 2 of 4 validation documents are trained on too"
    )
    assert (cfg.data.has_own_validation, parts["two"].whole is not None) == (True, True)


@pytest.mark.parametrize("kind", ["jsonl", "text", "tokens"])
def test_duplicates_and_shares_of_every_kind(tmp_path, kind):
    if kind == "jsonl":
        data = Jsonl(path=write_lines("a.jsonl", LINES), held_out=0.25)
    elif kind == "text":
        Path("a").mkdir()
        for i, text in enumerate(LINES):
            Path(f"a/{i:03}.txt").write_text(text)
        data = Text(path="a", held_out=0.25)
    else:
        corpus = concatenate([np.frombuffer(text.encode(), np.uint8) for text in LINES], np.dtype(np.uint16))
        np.save("a.npy", corpus.tokens)
        np.save("a.offsets.npy", corpus.offsets)
        data = Tokens(path="a.npy", held_out=0.25)
    source = load(data, seq_len=6, seed=0, vocab=256)
    train, validation = sides(source)
    assert not train & validation
    assert 0.15 < len(validation) / 150 < 0.35
    assert source.summary["duplicates"] == "250 of 400 documents equal an earlier one"
    assert source.summary["held out"].startswith("1 in 4, by a hash of its ")
    if kind == "tokens":
        np.save("b.npy", corpus.tokens[:12])
        np.save("b.offsets.npy", np.array([0, 6, 12]))
        apart = load(Tokens(path="a.npy", validation="b.npy"), seq_len=6, seed=0, vocab=256)
        assert apart.summary["duplicates"].endswith("; 2 of 2 validation documents are trained on too")


def test_other_sources_have_a_share():
    small = load(PythonStdlib(), seq_len=8, seed=0, vocab=256)
    large = load(PythonStdlib(held_out=0.1), seq_len=8, seed=0, vocab=256)
    assert set(small.held_out) < set(large.held_out)
    chain = load(Synthetic(documents=400, held_out=0.5), seq_len=8, seed=0, vocab=256)
    assert 150 < chain.validation.documents < 250
    assert chain.summary["held out"] == "1 in 2, by a hash of its index"


def test_a_run_does_not_go_on_with_another_split():
    """That of another share, or that by the index of documents, as it was before it was by content."""
    data = Jsonl(path=write_lines("a.jsonl", LINES))
    now, other = (load(each, seq_len=6, seed=0, vocab=256) for each in (data, dataclasses.replace(data, held_out=0.3)))
    assert now.whole is not None
    by_index = hold_out(now.whole, hashes=hash_numbers(now.whole.documents), by="index")
    before = dataclasses.replace(now, train=by_index.train, validation=by_index.validation)
    cfg = dataclasses.replace(moezoo.compose(), resume="runs/old")
    assert read_batch_count(loader_state(7, now, {}), now, cfg) == 7
    for source in (other, before):
        assert source.facts(6) != now.facts(6)
        with refused("resume=runs/old was trained on documents with hash ", "; use the same data", "start a new run"):
            read_batch_count(loader_state(7, source, {}), now, cfg)


@pytest.mark.parametrize("share", ["0", "0.51", "-1", "nan", "half"])
def test_shares_that_are_refused(share):
    with refused(f"data.held_out={share}"):
        moezoo.compose("data=jsonl", f"data.held_out={share}")
    with refused(f"data.sources.a.held_out={share}"):
        moezoo.compose("data=mixture", "data.sources.a.name=text", f"data.sources.a.held_out={share}")


def test_hashes_of_large_files_are_kept(tmp_path, monkeypatch):
    """By the ids and the offsets, not by the name or times of a file; damaged ones are made again."""
    monkeypatch.setattr(token_files, "_KEPT_BYTES", 0)
    made = []
    monkeypatch.setattr(token_files, "hash_contents", lambda corpus: made.append(1) or hash_contents(corpus))
    corpus = build([[1, 2], [3], []])
    expected = hash_contents(corpus).tolist()
    for _ in range(2):
        assert token_files.hash_documents(corpus, "a").tolist() == expected
    assert len(made) == 1
    (entry,) = tmp_path.rglob("hashes/*.npy")
    for content in (b"", b"damaged", entry.read_bytes()[:-8]):
        entry.write_bytes(content)
        assert token_files.hash_documents(corpus, "a").tolist() == expected
    np.save(entry, np.zeros(2, np.uint64))  # of other documents
    assert token_files.hash_documents(corpus, "a").tolist() == expected
    assert len(made) == 5
    other = Corpus.from_tokens(corpus.tokens, np.array([0, 1, 3, 3]))
    assert token_files.hash_documents(other, "a").tolist() == hash_contents(other).tolist()
    token_files.hash_documents(corpus, "b")
    assert len(list(tmp_path.rglob("hashes/*.npy"))) == 3
