"""`save_pretrained(like=)`: a new folder has from the other one, to the bit, all that the model does not hold."""

import dataclasses
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny_models import deepseek_v3, mixtral, random_model

import moezoo
from moezoo.hub import carry, folders, opening, other_names
from moezoo.models.blueprint import Blueprint
from moezoo.moe.router import Choice

CONFIG = deepseek_v3()
INDEX = "model.safetensors.index.json"
# Of a layer for multi-token prediction, in dtypes that moezoo computes in and in others, of odd sizes.
FURTHER: dict[str, np.ndarray] = {
    "model.layers.2.eh_proj.weight": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5),
    "model.layers.2.embed_tokens.weight": np.linspace(-1, 1, 7).astype(ml_dtypes.bfloat16),
    "model.layers.2.mlp.gate.weight": np.arange(5, dtype=np.int8),
    "model.layers.2.self_attn.q_a_proj.weight": np.linspace(-2, 2, 9).astype(ml_dtypes.float8_e4m3fn),
    "model.layers.2.shared_head.norm.weight": np.array(0.5, np.float64),
}
# Files as published: their bytes are kept, whatever their spelling is.
TEXTS = {
    "tokenizer.json": b'{"model":  {}}\n\n',
    "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}',
    "chat_template.jinja": b"{{ messages }}\r\n",
    "generation_config.json": b'{"eos_token_id": [1, 2], "temperature": 6e-1}',
    "tiktoken.model": bytes(range(256)),
    "LICENSE": b"MIT",
    "README.md": "naïve".encode("latin1"),
}
NOT_COPIED = {
    "modeling_x.py": b"raise SystemExit",
    "pytorch_model.bin": pickle.dumps({"a": 1}),
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"",
    "x.gguf": b"GGUF",
    ".gitattributes": b"",
    "run.sh": b"exit",
}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def published(model, tmp_path_factory):
    """A folder of several files that the model was loaded from, with older keys, further tensors and other files."""
    folder = tmp_path_factory.mktemp("published") / "model"
    moezoo.save_pretrained(model, folder, max_shard_size=6000)
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    for i, shard in enumerate(shards):
        added = dict(list(FURTHER.items())[i :: len(shards)])
        save_file(load_file(folder / shard) | added, folder / shard, metadata={"format": "pt", "of": "x"})
        index["weight_map"] |= dict.fromkeys(added, shard)
        index["metadata"]["total_size"] += sum(array.nbytes for array in added.values())
    index["metadata"]["total_parameters"] = 7
    (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": int(rope["rope_theta"]), "rope_scaling": None, "num_nextn_predict_layers": 1}
    config |= {"_limit": [0.0, float("inf")]}
    config |= {"torch_dtype": config.pop("dtype"), "_unknown": {"a": 1e-06}, "eos_token_id": 2, "seq_aux": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name, data in (TEXTS | NOT_COPIED).items():
        (folder / name).write_bytes(data)
    (folder / "inner").mkdir()
    (folder / "inner" / "vocab.json").write_text("{}")
    return folder


@pytest.fixture
def copy(published, tmp_path):
    """A copy of that folder to damage."""
    return shutil.copytree(published, tmp_path / "copy")


def save(model, folder, like):
    """Save without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return moezoo.save_pretrained(model, folder, like=like)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Stored(NamedTuple):
    """A tensor of a file, read without safetensors, whose readers do not know every dtype."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    start: int  # in the file


def stored(folder: Path) -> dict[str, dict[str, Stored]]:
    """Return the tensors of each file."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        data = path.read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:first])
        assert header.pop("__metadata__")["format"] == "pt"
        found[path.name] = {
            name: Stored(about["dtype"], tuple(about["shape"]), data[first + start : first + end], first + start)
            for name, about in header.items()
            for start, end in [about["data_offsets"]]
        }
    return found


def test_an_unchanged_model_gives_the_same_files(model, published, tmp_path):
    carried = save(model, tmp_path / "new", like=published)
    files = read_files(published)
    assert read_files(tmp_path / "new") == {name: files[name] for name in files if name not in NOT_COPIED}
    assert carried == carry.Carried(
        {"multi-token prediction": sorted(FURTHER)}, tuple(sorted(TEXTS)), tuple(sorted([*NOT_COPIED, "inner"]))
    )
    assert not list((tmp_path / "new").glob("*/"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_model_has_its_own_numbers_and_others_stay(model, published, tmp_path, dtype):
    trained = jax.tree.map(lambda x: (x + 1).astype(x.dtype if x.shape[-2:] == (1, 8) else dtype), model)
    with pytest.warns(UserWarning, match="differ") as caught:
        carried = moezoo.save_pretrained(trained, tmp_path / "new", like=published)
    (warning,) = caught
    assert str(warning.message).startswith(
        f"{tmp_path}/new: the model's weights differ from those of {published}, but 5 tensors are from there, for "
        "multi-token prediction: model.layers.2.eh_proj.weight, "
    )
    assert carried.changed
    moezoo.save_pretrained(trained, tmp_path / "plain")
    own = load_file(tmp_path / "plain" / "model.safetensors")
    before, after = stored(published), stored(tmp_path / "new")
    assert {name: set(tensors) for name, tensors in after.items()} == {n: set(t) for n, t in before.items()}
    for tensors in after.values():
        for name, array in tensors.items():
            wanted = FURTHER[name] if name in FURTHER else own[name]
            assert (array.shape, array.data) == (wanted.shape, wanted.tobytes())
            assert array.dtype == ("BF16" if wanted.dtype == ml_dtypes.bfloat16 else array.dtype)
    index, old = (json.loads((folder / INDEX).read_text()) for folder in (tmp_path / "new", published))
    assert index["weight_map"] == old["weight_map"]
    sizes = sum(len(array.data) for tensors in after.values() for array in tensors.values())
    assert index["metadata"] == {"total_size": sizes, "total_parameters": 7}
    config, wanted = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "new", published))
    assert config == wanted | {"torch_dtype": dtype}
    with pytest.warns(UserWarning, match="not loaded, for multi-token prediction"):
        again = moezoo.from_pretrained(tmp_path / "new")
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(trained)))


def test_tensors_of_other_dtypes_stay_aligned(model, published, tmp_path):
    """The model's numbers become wider than those that were in front of them. Readers of other libraries need it."""
    for dtype, like in (("bfloat16", published), ("float32", tmp_path / "bfloat16")):
        typed = jax.tree.map(lambda x, dtype=dtype: (x + 1).astype(dtype), model)
        with pytest.warns(UserWarning, match="differ"):
            moezoo.save_pretrained(typed, tmp_path / dtype, like=like)
        for tensors in stored(tmp_path / dtype).values():
            for tensor in tensors.values():
                assert tensor.start % {"F64": 8, "F32": 4, "BF16": 2}.get(tensor.dtype, 1) == 0


def test_the_same_numbers_in_another_dtype_are_no_training(model, published, tmp_path):
    """But they are rounded, of which a warning tells; back in float32 nothing more is lost."""
    half = jax.tree.map(lambda x: x if x.shape[-2:] == (1, 8) else x.astype(jnp.bfloat16), model)
    with pytest.warns(UserWarning, match=r"tensors are less precise than in .*dtype=float32 keeps them: lm_head"):
        carried = moezoo.save_pretrained(half, tmp_path / "new", like=published)
    assert not carried.changed
    assert len(carried.rounded) == sum(len(tensors) for tensors in stored(published).values()) - len(FURTHER) - 1
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    again = save(wide, tmp_path / "wide", like=tmp_path / "new")
    assert not again.changed
    assert not again.rounded


@pytest.mark.parametrize("lost", ["e_score_correction_bias", "mlp.shared_experts", ".experts.1.", "q_a_layernorm"])
def test_tensors_that_the_model_lacks_survive_among_its_own(model, published, tmp_path, monkeypatch, lost):
    find, plan = other_names.Nesting.find_unused, opening.tensors
    monkeypatch.setattr(opening, "tensors", lambda *a: (t for t in plan(*a) if lost not in t.name))
    further = lambda *a: {n: "another use" for n in a[2] if lost in n} | find(*a)  # noqa: E731
    monkeypatch.setattr(other_names.Nesting, "find_unused", further)
    with pytest.warns(UserWarning, match="for another use: .*for multi-token"):
        moezoo.save_pretrained(jax.tree.map(lambda x: x + 1, model), tmp_path / "new", like=published)
    before, after = stored(published), stored(tmp_path / "new")
    for file, tensors in before.items():
        for name, array in tensors.items():
            if lost in name or name in FURTHER:
                assert after[file][name] == array
            else:
                assert after[file][name].data != array.data


def test_changed_settings_replace_those_of_the_folder(model, published, tmp_path):
    """In the keys of both generations of transformers; all other keys stay."""
    config = dataclasses.replace(CONFIG, rope_base=50.0, experts_per_token=3)
    other = jax.tree.map(lambda x: x, model)
    object.__setattr__(other, "config", config)
    moezoo.save_pretrained(other, tmp_path / "new", like=published)
    found, wanted = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "new", published))
    rope = {"rope_type": "default", "rope_theta": 50.0}
    assert found == wanted | {"num_experts_per_tok": 3, "rope_parameters": rope, "rope_theta": 50.0}
    assert folders.hub_model_config(tmp_path / "new") == config


