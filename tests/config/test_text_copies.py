"""The copies of tokenizers and templates in a run folder: one for all sources with the same files."""

import dataclasses
import shutil

import moezoo
from moezoo.config.compose import as_mapping
from moezoo.config.text_copies import list_copies, with_copies
from moezoo.data import Chat, Jsonl, Mixture, Text, Weighted


def test_copies_of_a_mixture(tmp_path):
    """Sources with the same files share copies, which are found again in a run that was moved."""
    beside = ("tokenizer_config.json", "special_tokens_map.json")
    for name in ("a.json", "own.jinja", *beside):
        (tmp_path / name).write_text(name)
    at = f"{tmp_path}/a.json"
    sources = {
        "x": Text(tokenizer=at),
        "y": Chat(tokenizer=at, template=f"{tmp_path}/own.jinja"),
        "z": Jsonl(tokenizer=at),
    }
    mapping = as_mapping(
        dataclasses.replace(moezoo.compose(), data=Mixture(sources={n: Weighted(s) for n, s in sources.items()}))
    )
    copies = list_copies(mapping)
    one, two = "tokenizers/1", "tokenizers/2"
    names = {f"{folder}/{name}" for folder in (one, two) for name in ("tokenizer.json", *beside)}
    assert copies.keys() == names | {f"{two}/template.jinja"}
    assert with_copies(mapping, tmp_path / "none") == mapping
    for name, file in copies.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, tmp_path / "run" / name)
    (tmp_path / "run").rename(tmp_path / "moved")
    found = with_copies(mapping, tmp_path / "moved")["data"]["sources"]
    assert {name: each["tokenizer"] for name, each in found.items()} == {
        name: f"{tmp_path}/moved/{folder}/tokenizer.json" for name, folder in {"x": one, "y": two, "z": one}.items()
    }
    assert found["y"]["template"] == f"{tmp_path}/moved/{two}/template.jinja"
