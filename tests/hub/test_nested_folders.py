"""Folders whose text model is inside a model for images: read, written plain, and written as they were."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file
from tiny_models import deepseek_v3, gemma4, llama4, mistral4, random_model

import moezoo
from moezoo.hub.folders import end_of_text, hub_model_config
from moezoo.hub.other_names import NESTED
from moezoo.models import family_of
from moezoo.tools.parity import compare as parity

CONFIG = deepseek_v3()
PEERS = "transformers is not installed: pip install -e '.[peers]'"
IMAGES = {"vision_tower.encoder.blocks.0.norm0.weight": np.ones(3, np.float16), "mm_projector.proj.0.bias": np.ones(2)}
# Names in a folder, from those of the text model.
WAYS: dict[str, Callable[[str], str]] = {
    "published": lambda name: f"language_model.{name}",
    "in memory": lambda name: name.replace("model.", "model.language_model.", 1),
    "as transformers writes them": lambda name: f"language_model.{name}".replace("layers", "blocks"),
}


make = functools.cache(lambda: random_model(CONFIG))


def write(folder: Path, way: str = "published", kind: str = "kimi_k25", **keys: Any) -> Any:
    """Write a folder of a random model inside another, with some keys of the outer config.json, and return the model.

    Keys in the argument `text` are those of the inner one.
    """
    model = make()
    moezoo.save_pretrained(model, folder)
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"} | keys.pop("text", {})
    outer = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 3}, "ignore_index": -100}
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False, **keys}))
    tensors = {WAYS[way](name): array for name, array in load_file(folder / "model.safetensors").items()}
    save_file(tensors | IMAGES, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def equal(a: Any, b: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("way", WAYS)
def test_read_and_written(tmp_path, way):
    model = write(tmp_path / "nested", way)
    line = r"2 tensors are not loaded, for images: mm_projector\.proj\.0\.bias, vision_tower\.encoder\.blocks\.0"
    with pytest.warns(UserWarning, match=line):
        again = moezoo.from_pretrained(tmp_path / "nested", dtype="float32")
    assert again.config == CONFIG == hub_model_config(tmp_path / "nested")
    assert equal(again, model)
    moezoo.save_pretrained(again, tmp_path / "plain")
    assert equal(moezoo.from_pretrained(tmp_path / "plain"), model)
    moezoo.save_pretrained(again, tmp_path / "same", like=tmp_path / "nested")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "nested" / name).read_bytes()
    trained = jax.tree.map(lambda x: x + 1, again)
    with pytest.warns(UserWarning, match="2 tensors are from there, for images"):
        moezoo.save_pretrained(trained, tmp_path / "trained", like=tmp_path / "nested")
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("nested", "trained"))
    assert list(wanted) == list(found)
    assert {name for name in found if np.array_equal(found[name], wanted[name])} == set(IMAGES)


def test_changed_settings_are_written_inside(tmp_path):
    model = write(tmp_path / "nested", dtype="float32")
    model = jax.tree.map(lambda x: x.astype("bfloat16"), model)
    object.__setattr__(model, "config", deepseek_v3(rope_base=50.0))
    with pytest.warns(UserWarning, match="less precise"):
        moezoo.save_pretrained(model, tmp_path / "new", like=tmp_path / "nested")
    found, wanted = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("new", "nested"))
    inner = wanted["text_config"] | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": 50.0}
    inner["rope_parameters"]["rope_theta"] = 50.0
    assert found == wanted | {"text_config": inner, "dtype": "bfloat16"}


def test_tokens_that_end_a_text_may_be_inside(tmp_path):
    write(tmp_path / "m", text={"eos_token_id": [5]})
    assert end_of_text(tmp_path / "m") == [5]
    (tmp_path / "m" / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": 5}}')
    assert end_of_text(tmp_path / "m") == [3]


@by_table(
    """
    keys => line
    {"text": {"num_hidden_layers": 1000}} => : config.json has text_config.num_hidden_layers=1000 ... 2 layers
    {"quantization_config": {"quant_method": "fp8"}, "text": {"quantization_config": {"quant_method": "mxfp4"}}}
        => /config.json: quantization_config and text_config.quantization_config are one setting and differ
    {"kind": "mistral3", "ignore_index": null} => : 1 tensor is not in the model of config.json: mm_projector.
    """
)
def test_refused(tmp_path, keys, line):
    write(tmp_path, **json.loads(keys))
    with refused(f"{tmp_path}{line}"):
        moezoo.from_pretrained(tmp_path)


def test_the_outer_key_says_whether_embeddings_are_tied(tmp_path):
    """As in transformers. Without it they are not, so the unembedding must be there."""
    write(tmp_path / "m", text={"tie_word_embeddings": True})
    assert hub_model_config(tmp_path / "m") == CONFIG
    write(tmp_path / "none", text={"tie_word_embeddings": True}, tie_word_embeddings=None)
    assert hub_model_config(tmp_path / "none") == CONFIG


def test_tensors_outside_of_the_prefix_are_not_the_models(tmp_path):
    write(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["language_model.lm_head.weight"]}, file)
    with refused(f"{tmp_path}/m: 1 tensor is not in the model of config.json: lm_head.weight"):
        moezoo.from_pretrained(tmp_path / "m")
    save_file(tensors | {"model.language_model.layers.0.x": np.ones(2)}, file)
    with refused(f"{tmp_path}/m has tensors below language_model.model.layers. and model.language_model.layers."):
        moezoo.from_pretrained(tmp_path / "m")


_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "patch_size": 2}
# Class of the outer configuration, the text model, and other keys.
OUTER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Kimi_K25Config": (
        CONFIG,
        {
            "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
            "projection_hidden_size": 16,
        },
    ),
    "Mistral3Config": (
        mistral4(),
        {"vision_config": _VISION | {"model_type": "pixtral", "image_size": 8, "head_dim": 8}},
    ),
    "Llama4Config": (
        llama4(),
        {
            "vision_config": _VISION
            | {"image_size": 8, "projector_input_dim": 4, "projector_output_dim": 4, "vision_output_dim": 4}
            | {"intermediate_size": 64}
        },
    ),
}


@pytest.mark.parametrize("name", OUTER)
def test_transformers_reads_what_is_written(tmp_path, name):
    """A folder of transformers' own model, trained here: all modules agree, and the vision tower is as it was."""
    transformers = pytest.importorskip("transformers", reason=PEERS)
    pytest.importorskip("torch", reason=PEERS)
    text, keys = OUTER[name]
    inner = family_of(text).hub.write(text)
    config = getattr(transformers, name)(text_config=inner, tie_word_embeddings=False, **keys)
    theirs: Any = transformers.AutoModelForImageTextToText.from_config(config)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="for images"):
        model = moezoo.from_pretrained(tmp_path / "theirs")
    assert model.config == text
    model = jax.tree.map(lambda x: 2 * x, model)
    # Published folders have `layers`, where this version of transformers writes `blocks`.
    file = tmp_path / "theirs" / "model.safetensors"
    renamed = {n.replace("model.blocks", "model.layers"): array for n, array in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="for images"):
        moezoo.save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    with pytest.warns(UserWarning, match="not loaded, for images"):
        result = parity.compare(tmp_path / "ours")
    assert result.first is None, result
    assert result.worst.difference < 1e-5
    names = {row.theirs for row in result.rows}
    part = "feed_forward" if name == "Llama4Config" else "mlp"
    assert {f"language_model.model.{x}" for x in ("embed_tokens", f"layers.1.{part}")} <= names
    assert "language_model.lm_head" in names
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="float32"
    )
    assert not any(info.values())
    wanted = {n: x for n, x in theirs.state_dict().items() if "vision_" in n or "projector" in n}
    assert wanted
    assert all((again.state_dict()[name] == array).all() for name, array in wanted.items())
    heads = (each.get_output_embeddings().weight for each in (again, theirs))
    assert not (next(heads) == next(heads)).any()