def test_links_become_files(model, published, tmp_path):
    """Hugging Face's cache has links to files beside the folder. Those to anywhere else are not followed."""
    (tmp_path / "blobs").mkdir()
    source = tmp_path / "snapshots" / "x"
    source.mkdir(parents=True)
    for i, (name, data) in enumerate(read_files(published).items()):
        (tmp_path / "blobs" / str(i)).write_bytes(data)
        (source / name).symlink_to(f"../../blobs/{i}")
    (tmp_path / "private.txt").write_text("secret")
    (source / "vocab.txt").symlink_to(tmp_path / "private.txt")
    assert "vocab.txt" in save(model, tmp_path / "new", like=source).skipped
    files = read_files(published)
    assert read_files(tmp_path / "new") == {name: files[name] for name in files if name not in NOT_COPIED}
    assert not any(path.is_symlink() for path in (tmp_path / "new").iterdir())


def test_one_file_without_an_index(model, tmp_path):
    moezoo.save_pretrained(model, tmp_path / "one")
    carried = save(model, tmp_path / "new", like=tmp_path / "one")
    assert carried == carry.Carried()
    assert read_files(tmp_path / "new") == read_files(tmp_path / "one")
    trained = eqx.tree_at(lambda m: m.embedding.weight, model, replace_fn=lambda x: x.at[0, 0].add(1))
    assert save(trained, tmp_path / "other", like=tmp_path / "one").changed  # and nothing to warn of


