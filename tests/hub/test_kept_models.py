"""Models whose weights stay in few bits: read inside others, computing on meshes, in checkpoints."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from few_bit_folders import Written, tensors_of, write_folder

import moezoo
from moezoo.parallel.axes import is_stored
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.training.checkpoint import Checkpoints, read_about, restore
from moezoo.training.exporting import plan_export

IMAGES = {"vision_tower.blocks.0.norm.weight": np.ones(3, np.float16), "vision_tower.proj.weight_scale_inv": np.ones(2)}


def write_inside(folder: Path, made: Written, kind: str, inner: str, inside: bool) -> None:
    """Write a folder in few bits inside a model for images; `inside` says which config.json has its table."""
    text = json.loads((made.few / "config.json").read_text()) | {"model_type": inner}
    outer = {"model_type": kind, "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    if not inside:
        outer["quantization_config"] = text.pop("quantization_config")
    write_folder(folder, {f"language_model.{key}": x for key, x in made.tensors.items()} | IMAGES, outer)


@pytest.mark.parametrize(
    ("name", "kind", "inner", "inside"),
    [("int4", "kimi_k25", "kimi_k2", True), ("fp8 joined experts", "mistral3", "mistral4", False)],
)
@pytest.mark.filterwarnings("ignore:.*2 tensors are not loaded, for images")
def test_inside_models_for_images(few_bits, tmp_path, name, kind, inner, inside):
    made = few_bits(name)
    write_inside(tmp_path / "nested", made, kind, inner, inside)
    for dtype in ("bfloat16", "stored"):
        found, wanted = (moezoo.from_pretrained(folder, dtype=dtype) for folder in (tmp_path / "nested", made.few))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(x, y, strict=True)
    moezoo.save_pretrained(found, tmp_path / "like", like=tmp_path / "nested")
    plan_export(str(tmp_path / "nested"), str(tmp_path / "converted")).write()
    for folder in ("like", "converted"):
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / folder / file).read_bytes() == (tmp_path / "nested" / file).read_bytes()
    plan_export(str(tmp_path / "nested"), str(tmp_path / "wide"), dtype="float32").write()
    assert "quantization_config" not in (tmp_path / "wide" / "config.json").read_text()


def test_tensors_for_products_in_few_bits_are_not_loaded(few_bits, tmp_path):
    """Scales of activations, beside static FP8 weights."""
    made = few_bits("fp8 one scale")
    scales = {f"model.layers.{i}.self_attn.q_proj.qscale_act": np.ones((), np.float32) for i in range(2)}
    write_folder(tmp_path / "m", made.tensors | scales, json.loads((made.few / "config.json").read_text()))
    with pytest.warns(UserWarning, match=r"2 tensors are not loaded, for products in few bits: model\.layers\.0-1\."):
        model = moezoo.from_pretrained(tmp_path / "m", dtype="stored")
    moezoo.save_pretrained(model, tmp_path / "like", like=tmp_path / "m")
    assert (tmp_path / "like/model.safetensors").read_bytes() == (tmp_path / "m/model.safetensors").read_bytes()


def test_numbers_and_scales_in_different_files(few_bits, tmp_path):
    """Of a folder with an index; widened, it names the new tensors, each in the file of its numbers."""
    made = few_bits("fp8")
    files: dict[str, dict[str, np.ndarray]] = {
        "model-00001-of-00002.safetensors": {},
        "model-00002-of-00002.safetensors": {},
    }
    first, second = files.values()
    for key, tensor in made.tensors.items():
        (second if key.endswith("_scale_inv") else first)[key] = tensor
    config = json.loads((made.few / "config.json").read_text())
    for name, tensors in files.items():
        write_folder(tmp_path / name, tensors, config)
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").rename(tmp_path / "m" / name)
    where = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {"total_size": sum(x.nbytes for x in made.tensors.values())}, "weight_map": where}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    model = moezoo.from_pretrained(tmp_path / "m", dtype="stored")
    moezoo.save_pretrained(model, tmp_path / "like", like=tmp_path / "m")
    for path in (tmp_path / "m").iterdir():
        assert (tmp_path / "like" / path.name).read_bytes() == path.read_bytes()
    plan_export(str(tmp_path / "m"), str(tmp_path / "wide"), dtype="float32").write()
    found = tensors_of(tmp_path / "wide")
    assert found.keys() == made.numbers.keys()
    for key, tensor in found.items():
        np.testing.assert_array_equal(tensor, made.numbers[key])
    index = json.loads((tmp_path / "wide/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    moezoo.from_pretrained(tmp_path / "wide")


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "int4"])
def test_the_usual_dtype_is_bfloat16(few_bits, name):
    """Most numbers have few bits, and all others are float32."""
    assert moezoo.from_pretrained(few_bits(name).few).embedding.weight.dtype == "bfloat16"


TOKENS = np.random.default_rng(0).integers(0, 40, (8, 8))


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [("fp8", {"fsdp": 2, "tensor": 4}, "tensor"), ("mxfp4", {"expert": 8}, "fsdp_ep"), ("int4", {}, "fsdp_ep")],
)
def test_logits(few_bits, name, mesh, rules):
    """They are those of the widened model, but for the order of sums."""
    shape = moezoo.make_mesh(moezoo.MeshShape(**mesh)) if mesh else None
    execution = moezoo.Execution(shape, moezoo.compose(f"rules={rules}").rules)
    found, wanted = (
        np.asarray(jax.jit(lambda m: m(TOKENS, execution=execution).logits)(model))
        for model in (moezoo.from_pretrained(few_bits(name).few, execution, dtype) for dtype in ("stored", "float32"))
    )
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-6 * abs(wanted).max())


def test_evaluation(few_bits):
    cfg = moezoo.compose("data=synthetic", "data.vocab=32", "data.documents=40", "data.eval_sequences=8", "seq_len=16")
    models = [moezoo.from_pretrained(few_bits("fp8").few, dtype=dtype) for dtype in ("stored", "float32")]
    cfg = dataclasses.replace(cfg, model=models[0].config)
    found, wanted = (moezoo.evaluate(model, cfg) for model in models)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)


def test_a_checkpoint_has_the_bits(few_bits, tmp_path):
    """It is restored onto another mesh, and a folder written of it has the first one's tensors."""
    made = few_bits("fp8")
    rules = moezoo.compose("rules=fsdp_ep").rules
    meshes = moezoo.MeshShape(expert=8), moezoo.MeshShape(expert=4)
    one, other = (moezoo.Execution(moezoo.make_mesh(mesh), rules) for mesh in meshes)
    model = moezoo.from_pretrained(made.few, one, "stored")
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    checkpoints.save(1, {"model": model}, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
    checkpoints.close()
    shapes = jax.eval_shape(lambda: model)
    target = jax.tree.map(lambda x, where: x.update(sharding=where), shapes, on_mesh(other).shardings(shapes))
    about = read_about(checkpoints.folder, 1)
    again = restore(checkpoints.folder, 1, about, model=target)["model"]
    assert sum(map(is_stored, jax.tree.leaves(again, is_leaf=is_stored)))
    moezoo.save_pretrained(again, tmp_path / "new", like=made.few)
    assert (tmp_path / "new/model.safetensors").read_bytes() == (made.few / "model.safetensors").read_bytes()
