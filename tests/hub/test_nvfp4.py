"""NVFP4: numbers by the definitions of its two makers, folders of ModelOpt, and what is not kept."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from few_bit_folders import BF16, FP4, MODELOPT_CONFIG, encode_modelopt, tensors_of, write_folder
from refusals import refused
from tiny_models import gemma4

import moezoo
from moezoo.hub.formats.nvfp4 import NVFP4ModelOpt, NVFP4Packed
from moezoo.hub.kept import describe_forms
from moezoo.hub.opening import find_model, open_folder
from moezoo.models.blueprint import Blueprint
from moezoo.training.exporting import plan_export

E4M3 = ml_dtypes.float8_e4m3fn


def test_numbers_are_those_of_compressed_tensors():
    """What compressed-tensors 0.20.1 makes of all 16 codes, of the scale 0.8125 and of the global scale 3.7."""
    items = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    form = NVFP4Packed()
    scale = form.scales(np.array([[0x35]], np.uint8), np.array([3.7], np.float32))
    found = form.CONTAINER.widen(items, scale, np.zeros(16, int)).astype(BF16)
    half = [0x0000, 0x3DE1, 0x3E61, 0x3EA9, 0x3EE1, 0x3F29, 0x3F61, 0x3FA9]
    assert found.view(np.uint16).tolist() == [half + [0x8000 | code for code in half]]


def test_numbers_are_those_of_modelopt():
    """A scale in e4m3 times the scale of the matrix, rounded to float32; then the number times that."""
    rng, form = np.random.default_rng(0), NVFP4ModelOpt()
    codes = rng.integers(0, 16, (3, 48), np.uint8)
    stored, factor = rng.integers(0, 0x7F, (3, 3), np.uint8), np.float32(rng.uniform(1e-5, 1e-3))
    scale = form.scales(stored, np.asarray(factor))
    items = codes[:, ::2] | codes[:, 1::2] << 4
    found = form.CONTAINER.widen(items, scale, np.arange(48) // 16)
    for o in range(3):
        for i in range(48):
            both = np.float32(float(stored[o, i // 16].view(E4M3)) * float(factor))  # exact in float64, rounded once
            assert found[o, i] == np.float32(float(FP4[codes[o, i]]) * float(both))


def state_in_a_file(folder, algorithm="NVFP4"):
    """Move what config.json says of few bits into ModelOpt's file."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    table = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": table}))


@pytest.mark.parametrize("is_apart", [False, True])
def test_folders_of_modelopt(few_bits, tmp_path, is_apart):
    """The format in config.json, or in a file of its own alone; scales of products and of caches beside weights."""
    made = few_bits("nvfp4 of ModelOpt")
    names = ["mlp.experts.0.up_proj.input_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"]
    scales = {f"model.layers.1.{name}": np.ones((), np.float32) for name in names}
    config = json.loads((made.few / "config.json").read_text())
    write_folder(tmp_path / "m", made.tensors | scales, config)
    if is_apart:
        state_in_a_file(tmp_path / "m")
    else:
        (tmp_path / "m/hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.warns(UserWarning, match=r"_scale") as seen:
        model = moezoo.from_pretrained(tmp_path / "m", dtype="float32")
    notes = [str(each.message) for each in seen]
    assert any("for products in few bits: model.layers.1.mlp.experts.0.up_proj.input_scale" in note for note in notes)
    assert any("2 tensors are not loaded, for caches in few bits" in note for note in notes)
    jax.tree.map(np.testing.assert_array_equal, model, moezoo.from_pretrained(made.wide, dtype="float32"))
    # In numbers, nothing says that they were few bits, and the new folder is read.
    moezoo.save_pretrained(model, tmp_path / "like", like=tmp_path / "m")
    assert "quantization_config" not in json.loads((tmp_path / "like/config.json").read_text())
    assert not (tmp_path / "like/hf_quant_config.json").exists()
    assert tensors_of(tmp_path / "like").keys() == (made.numbers | scales).keys()
    with pytest.warns(UserWarning, match=r"_scale"):
        again = moezoo.from_pretrained(tmp_path / "like", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, model, again)


def test_gemma4_as_modelopt_writes_it(save, tmp_path):
    """Inside a model for images, experts apart from each other in NVFP4, and all else in numbers."""
    config = gemma4(embed=64, expert_mlp=32)
    rng, few, wide = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, weight in tensors_of(save(config).folder).items():
        name = name.replace("model.", "model.language_model.", 1)
        wide[name] = weight
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            few[name] = weight
            continue
        above, _, last = name.rpartition(".")
        projections = last.replace("gate_up", "gate_proj+up").split("+")
        wide[name] = np.zeros_like(weight)
        for expert, own in enumerate(weight):
            for part, (projection, matrix) in enumerate(zip(projections, np.split(own, len(projections)), strict=True)):
                stored, numbers = encode_modelopt(rng, f"{above}.{expert}.{projection}.weight", matrix)
                few |= stored | {f"{above}.{expert}.{projection}.input_scale": np.ones((), np.float32)}
                wide[name][expert, part * len(matrix) :][: len(matrix)] = numbers
    assert {x.dtype.name for x in few.values()} == {"uint8", "float8_e4m3fn", "float32"}
    inner = json.loads((save(config).folder / "config.json").read_text())
    outer = {"model_type": "gemma4", "text_config": inner, "vision_config": None, "tie_word_embeddings": True}
    write_folder(tmp_path / "few", few, outer | {"quantization_config": MODELOPT_CONFIG})
    write_folder(tmp_path / "wide", wide, outer)
    with pytest.warns(UserWarning, match=r"48 tensors are not loaded, for products in few bits"):
        model = moezoo.from_pretrained(tmp_path / "few", dtype="float32")
    assert model.config == config
    jax.tree.map(np.testing.assert_array_equal, model, moezoo.from_pretrained(tmp_path / "wide", dtype="float32"))


def test_a_file_that_states_no_few_bits_of_weights_is_copied(save, tmp_path):
    model, folder = save("mixtral")
    text = '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    write_folder(tmp_path / "m", tensors_of(folder), json.loads((folder / "config.json").read_text()))
    (tmp_path / "m/hf_quant_config.json").write_text(text)
    moezoo.save_pretrained(model, tmp_path / "like", like=tmp_path / "m")
    assert (tmp_path / "like/hf_quant_config.json").read_text() == text


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 of ModelOpt"])
def test_it_is_not_kept(few_bits, tmp_path, name):
    folder = few_bits(name).few
    line = f"is in the format {name}, which is only widened; write dtype=bfloat16, or in a run execution.param_dtype="
    for keep in (
        lambda: moezoo.from_pretrained(folder, dtype="stored"),
        lambda: plan_export(str(folder), f"{tmp_path}/x"),
    ):
        with refused(f"{folder}: few bits cannot be kept: model.layers.", line):
            keep()
    opened = open_folder(folder)
    frozen = Blueprint(opened.config, trained=("*embedding.weight",))
    with refused("few bits cannot be kept: model.layers.", line):
        describe_forms(frozen, find_model(opened, None).holdings)
