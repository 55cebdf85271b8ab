"""Data sets read as streams: every row once in an epoch, in any division, and runs that go on to the bit."""

import itertools
import json
from pathlib import Path
from typing import Any

import datasets.config
import numpy as np
import pytest
from refusals import refused
from test_data_sets import CHATS, TEMPLATE, read
from training_runs import assert_same_models, repeatable, steps_only

import moezoo
from moezoo.data import Hf, HfChat, hf, train_batches
from moezoo.data.chat_format import ChatFormat
from moezoo.data.chat_records import read_chat
from moezoo.data.epochs import make_epochs

SEQ, COUNT = 16, 96
# Of 15 bytes, so that a row has a document, and of one more the first byte.
TEXTS = [f"{number:02d}".ljust(15, chr(65 + number % 26)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The texts `saved` in 2 shards, as `files` of Parquet with 4 row groups each, and as JSON, in 3 shards."""
    folder = tmp_path_factory.mktemp("streams")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"n": range(COUNT), "text": TEXTS})
    few = rows.select(range(7))
    datasets.DatasetDict({"train": rows, "test": few}).save_to_disk(
        folder / "saved", num_shards={"train": 2, "test": 1}
    )
    (folder / "files").mkdir()
    few.to_parquet(folder / "files" / "test.parquet")
    few.to_json(folder / "test.jsonl")
    for shard in range(3):
        part = rows.shard(3, shard, contiguous=True)
        part.to_parquet(folder / "files" / f"train-{shard}.parquet", batch_size=8)
        part.to_json(folder / f"rows-{shard}.jsonl")
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "sets"))
    monkeypatch.setattr(hf, "_SHARDS", 6)


def settings(folder: Path, kind: str, **others) -> Hf:
    how: dict[str, Any] = {"path": str(folder / kind)}
    if kind == "json":
        how = {"path": kind, "data_files": {"train": f"{folder}/rows-*.jsonl", "test": f"{folder}/test.jsonl"}}
    return Hf(**how, streaming=True, **{"validation": "test", "shuffle_buffer": 10, **others})


def orders(source, readers: int, epochs: int, *, seed: int = 3) -> list[list[str]]:
    """Return the documents of each reader in so many epochs, from the chunks of its stream."""
    found = []
    for reader in range(readers):
        chunks = source.stream.chunks(reader, readers, seed, None)
        upto = itertools.takewhile(lambda chunk: chunk.epoch < epochs, chunks)
        found.append([document.text.decode() for chunk in upto for document in chunk.documents])
        chunks.close()
    return found


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["saved", "files", "json"])
def test_every_row_is_read_once_in_an_epoch(folder, kind, readers):
    """By one reader, also where shards cannot be shared equally; in an order of the seed and the epoch."""
    source = read(settings(folder, kind))
    one, two = orders(source, readers, 1), orders(source, readers, 2)
    assert sorted(itertools.chain(*one)) == TEXTS
    later = [both[len(first) :] for first, both in zip(one, two, strict=True)]
    assert sorted(itertools.chain(*later)) == TEXTS
    assert all(first != second for first, second in zip(one, later, strict=True))
    assert orders(source, readers, 1) == one != orders(source, readers, 1, seed=4)
    assert source.stream is not None
    notes = source.stream.notes(readers)
    if kind == "saved" or readers in (1, 3):
        assert notes == []
    else:
        (note,) = notes
        assert "has 3 shards" in note
        assert f"which {readers} processes cannot share equally: each reads all rows and keeps 1 in {readers}" in note


def test_the_buffer_is_shuffled(folder):
    """Rows of a buffer stay in it; without one, rows keep the order of their shards."""
    (plain,), (mixed,) = (orders(read(settings(folder, "files", shuffle_buffer=n)), 1, 1) for n in (0, 12))
    shards = [plain[at : at + 32] for at in range(0, COUNT, 32)]
    assert all(shard == sorted(shard) for shard in shards)
    assert sorted(shards) == [TEXTS[at : at + 32] for at in range(0, COUNT, 32)]
    for at in range(0, COUNT, 12):
        buffer = mixed[at : at + 12]
        assert sorted(buffer) == sorted(plain[at : at + 12])
        assert buffer != plain[at : at + 12]


@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize("kind", ["saved", "files", "json"])
def test_goes_on_from_any_batch(folder, kind, packing):
    """Two processes, over several epochs; the state is JSON."""
    source = read(settings(folder, kind, packing=packing))
    halves = np.split(np.arange(4), 2)
    how: dict[str, Any] = {"seq_len": SEQ, "batch_size": 4, "seed": 3}
    whole = [train_batches(source, **how, rows=half) for half in halves]
    places, expected = [], []
    for _ in range(50):
        places.append(json.loads(json.dumps([place for each in whole for place in each.places().values()])))
        expected.append(np.concatenate([np.stack(next(each)) for each in whole], 1))
    for each in whole:
        each.close()
    assert all(place["chunk"]["epoch"] > 1 for place in places[-1])
    for start in (0, 1, 2, 13, 24, 25, 48):
        found = train_batches(source, **how, places=places[start])  # now in one process
        for batch in expected[start : start + 4]:
            np.testing.assert_array_equal(np.stack(next(found)), batch)
        found.close()


@pytest.mark.parametrize("loss_on", ["assistant", "each"])
def test_chats(tmp_path, loss_on):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    chats = datasets.Dataset.from_list(CHATS)
    datasets.DatasetDict({"train": chats, "test": chats.select(range(3))}).save_to_disk(tmp_path / "chats")
    chat = HfChat(
        path=str(tmp_path / "chats"),
        template=str(tmp_path / "template.jinja"),
        streaming=True,
        validation="test",
        loss_on=loss_on,
        packing="stream",
    )
    source = read(chat)
    batches = train_batches(source, seq_len=SEQ, batch_size=1, seed=3)
    labels = np.concatenate([next(batches).labels[0] for _ in range(60)])
    batches.close()
    said = bytes(labels[labels >= 0].tolist()).decode()
    with chat.format() as format_:
        expected = [
            bytes(e.ids[e.mask].tolist()).decode() for c in CHATS for e in format_.examples(read_chat(c), loss_on)
        ]
    assert isinstance(format_, ChatFormat)
    assert all(said.count(each) >= 1 for each in expected)
    assert source.validation.documents == 3


def test_a_run_goes_on_to_the_bit(folder, tiny_overrides, capsys):
    """From the middle of a chunk's rows; and what a run on other data, or for a number of epochs, is told."""
    with steps_only():
        whole = moezoo.train(moezoo.compose(*tiny_overrides, "steps=6", "checkpoint_every=4", "run_dir=whole"))
    printed = capsys.readouterr().out
    assert "training    a stream, tokenized as it is read" in printed
    about = json.loads(Path("whole/checkpoints/4/about.json").read_text())
    (place,) = about["loader"]["places"]
    assert "training" not in about["data"][""]
    assert place["chunk"]["chunk"] > 0 < place["rows"]
    with steps_only():
        resumed = moezoo.train(moezoo.compose("resume=whole/checkpoints/4", "run_dir=resumed"))
    assert_same_models(resumed.model, whole.model)
    assert repeatable(resumed.history) == repeatable(whole.history)
    with refused("resume=whole was trained on documents with hash", "use the same data"):
        moezoo.train(moezoo.compose("resume=whole", "steps=9", f"data.path={folder / 'other'}"))
    with refused("epochs=2: data.path=", "is a stream, whose length is not known; set steps"):
        moezoo.train(moezoo.compose(*tiny_overrides, "epochs=2"))


@pytest.fixture
def tiny_overrides(folder, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    other = datasets.Dataset.from_dict({"text": ["other", *TEXTS[1:]]})
    if not (folder / "other").exists():
        datasets.DatasetDict({"train": other, "test": other}).save_to_disk(folder / "other")
    run = (
        "mesh=single dispatch=gather model.vocab=256 model.embed=16 model.layers=1 model.expert_mlp=16 model.head_dim=8"
    )
    more = "seq_len=16 batch_size=4 checkpoint_minutes=0 log_every=1 eval_every=3 seed=3 checkpoint_keep=9"
    data = f"data=hf data.path={folder / 'saved'} data.streaming=true data.validation=test data.shuffle_buffer=10"
    return [*run.split(), *more.split(), *data.split()]


def test_refusals(folder):
    path = f"data.path={folder / 'saved'}"
    for wrong, message in (
        ({"validation": None}, "data.streaming=true holds out no row; set data.validation to a split, or streaming to"),
        ({"train": "test"}, "data.validation=test is the split of data.train; name another one"),
        ({"field": "txt"}, f"{path} data.train=train has no column txt; did you mean 'text'?; set data.field"),
        ({"field": "n"}, f"{path} data.train=train row 1: column n is a number, not a string; set data.field"),
        ({"validation": "tets"}, f"{path} has no split tets; did you mean 'test'?"),
    ):
        with refused(message):
            read(Hf(**{"path": str(folder / "saved"), "streaming": True, "validation": "test", **wrong}))
    with refused(f"data.path={folder / 'files'} split train[:50%]: streaming reads whole splits; name one, or set"):
        read(settings(folder, "files", train="train[:50%]"))
    few = read(settings(folder, "saved", train="test", validation="train"))
    with refused("data.path=", "has no row for process 7 of 8; use fewer processes"):
        epochs = make_epochs(few, seq_len=SEQ, seed=3)
        next(epochs.batches(8, np.array([7]), 0, None))
