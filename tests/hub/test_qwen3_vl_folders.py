"""Folders of Qwen3-VL: the text part of a model for images, whose experts lie in one tensor in either of two ways."""

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
from moezoo.tools.parity import compare as parity

PEERS = "transformers is not installed: pip install -e '.[peers]'"
VISION: dict[str, Any] = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 8, "patch_size": 2}
VISION |= {"out_hidden_size": 16, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 11)).astype(np.int32)
CONFIG = qwen3(attention_bias="all")


def inner_keys(config: Any) -> dict[str, Any]:
    """Return the keys of the text model in a folder of Qwen3-VL."""
    keys: dict[str, Any] = {**Grouped.hub.write(config), "model_type": "qwen3_vl_moe_text"}
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