def test_a_stored_copy_of_a_tied_embedding_stays_one(tmp_path):
    tied = random_model(mixtral(tied_embeddings=True))
    moezoo.save_pretrained(tied, tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    trained = jax.tree.map(lambda x: x + 1, tied)
    save(trained, tmp_path / "new", like=tmp_path / "one")
    found = load_file(tmp_path / "new" / "model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], trained.embedding.weight)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], trained.embedding.weight)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (mixtral(), "it has model_type=deepseek_v3 and the model is a Mixtral"),
        (deepseek_v3(router=Choice(gates="scores")), "it has model_type=deepseek_v3 and the model deepseek_v2"),
        (deepseek_v3(embed=24), "it has hidden_size=16 and the model 24"),
        (deepseek_v3(layers=3), "it has num_hidden_layers=2 and the model 3"),
        (deepseek_v3(value_dim=8), "it has v_head_dim=7 and the model 8"),
    ],
)
def test_other_models_are_refused(published, tmp_path, config, line):
    other = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), Blueprint(config).shapes)
    with refused(f"like={published} is not a folder of this model", line, "loaded from"):
        moezoo.save_pretrained(other, tmp_path / "new", like=published)
    assert not (tmp_path / "new").exists()


def test_folders_that_hold_something_are_refused(model, published, copy, tmp_path):
    with refused(f"folder and like are both {copy}/../copy", "name another folder"):
        moezoo.save_pretrained(model, f"{copy}/../copy", like=copy)
    with refused(f"{copy} already holds a model"):
        moezoo.save_pretrained(model, copy, like=published)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").symlink_to(copy / "tokenizer.json")
    with refused(f"{tmp_path}/new: cannot be written (tokenizer.json exists there)"):
        moezoo.save_pretrained(model, tmp_path / "new", like=published)
    assert (copy / "tokenizer.json").read_bytes() == TEXTS["tokenizer.json"]
    assert not (tmp_path / "new" / "config.json").exists()


def edit(file: str, change: Any) -> Any:
    """Return what changes an object in a JSON file of a folder."""

    def write(folder: Path) -> None:
        mapping = json.loads((folder / file).read_text())
        change(mapping)
        (folder / file).write_text(json.dumps(mapping))

    return write


def make_pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


STRAY = "model.layers.2.eh_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            edit(INDEX, lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
            "outside the folder ... do not trust it",
        ),
        (lambda folder: next(folder.glob("model-00001-of-*")).unlink(), "does not exist"),
        (edit(INDEX, lambda i: i["weight_map"].pop(STRAY)), f"has {STRAY}, which the index does not place there"),
        (
            edit(INDEX, lambda i: i["weight_map"].update({"x": i["weight_map"].popitem()[1]})),
            "has no x but the index places it there",
        ),
        (make_pipe, "tokenizer.json is a pipe, not a file"),
        (lambda folder: (folder / "vocab.json").symlink_to("nowhere"), "vocab.json does not exist"),
        (
            edit("config.json", lambda keys: keys.update(quantization_config={"bits": 4})),
            "quantization_config.quant_method is missing",
        ),
    ],
)
def test_damaged_folders_are_refused(model, copy, tmp_path, spoil, line):
    spoil(copy)
    with refused(str(copy), line):
        moezoo.save_pretrained(model, tmp_path / "new", like=copy)
    assert not (tmp_path / "new" / "config.json").exists()
