"""Data sets that the library `datasets` has saved: they read as files do, and every error."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import datasets.config
import huggingface_hub.constants
import numpy as np
import pytest
from refusals import by_table, refused

from moezoo.data import Chat, DataSettings, Hf, HfChat, Jsonl, Source, load, train_batches

SEQ = 16
ROWS = [{"text": f"document {i} äöü" * (1 + i % 4), "n": i} for i in range(60)]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ (m.tool_calls or '') | tojson }}</>{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}, "b": {"enum": ["x"]}}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
CHATS = [
    {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"no {i}"}], "tools": None}
    for i in range(20)
] + [
    {"messages": [{"role": "user", "content": "do"}, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]},
]


class Saved(NamedTuple):
    """The rows as a file of JSON lines, and settings that read the same from data sets, by what has written them."""

    folder: Path
    jsonl: Path
    settings: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    """The rows in 3 shards of `save_to_disk`, of Parquet and of JSON; and as the library keeps a set of the Hub."""
    folder = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_list(ROWS)
        rows.save_to_disk(folder / "one", num_shards=3)
        datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(folder / "several")
        (folder / "files").mkdir()
        for shard in range(3):
            part = rows.shard(3, shard, contiguous=True)
            part.to_parquet(folder / "files" / f"train-{shard}.parquet")
            part.to_json(folder / f"rows-{shard}.json")
        jsonl = folder / "rows.jsonl"
        jsonl.write_text("".join((folder / f"rows-{shard}.json").read_text() for shard in range(3)))
        parquet, several = {"train": str(folder / "files" / "*.parquet")}, {"train": str(folder / "rows-*.json")}
        datasets.load_dataset("parquet", data_files=parquet)
        (kept,) = (path.parent for path in (folder / "cache").glob("**/parquet-train.arrow"))
        hub = shutil.copytree(kept, folder / "cache" / "org___name" / "default" / "0.0.0" / ("0" * 40))
        (hub / "parquet-train.arrow").rename(hub / "name-train.arrow")
        info = json.loads((hub / "dataset_info.json").read_text())
        (hub / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "name"}))
        yield Saved(
            folder,
            jsonl,
            {
                "save_to_disk": {"path": str(folder / "one")},
                "save_to_disk of a DatasetDict": {"path": str(folder / "several")},
                "Parquet": {"path": "parquet", "data_files": parquet},
                "JSON": {"path": "json", "data_files": several},
                "folder of files": {"path": str(folder / "files")},
                "Hub's, in the library's cache": {"path": "hf://org/name"},
            },
        )


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """A cache of token ids per test, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))

    def connect(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)


def read(settings: DataSettings, seed: int = 5) -> Source:
    return load(settings, seq_len=SEQ, seed=seed, vocab=256)


def first_batches(source: Source, count: int = 20) -> np.ndarray:
    batches = train_batches(source, seq_len=SEQ, batch_size=4, seed=5)
    return np.stack([np.stack(next(batches)) for _ in range(count)])


def assert_same(source: Source, other: Source) -> None:
    """Two sources have the same documents in both splits, in the same order, and the same rows of training."""
    np.testing.assert_array_equal(first_batches(source), first_batches(other))
    for ours, theirs in ((source.train, other.train), (source.validation, other.validation)):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
        np.testing.assert_array_equal(ours.starts, theirs.starts)
        assert (ours.mask is None) == (theirs.mask is None)


@pytest.mark.parametrize("kind", range(6))
def test_rows_are_those_of_jsonl(saved, kind):
    expected = read(Jsonl(path=str(saved.jsonl)))
    settings = Hf(**list(saved.settings.values())[kind])
    assert_same(read(settings), expected)
    with pytest.MonkeyPatch.context() as patch:  # from the cache of ids
        patch.setattr(Hf, "documents", lambda *_: iter([None]))
        assert_same(read(settings), expected)
    assert not datasets.config.HF_HUB_OFFLINE


def test_splits_and_columns(saved, tmp_path):
    def documents(corpus) -> list[str]:
        ends = corpus.starts + np.diff(corpus.offsets)
        return [bytes(corpus.tokens[at:end]).decode() for at, end in zip(corpus.starts, ends, strict=True)]

    texts = [row["text"] for row in ROWS]
    source = read(Hf(path=str(saved.folder / "several"), validation="test"))
    assert (documents(source.train), documents(source.validation)) == (texts, texts[:5])
    assert source.summary["held out"] == "data.validation=test"
    parts = Hf(**saved.settings["Parquet"], train="train[:70%]", validation="train[70%:80%]")
    source = read(parts)
    assert (documents(source.train), documents(source.validation)) == (texts[:42], texts[42:48])
    other = read(Hf(**saved.settings["Parquet"], train="train[70%:]", validation="train[:10%]"))
    assert (documents(other.train), documents(other.validation)) == (texts[42:], texts[:6])  # the same files
    datasets.Dataset.from_list([{"body": text, "text": "no"} for text in texts]).save_to_disk(tmp_path / "body")
    source = read(Hf(path=str(tmp_path / "body"), field="body"))
    assert sorted(documents(source.train) + documents(source.validation)) == sorted(texts)


