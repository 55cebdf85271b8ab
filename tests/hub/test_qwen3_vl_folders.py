"""Folders of Qwen3-VL and Qwen3-Omni: the text part of a model for images and sound.

Experts of Qwen3-VL lie in one tensor, in either of two ways.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file
from tiny_models import qwen3

import moezoo
from moezoo.models import Grouped
from moezoo.moe.router import Choice
from moezoo.tools.parity import compare as parity

PEERS = "transformers is not installed: pip install -e '.[peers]'"
VISION: dict[str, Any] = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 8, "patch_size": 2}
VISION |= {"out_hidden_size": 16, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 11)).astype(np.int32)
CONFIG = qwen3(attention_bias="all")


def inner_keys(config: Any, model_type: str = "qwen3_vl_moe_text") -> dict[str, Any]:
    """Return the keys of the text model in a folder."""
    keys: dict[str, Any] = {**Grouped.hub.write(config), "model_type": model_type}
    del keys["rope_scaling"], keys["sliding_window"], keys["use_sliding_window"]
    keys["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return keys


def transpose_experts(folder: Path) -> dict[str, np.ndarray]:
    """Write the tensors of a folder as released ones have them, and return them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert all(f"model.language_model.layers.0.mlp.experts.{name}" in tensors for name in ("gate_up_proj", "down_proj"))
    tensors = {name: x.swapaxes(1, 2).copy() if ".mlp.experts." in name else x for name, x in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder of transformers' own model of the text settings, that model, and its logits."""
    torch = pytest.importorskip("torch", reason=PEERS)
    transformers = pytest.importorskip("transformers", reason=PEERS)

    def write(config: Any) -> tuple[Path, Any, np.ndarray]:
        outer = transformers.Qwen3VLMoeConfig(text_config=inner_keys(config), vision_config=VISION)
        torch.manual_seed(0)
        theirs: Any = transformers.AutoModelForImageTextToText.from_config(outer).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            logits = theirs(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()
        folder = tmp_path_factory.mktemp("theirs")
        theirs.save_pretrained(folder)
        return folder, theirs, logits

    return write


def read(folder: Path) -> Any:
    with pytest.warns(UserWarning, match="not loaded, for images"):
        return moezoo.from_pretrained(folder)


def logits_of(model: Any) -> Any:
    return jax.jit(lambda model: model(TOKENS).logits)(model)


def test_inside_a_model_for_images(written, tmp_path):
    """As transformers 5.24 writes it and as released: read, written the same, trained, and read by transformers."""
    transformers = pytest.importorskip("transformers", reason=PEERS)
    source, theirs, wanted = written(CONFIG)
    model = read(source)
    assert model.config == CONFIG
    np.testing.assert_allclose(logits_of(model), wanted, rtol=0, atol=1e-4)
    vision = {name: x for name, x in theirs.state_dict().items() if ".visual." in name}
    assert vision
    for form in ("5.24", "released"):
        tensors = load_file(source / "model.safetensors") if form == "5.24" else transpose_experts(source)
        again = read(source)
        assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))
        moezoo.save_pretrained(again, tmp_path / f"same {form}", like=source)
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / f"same {form}" / name).read_bytes() == (source / name).read_bytes()
        with pytest.warns(UserWarning, match="are from there, for images"):
            moezoo.save_pretrained(jax.tree.map(lambda x: 1.5 * x, again), tmp_path / form, like=source)
        found = load_file(tmp_path / form / "model.safetensors")
        assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in tensors.items()}
        assert {name for name in found if np.array_equal(found[name], tensors[name])} == set(vision)
    with pytest.warns(UserWarning, match="not loaded, for images"):
        result = parity.compare(tmp_path / "released")
    assert result.first is None, result
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "released", output_loading_info=True, dtype="float32"
    )
    assert not any(info.values())
    assert all((loaded.state_dict()[name] == x).all() for name, x in vision.items())


def test_a_text_model_alone_is_a_qwen3_moe(written, tmp_path):
    torch = pytest.importorskip("torch", reason=PEERS)
    transformers = pytest.importorskip("transformers", reason=PEERS)
    source, _, wanted = written(CONFIG)
    moezoo.save_pretrained(read(source), tmp_path / "text")
    keys = json.loads((tmp_path / "text" / "config.json").read_text())
    assert keys["model_type"] == "qwen3_moe"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="float32")
    with torch.no_grad():
        found = theirs(torch.tensor(TOKENS.astype(np.int64))).logits
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [8, 16])  # gate and up, or down, have the same shape in both forms
def test_equal_sizes_do_not_hide_how_experts_lie(written, width):
    source, _, wanted = written(qwen3(expert_mlp=width))
    model = read(source)
    np.testing.assert_allclose(logits_of(model), wanted, rtol=0, atol=1e-4)
    transpose_experts(source)
    assert all(map(np.array_equal, jax.tree.leaves(read(source)), jax.tree.leaves(model)))


