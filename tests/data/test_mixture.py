"""Mixtures: draws against single Philox numbers, batches against those of each source alone, and every error."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_styles import save_tokenizer
from refusals import refused

import moezoo
from moezoo.config.compose import as_mapping, from_saved, with_defaults
from moezoo.data import (
    Chat,
    Jsonl,
    Mixture,
    PythonStdlib,
    Synthetic,
    Text,
    Tokens,
    Weighted,
    load,
    order,
    train_batches,
)
from moezoo.data.epochs import make_epochs
from moezoo.data.order import Draws
from moezoo.data.tokenizer import HuggingFace

SEQ, WEIGHTS = 6, {"code": 0.5, "chain": 3.0, "packed": 1.5, "unseen": 0.0}


def draw(number: int, seed: int, block: int) -> str:
    """Return the source of one row, by definition."""
    key = np.array([seed, 2**64 - 1], np.uint64)
    words = np.random.Philox(key=key, counter=[0, number // block, 0, 0]).random_raw(number % block + 1)
    fraction = (int(words[-1]) >> 11) / 2**53 * sum(WEIGHTS.values())
    return next(
        name for name, until in zip(WEIGHTS, itertools.accumulate(WEIGHTS.values()), strict=True) if fraction < until
    )


def test_draws_follow_from_seed_and_number(monkeypatch):
    """Also when read in any order, in parts, and after other blocks."""
    monkeypatch.setattr(order, "_BLOCK", 16)
    expected = [draw(number, 7, 16) for number in range(100)]
    indices = [expected[:number].count(name) for number, name in enumerate(expected)]
    for numbers in (np.arange(100), np.arange(99, -1, -7), np.array([64, 3]), np.array([31, 32])):
        found = Draws(list(WEIGHTS.values()), 7).locate(numbers)
        assert [list(WEIGHTS)[i] for i in found.sources] == [expected[i] for i in numbers]
        assert found.indices.tolist() == [indices[i] for i in numbers]
    again = Draws(list(WEIGHTS.values()), 7)
    again.locate(np.array([99]))
    assert again.locate(np.arange(100)).indices.tolist() == indices
    assert len({tuple(Draws([1.0, 1.0], seed).locate(np.arange(100)).sources) for seed in (0, 1, 2)}) == 3


def test_sources_are_drawn_by_weight():
    sources = Draws(list(WEIGHTS.values()), 0).locate(np.arange(50_000)).sources
    shares = np.bincount(sources, minlength=4) / 50_000
    # Four standard deviations of a share are at most 4 * sqrt(0.25 / 50,000) = 0.009.
    np.testing.assert_allclose(shares, [0.1, 0.6, 0.3, 0], atol=0.009)
    assert shares[3] == 0


@pytest.fixture
def sources(tmp_path) -> dict[str, Weighted]:
    """Windows of text, windows of synthetic tokens, packed lines, and a source that is validated on alone."""
    (tmp_path / "a.txt").write_text("abcdefghij" * 40)
    lines = [chr(65 + i % 26) * (1 + i * i % 9) for i in range(150)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = {
        "code": Text(path=str(tmp_path / "a.txt")),
        "chain": Jsonl(path=str(tmp_path / "b.jsonl")),
        "packed": Jsonl(path=str(tmp_path / "b.jsonl"), packing="whole"),
        "unseen": Text(validation=str(tmp_path / "a.txt")),
    }
    return {name: Weighted(settings[name], weight) for name, weight in WEIGHTS.items()}


def load_mixture(sources, **settings):
    return load(Mixture(sources=sources, **settings), seq_len=SEQ, seed=3, vocab=256)


def read(source, count, *, start=0, rows=None) -> np.ndarray:
    """Return `count` batches [batch, array, row, seq]."""
    batches = train_batches(source, seq_len=SEQ, batch_size=5, seed=3, rows=rows, start=start)
    return np.stack([np.stack(next(batches)) for _ in range(count)])


def test_rows_are_the_next_ones_of_their_sources(sources):
    """Over several epochs of each source: whole, resumed at any batch, and some rows alone."""
    mixture = load_mixture(sources)
    alone = {
        name: train_batches(load(each.source, seq_len=SEQ, seed=3, vocab=256), seq_len=SEQ, batch_size=1, seed=3)
        for name, each in sources.items()
        if each.weight
    }
    names = [draw(number, 3, order._BLOCK) for number in range(60 * 5)]
    expected = np.concatenate([np.stack(next(alone[name])) for name in names], axis=1)
    found = read(mixture, 60)
    np.testing.assert_array_equal(found.transpose(1, 0, 2, 3).reshape(4, -1, SEQ), expected)
    np.testing.assert_array_equal(found[:, :, [1, 4]], read(mixture, 60, rows=np.array([1, 4])))
    for start in (1, 20, 41):
        np.testing.assert_array_equal(read(load_mixture(sources), 3, start=start), found[start : start + 3])
    # Tokens are counted without padding, from row numbers alone.
    epochs = make_epochs(mixture, seq_len=SEQ, seed=3)
    with refused("epochs=2: rows of a mixture are drawn by weight", "; set steps"):
        epochs.count(2)
    of_row = (expected[2] > 0).sum(-1)
    assert (of_row < SEQ).any()
    for first, last in ((0, 300), (7, 8), (90, 130)):
        counted = epochs.by_source(np.arange(first, last))
        assert counted == {
            name: sum(int(n) for n, its in zip(of_row[first:last], names[first:last], strict=True) if its == name)
            for name in WEIGHTS
        }


def test_numbers_up_to_the_vocabulary_of_all_sources(tmp_path):
    for name, top in (("a", 49), ("b", 99)):
        np.save(tmp_path / f"{name}.npy", np.resize(np.arange(top + 1, dtype=np.uint16), 400))
        np.save(tmp_path / f"{name}.offsets.npy", np.array([0, 400]))
    for names in ("ab", "ba"):
        mixture = load_mixture({name: Weighted(Tokens(path=str(tmp_path / f"{name}.npy"))) for name in names})
        assert (mixture.vocab, mixture.encode("99 7")) == (100, [99, 7])
        with refused("'100' is not a token", "give numbers from 0 to 99"):
            mixture.encode("100")


def test_facts_hold_those_of_all_sources(sources):
    mixture = load_mixture(sources)
    assert mixture.facts(SEQ) == load_mixture(sources).facts(SEQ)
    assert mixture.summary["rows"] == "code 10.0%, chain 60.0%, packed 30.0%, unseen 0.0%"
    other = load_mixture({**sources, "code": dataclasses.replace(sources["code"], weight=0.6)})
    assert other.summary["sha256"] == mixture.summary["sha256"]
    assert other.facts(SEQ) != mixture.facts(SEQ)
    hashes = [mixture.summary["sha256"]]
    for name in ("code", "packed"):
        path = Path(sources[name].source.path)
        path.write_text(path.read_text().replace("j", "k").replace("A", "B"))
        hashes.append(load_mixture(sources).summary["sha256"])
    assert len(set(hashes)) == 3
    assert load_mixture(sources, packing="whole").parts["code"].packing == "whole"


def test_different_tokenizers_are_refused_by_name(sources, tokenizer_file, tmp_path):
    code = sources["code"].source
    Path(code.path).write_text("1 2 3 4 5 6 7 8 9 10 " * 9)
    other = dataclasses.replace(code, tokenizer=str(tokenizer_file))
    for one, two, words in (
        (
            code,
            other,
            ("data.sources.a has bytes as tokens and data.sources.b has the tokenizer ", str(tokenizer_file)),
        ),
        (
            other,
            code,
            ("data.sources.a has the tokenizer ", "and data.sources.b has bytes as tokens: the sources of a"),
        ),
        (
            code,
            Synthetic(),
            ("data.sources.a has bytes as tokens and data.sources.b has ids without a tokenizer, below",),
        ),
    ):
        with refused(*words):
            load(Mixture(sources={"a": Weighted(one), "b": Weighted(two)}), seq_len=4, seed=0, vocab=400)
    copy = tmp_path / "copy.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    same = dataclasses.replace(code, tokenizer=str(copy))
    mixed = Mixture(sources={"a": Weighted(other), "b": Weighted(same)}, packing="whole")
    assert load(mixed, seq_len=1, seed=0, vocab=400).vocab == 301


def test_answers_end_where_those_of_its_chats_do(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", ("<a>", "<b>"))
    config = {"eos_token": "<a>", "chat_template": "{% for each in messages %}{{ each.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "completion": "b", "text": "cd"}\n')
    files: dict[str, Any] = {"validation": f"{tmp_path}/t.jsonl", "tokenizer": str(tokenizer)}
    settings = {"lines": Jsonl(**files), "chats": Chat(**files), "others": Chat(**files, end_token="<b>")}
    mixture = Mixture(sources={name: Weighted(each) for name, each in settings.items()})
    source = load(mixture, seq_len=1, seed=0, vocab=300, use="validation")
    assert source.ends == tuple(map(HuggingFace(tokenizer, key="key").token_id, ("<a>", "<b>")))


def test_refusals_in_python():
    with refused("data.sources.a.b: expected a name of letters, digits and _, found a.b"):
        Mixture(sources={"a.b": Weighted(Text())})
    with refused("weight=-1 must be at least 0"):
        Weighted(Text(), -1)

    @dataclasses.dataclass(frozen=True)
    class Own(Text):
        pass

    cfg = dataclasses.replace(moezoo.compose(), data=Mixture(sources={"a": Weighted(Own())}))
    with refused("data.sources.a: a configuration cannot record Own here, only python_stdlib, text, "):
        as_mapping(cfg)


def test_configurations():
    """The command line, a mapping, a YAML file and Python; a saved one without later settings."""
    expected = Mixture(sources={"code": Weighted(Text(path="a"), 0.3), "lib": Weighted(PythonStdlib())})
    words = ("code.path=a", "lib.name=python_stdlib", "code.weight=0.3", "code.name=text")
    cfg = moezoo.compose("data=mixture", *(f"data.sources.{word}" for word in words))
    assert cfg.data == expected
    inline = "data.sources={code: {name: text, path: a, weight: 0.3}, lib: {name: python_stdlib}}"
    assert moezoo.compose("data=mixture", inline).data == expected
    Path("mix.yaml").write_text("code: {name: text, path: a}\nlib: {name: python_stdlib}\n")
    assert moezoo.compose("data=mixture", "data.sources=mix.yaml", "data.sources.code.weight=0.3").data == expected
    with refused("data.sources=none.yaml does not exist"):
        moezoo.compose("data=mixture", "data.sources=none.yaml")
    mapping = as_mapping(cfg)
    assert from_saved(mapping) == cfg
    assert with_defaults(mapping) == mapping
    older = json.loads(json.dumps(mapping))
    del older["data"]["sources"]["code"]["packing"], older["data"]["sources"]["lib"]["weight"]
    assert with_defaults(older) == mapping