@pytest.mark.parametrize("loss_on", ["assistant", "each"])
def test_chats_are_those_of_files(tmp_path, loss_on):
    """A column has the keys of all its rows: where they are null, a tool or a call has no such key."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    how: dict[str, Any] = {"template": str(tmp_path / "template.jinja"), "loss_on": loss_on, "packing": "stream"}
    tools = [
        *({**chat, "score": float("nan")} for chat in CHATS),
        {**CHATS[-1], "score": 0.5, "tools": [{**TOOL, "function": {"name": "g", "strict": True}}]},
    ]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps(tools[-1]) + "\n")
    datasets.Dataset.from_list(tools).save_to_disk(tmp_path / "chats")
    expected = read(Chat(path=str(tmp_path / "chats.jsonl"), **how))
    source = read(HfChat(path=str(tmp_path / "chats"), **how))
    assert_same(source, expected)
    assert source.ends == expected.ends
    assert source.train.mask is not None
    assert 0 < source.train.mask.sum() < len(source.train.mask)
    files = {"train": str(tmp_path / "chats.jsonl")}
    assert_same(read(HfChat(path="json", data_files=files, **how)), expected)


def test_the_network_is_used_if_asked(monkeypatch):
    def see(**asked) -> Any:
        seen.append((asked["path"], asked["revision"], huggingface_hub.constants.HF_HUB_OFFLINE))
        raise ConnectionError("no route\nto host")

    seen = []
    monkeypatch.setattr(datasets, "load_dataset_builder", see)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with refused("data.path=hf://org/name cannot be reached (no route); try again later"):
        read(Hf(path="hf://org/name", download=True))
    with refused("data.path=hf://org/name@v1 is not in the local cache of datasets; set data.download=true, or name"):
        read(Hf(path="hf://org/name@v1"))
    assert seen == [("org/name", None, False), ("org/name", "v1", True)]
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@by_table(
    """
    words => message
    => data.path is required for data=hf; pass data.path=hf://ORG/NAME, a folder, or one of arrow, csv
    path=hf://org/other => data.path=hf://org/other is not in the local cache of datasets; set data.down
    path=hf://files/x => data.path=hf://files/x: datasets would read files/x here; start in another folder
    path=hf://org => data.path=hf://org is neither hf://ORG/NAME nor a folder, nor one of arrow, csv
    path=HERE => data.path=HERE cannot be read by datasets ( ... doesn't contain any data files
    path=parquet => data.path=parquet reads files; set data.data_files.train=FILES
    path=json train_files=HERE/none/* => data.data_files.train=HERE/none/* matches no file
    path=json train_files=PARQUET => data.path=json cannot be read by datasets (JSON parse
    path=ONE train=test => data.path=ONE has no split test; valid: train
    path=SEVERAL train=tran => data.path=SEVERAL has no split tran; did you mean 'train'?
    path=SEVERAL validation=tst => data.path=SEVERAL has no split tst; did you mean
    path=parquet train_files=PARQUET train=train+tra[:5]
        => data.path=parquet has no split train+tra[:5]; did you mean
    path=parquet train_files=PARQUET train=train[:5 => data.path=parquet cannot be read by datasets ( ... train[:5
    path=SEVERAL validation=train => data.validation=train and data.train=train share rows of train;
    path=parquet train_files=PARQUET validation=train[58:]
        => data.validation=train[58:] and data.train=train share rows of train
    path=parquet train_files=PARQUET subset=fr
        => data.path=parquet reads files, which have no subsets; leave data.subset out
    path=ONE subset=fr => data.path=ONE is a folder of save_to_disk, which is read whole; leave
    path=SHARDS subset=fr => data.path=SHARDS cannot be read by datasets ( ... fr ... default
    path=ONE field=txt => data.path=ONE data.train=train has no column txt; did you mean 'text'?
    path=ONE field=n => data.path=ONE data.train=train row 1: column n is a number, not a string
    """
)
def test_refusals(saved, tmp_path, monkeypatch, words, message):
    (tmp_path / "files" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    where = {"ONE": saved.folder / "one", "SEVERAL": saved.folder / "several", "SHARDS": saved.folder / "files"}
    where |= {"HERE": tmp_path / "files", "PARQUET": saved.settings["Parquet"]["data_files"]["train"]}
    for name, path in where.items():
        words, message = words.replace(f"={name}", f"={path}"), message.replace(f"={name}", f"={path}")
    given: dict[str, Any] = dict(word.split("=", 1) for word in words.split())
    if "train_files" in given:
        given["data_files"] = {"train": given.pop("train_files")}
    with refused(message):
        read(Hf(**given))


def test_refusals_of_damaged_and_missing_parts(saved, tmp_path, monkeypatch):
    one, kept = str(saved.folder / "one"), tmp_path / "kept"
    datasets.Dataset.from_list([{"text": "a"}, {"text": None}]).save_to_disk(kept)
    with refused(f"data.path={kept} data.train=train row 2: column text is null, not a string; set data.field"):
        read(Hf(path=str(kept)))
    (kept / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with refused(f"data.path={kept} cannot be read by datasets ("):
        read(Hf(path=str(kept)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(f"data.path={one} needs the library datasets; pip install 'moezoo[hf]'"):
        read(Hf(path=one))