def test_transformers_has_these_types():
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[peers]'"
    )
    auto = transformers.models.auto.modeling_auto
    assert set(NESTED) - {"qwen3_omni_moe"} <= set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert "qwen3_omni_moe" in auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES


def test_gemma4_beside_towers_for_images_and_sound(tmp_path):
    """As above; embeddings are tied, and the names are those of published folders."""
    transformers = pytest.importorskip("transformers", reason=PEERS)
    pytest.importorskip("torch", reason=PEERS)
    text = gemma4()
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision |= {"head_dim": 8, "intermediate_size": 8, "position_embedding_size": 16}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    inner = family_of(text).hub.write(text)
    config = transformers.Gemma4Config(text_config=inner, vision_config=vision, audio_config=audio)
    theirs: Any = transformers.AutoModelForImageTextToText.from_config(config)
    theirs.save_pretrained(tmp_path / "theirs")
    names = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {"model.language_model.layers.1.experts.gate_up_proj", "model.embed_audio.embedding_projection.weight"} <= {
        *names
    }
    with pytest.warns(UserWarning, match="for images"):
        model = moezoo.from_pretrained(tmp_path / "theirs")
    assert model.config == text
    moezoo.save_pretrained(model, tmp_path / "same", like=tmp_path / "theirs")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    with pytest.warns(UserWarning, match="for images"):
        moezoo.save_pretrained(jax.tree.map(lambda x: 2 * x, model), tmp_path / "ours", like=tmp_path / "theirs")
    with pytest.warns(UserWarning, match="not loaded, for images"):
        result = parity.compare(tmp_path / "ours")
    assert result.first is None, result
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="float32"
    )
    assert not any(info.values())
    beside = {n: x for n, x in theirs.state_dict().items() if "language_model" not in n and n != "lm_head.weight"}
    assert all((again.state_dict()[name] == array).all() for name, array in beside.items())
    assert (again.lm_head.weight == 2 * theirs.lm_head.weight).all()