def read_keys(folder: Path) -> Any:
    """Return the rotary settings of a Qwen3-Omni folder where transformers 4 looks for them."""
    keys = json.loads((folder / "config.json").read_text())["thinker_config"]["text_config"]
    return keys["rope_scaling"] | {"rope_theta": keys["rope_theta"]}


def omni_config(text: Any) -> Any:
    """Return the configuration of a Qwen3-Omni whose parts are all tiny."""
    transformers = pytest.importorskip("transformers", reason=PEERS)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 40}
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "output_dim": 16}
    audio |= {"downsample_hidden_size": 4, "num_mel_bins": 8, "max_source_positions": 20}
    thinker = {"text_config": inner_keys(text, "qwen3_omni_moe_text"), "vision_config": VISION, "audio_config": audio}
    moe = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    talker = {
        "text_config": sizes | moe,
        "code_predictor_config": sizes | {"head_dim": 8},
        "thinker_hidden_size": 16,
        "spatial_merge_size": 2,
    }
    wave = {name: value for name, value in sizes.items() if name != "vocab_size"} | {"decoder_dim": 16}
    wave |= {"codebook_size": 8, "num_quantizers": 2, "upsample_rates": [2], "upsampling_ratios": [2]}
    return transformers.Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=wave)


def test_the_thinker_of_a_model_for_images_and_sound(tmp_path):
    """It is read, written the same, and trained; the talker and all else stay, and transformers reads the folder."""
    torch = pytest.importorskip("torch", reason=PEERS)
    transformers = pytest.importorskip("transformers", reason=PEERS)
    text = qwen3(attention_bias="all", router=Choice(gates="scores"), tied_embeddings=False)
    torch.manual_seed(0)
    theirs: Any = transformers.Qwen3OmniMoeForConditionalGeneration._from_config(omni_config(text)).eval()
    ids = torch.tensor(TOKENS.astype(np.int64))
    with torch.no_grad():
        for parameter in theirs.thinker.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        wanted = theirs.thinker(ids).logits.numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    mine = {name for name in tensors if name.startswith(("thinker.model.", "thinker.lm_head."))}
    assert "thinker.model.layers.0.mlp.experts.1.up_proj.weight" in mine
    assert {name.split(".")[0] for name in tensors} == {"thinker", "talker", "code2wav"}
    with pytest.warns(UserWarning, match="not loaded, for images and sound: "):
        model = moezoo.from_pretrained(tmp_path / "theirs")
    assert model.config == text
    np.testing.assert_allclose(logits_of(model), wanted, rtol=0, atol=1e-4)
    moezoo.save_pretrained(model, tmp_path / "same", like=tmp_path / "theirs")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    model = jax.tree.map(lambda x: 1.5 * x, model)
    object.__setattr__(model, "config", dataclasses.replace(text, rope_base=50.0))
    with pytest.warns(UserWarning, match="are from there, for images and sound"):
        moezoo.save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert {name for name in tensors if tensors[name].tobytes() != written[name].tobytes()} == mine
    again: Any
    again, info = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="float32"
    )
    assert not any(info.values())
    for settings in (again.config.thinker_config.text_config.rope_parameters, read_keys(tmp_path / "ours")):
        assert (settings["rope_theta"], settings["mrope_section"]) == (50.0, [2, 1, 1])
    with pytest.warns(UserWarning, match="not loaded, for images and sound"):
        model = moezoo.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        np.testing.assert_allclose(logits_of(model), again.thinker(ids).logits, rtol=0, atol=1e-4)


def test_refused_inside_of_a_thinker(tmp_path):
    keys: dict[str, Any] = {"model_type": "qwen3_omni_moe"}
    cases = (
        ({}, "thinker_config is missing; model_type=qwen3_omni_moe has its language model there"),
        ({"thinker_config": {"a": 1}}, "thinker_config.text_config is missing"),
        ({"thinker_config": {"text_config": {"vocab_size": 4}}}, "thinker_config.text_config has no model_type"),
        ({"other": 1, "thinker_config": {"text_config": {"a": 1}}}, "other=1: moezoo does not know this key"),
    )
    for more, line in cases:
        (tmp_path / "config.json").write_text(json.dumps(keys | more))
        with refused(f"{tmp_path}/config.json: {line}"):
            moezoo.from_pretrained(tmp_path)


@by_table(
    """
    keys => line
    {"norm_topk_prob": false} => text_config.norm_topk_prob=false ... only true
    {"sliding_window": 4} => text_config.sliding_window=4 ... does not have it
    {"num_experts": 0} => text_config.num_experts=0 ... at least 1
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0}} => text_config.rope_type=dynamic ... only default
    {"deepstack": true} => text_config.deepstack=true: moezoo does not know this key
    """
)
def test_refused(tmp_path, keys, line):
    text = inner_keys(CONFIG) | json.loads(keys)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text}))
    with refused(f"{tmp_path}/config.json: {line}"):
        moezoo.from_pretrained(tmp_path)
