"""Reading and writing folders: what a good one keeps, and one line for each kind of damage."""

import dataclasses
import importlib.util
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file

import moezoo
from moezoo.hub import arrays, folders
from moezoo.hub.tensors import Tensor
from moezoo.models import DeepSeek, DeepSeekConfig, GptOssConfig, KimiLinearConfig, MixtralConfig, family_of
from moezoo.models.grouped import GroupedConfig
from moezoo.models.grouped_hub import HUB
from moezoo.moe.router import Choice
from moezoo.parallel.axes import Axes, Role
from moezoo.tools.parity.compare import compare

MIXTRAL = MixtralConfig(
    vocab=24, embed=8, layers=2, heads=2, kv_heads=1, head_dim=4, expert_mlp=6, experts=4, z_loss=0.0
)
DEEPSEEK = DeepSeekConfig(
    vocab=24, embed=8, layers=2, heads=2, q_lora=4, kv_lora=4, nope_dim=4, rope_dim=2, value_dim=4, mlp=6, expert_mlp=6
)


@pytest.fixture(scope="module", params=[MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def good(request, tmp_path_factory):
    """Return a model and an undamaged folder of it."""
    model = moezoo.build_model(request.param, key=jax.random.key(0))
    folder = tmp_path_factory.mktemp("good") / "model"
    moezoo.save_pretrained(model, folder)
    return model, folder


@pytest.fixture
def damaged(good, tmp_path):
    """Return a copy of the folder to damage."""
    return shutil.copytree(good[1], tmp_path / "model")


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("text", [None, "{"])
def test_parity_names_a_bad_folder_before_packages_that_are_missing(tmp_path, monkeypatch, text):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if text:
        (tmp_path / "config.json").write_text(text)
    with refused(str(tmp_path), "config.json"):
        compare(tmp_path)


def test_files_of_an_index(good, tmp_path):
    model, _ = good
    moezoo.save_pretrained(model, tmp_path / "many", max_shard_size="2KB")
    names = sorted(p.name for p in (tmp_path / "many").iterdir())
    assert len(names) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {n for n in names if n.endswith(".safetensors")}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(model))
    assert equal(moezoo.from_pretrained(tmp_path / "many"), model)


def test_two_sets_of_weights_are_refused(good, tmp_path):
    """transformers reads the single file, others the index."""
    moezoo.save_pretrained(good[0], tmp_path / "m", max_shard_size="2KB")
    shutil.copy(good[1] / "model.safetensors", tmp_path / "m")
    with refused(str(tmp_path / "m"), "model.safetensors and model.safetensors.index.json", "take one out"):
        moezoo.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("shapes", [((3,),), ((2, 3),), ((2, 3), (2, 4))], ids=str)
def test_a_bias_is_stored_flattened(shapes):
    """If the file joins parts, the numbers of a head are adjacent, as in the weight."""
    parts = [np.random.default_rng(0).standard_normal(shape) for shape in shapes]
    tensor = Tensor("bias", (), Axes(Role.BIAS, (), (), ("heads", "head_dim")), shapes)
    stored = tensor.to_file(parts)
    assert stored.shape == tensor.shape
    np.testing.assert_array_equal(stored, np.concatenate(parts, axis=-1).ravel())
    boxes = [tuple((0, size) for size in shape) for shape in shapes]
    for part, (box, numbers) in enumerate(zip(boxes, parts, strict=True)):
        where = tuple(slice(*interval) for interval in tensor.in_file(part, box))
        assert equal(tensor.from_file(stored.reshape(tensor.dims)[where]), numbers)


def test_dtype_is_as_stored_unless_given(good, tmp_path):
    model, folder = good
    half = moezoo.from_pretrained(folder, dtype=jnp.bfloat16)
    moezoo.save_pretrained(half, tmp_path / "half")
    again = moezoo.from_pretrained(tmp_path / "half")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(again), jax.tree.leaves(model), strict=True):
        bias = jax.tree_util.keystr(path).endswith("router.choice_bias")
        assert a.dtype == (jnp.float32 if bias else jnp.bfloat16)
        np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype))
    stored = load_file(tmp_path / "half" / "model.safetensors")
    kinds = {name: x.dtype for name, x in stored.items()}
    assert {kinds[n] for n in kinds if not n.endswith("bias")} == {np.dtype(ml_dtypes.bfloat16)}
    assert {kinds[n] for n in kinds if n.endswith("bias")} <= {np.dtype(np.float32)}


def test_lands_on_a_mesh(good):
    model, folder = good
    execution = moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(expert=4)), moezoo.compose().rules)
    split: Any = moezoo.from_pretrained(folder, execution)
    assert equal(split, model)
    assert split.stacks[-1].blocks[0].feed_forward.experts.gate.sharding.spec[1] == "expert"


def test_older_keys_of_rotary_positions(damaged, good):
    config = json.loads((damaged / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    (damaged / "config.json").write_text(json.dumps(config))
    again: Any = moezoo.from_pretrained(damaged)
    assert again.config.rope_base == good[0].config.rope_base
    assert equal(again, good[0])


def test_layers_of_multi_token_prediction_are_reported(tmp_path):
    model = moezoo.build_model(DEEPSEEK, key=jax.random.key(0))
    moezoo.save_pretrained(model, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    other = np.ones((300, 300), ml_dtypes.bfloat16)  # more numbers than the model has, and yet not its dtype
    save_file(load_file(file) | {"model.layers.2.eh_proj.weight": other}, file)
    with pytest.warns(
        UserWarning, match=r"1 tensor is not loaded, for multi-token prediction: model\.layers\.2\.eh_proj"
    ):
        assert equal(moezoo.from_pretrained(tmp_path / "m"), model)


def test_a_copy_of_tied_embeddings_is_not_needed(tmp_path):
    """Of two equal tensors one is loaded, from a folder without the second as well; without the first it has no table.

    test_one_line_about_keys has two that differ: transformers 5 then ties nothing, earlier versions ignore the second.
    """
    model = moezoo.build_model(dataclasses.replace(MIXTRAL, tied_embeddings=True), key=jax.random.key(0))
    moezoo.save_pretrained(model, tmp_path / "m")
    table = "model.embed_tokens.weight"
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    spoil_tensors(tmp_path / "m", lambda t: t.update({"lm_head.weight": t[table]}))
    again = moezoo.from_pretrained(tmp_path / "m")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert equal(again, model)
    spoil_tensors(tmp_path / "m", lambda t: t.pop(table))
    with pytest.raises(moezoo.UserError, match=f"1 tensor is missing: {table}; the files have"):
        moezoo.from_pretrained(tmp_path / "m")


def test_the_index_of_sparse_attention_is_reported():
    """That of a layer of the model; one of a further layer goes with that layer."""
    name, own = "model.layers.{}.self_attn.indexer.wk.weight", "model.layers.1.self_attn.o_proj.weight"
    further, stray = {name.format(2), "model.layers.2.enorm.weight"}, name.format(3)
    found = DeepSeek.hub.find_unused({name.format(1), stray, *further}, {own})
    assert found == {name.format(1): "sparse attention's index"} | dict.fromkeys(further, "multi-token prediction")


def test_every_missing_tensor_is_listed(good, damaged):
    def lose(tensors):
        for name in [n for n in tensors if ".experts." in n or n.endswith("norm.weight")]:
            del tensors[name]

    spoil_tensors(damaged, lose)
    with pytest.raises(moezoo.UserError) as caught:
        moezoo.from_pretrained(damaged)
    config, text = good[0].config, str(caught.value)
    layers = f"{getattr(config, 'dense_layers', 0)}-1".replace("1-1", "1")
    many = config.experts * (config.layers - getattr(config, "dense_layers", 0))
    assert f"model.layers.{layers}." in text
    assert f".experts.0-{config.experts - 1}." in text
    assert text.count(f" ({many})") == 3
    assert "model.norm.weight" in text
    assert "model.layers.0-1.input_layernorm.weight (2)" in text


def test_weights_that_are_not_finite_are_named(damaged):
    file = damaged / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = np.nan
    save_file(tensors, file)
    with pytest.warns(UserWarning, match=r"NaN or infinities: lm_head\.weight$"):
        moezoo.from_pretrained(damaged)


@pytest.mark.parametrize("is_sent", [False, True])
def test_weights_that_are_too_large_for_the_dtype_are_named(damaged, monkeypatch, is_sent):
    """Whether they are written where the host's devices have them, or sent to other devices."""
    if is_sent:
        monkeypatch.setattr(arrays.Arriving, "is_on_host", property(lambda array: False))
    spoil_tensors(damaged, lambda tensors: np.put(tensors["lm_head.weight"], 0, 1e5))
    with pytest.warns(UserWarning, match=r"NaN or infinities: lm_head\.weight$"):
        moezoo.from_pretrained(damaged, dtype="float16")


def change(folder, **keys):
    """Change keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def drop(folder, key):
    """Remove a key of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def spoil_tensors(folder, function):
    """Change a folder's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    function(tensors)
    save_file(tensors, file)


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def index(file):
    """Write an index that places a tensor in another file."""

    def write(folder):
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors") | {"lm_head.weight": file}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return write


def replace(name, array):
    """Replace a tensor, or add one."""
    return lambda folder: spoil_tensors(folder, lambda tensors: tensors.update({name: array}))


def refuse(folder, line):
    """Expect one line when the folder is loaded."""
    with pytest.raises(moezoo.UserError, match=line) as caught:
        moezoo.from_pretrained(folder)
    assert "\n" not in str(caught.value)


@by_table(
    r"""
    keys => line
    {"model_type": "mixtral2"} => unknown model_type 'mixtral2'; (mixtral|deepseek_v3) knows all of its keys, which does
    {"model_type": "lama", "num_experts_per_tok": null, "num_local_experts": null, "n_routed_experts": null}
        => unknown model_type 'lama'; moezoo finds no experts in its keys
    {"model_type": null} => config.json has no model_type; expected one of afmoe
    {"hidden_size": null} => config.json: hidden_size=null: expected a whole number
    {"vocab_size": 25} => embed_tokens.weight has shape \[24, 8\], expected \[25, 8\] by
    {"vocab_size": "24"} => config.json: vocab_size=24: expected a whole number such as 4, found text
    {"vocab_size": 24.5} => config.json: vocab_size=24.5: expected a whole number
    {"num_hidden_layers": 3} => tensors are missing: model.layers.2.
    {"num_hidden_layers": 1}
        => tensors are not in the model|first_k_dense_replace=1 must be below num_hidden_layers=1
    {"tie_word_embeddings": true}
        => tie_word_embeddings=true, but model\.embed_tokens\.weight and lm_head\.weight differ; write false
    {"hidden_act": "gelu"} => hidden_act=gelu: this family supports only silu
    {"rope_parameters": {"type": "linear", "factor": 4.0}} => rope_type=linear: this family supports only default
    {"rope_parameters": [1]} => config.json: rope_parameters=\[1\]: expected a table
    {"rope_scaling": {"type": "linear", "factor": 4.0}} => rope_type=linear
    {"rms_norm_eps": "x"} => config.json: rms_norm_eps=x: expected a number such as 0.5, found text
    """
)
def test_one_line_about_keys(damaged, keys, line):
    change(damaged, **json.loads(keys))
    refuse(damaged, line)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json; name a Hugging Face model folder"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: drop(f, "hidden_size"), "config.json: hidden_size is missing"),
        (
            lambda f: spoil_tensors(f, lambda t: t.pop("lm_head.weight")),
            "1 tensor is missing: lm_head.weight; the files",
        ),
        (replace("model.extra", np.ones(2, np.float32)), "1 tensor is not in the model of config.json: model.extra$"),
        (
            replace("model.norm.weight", np.ones(9, np.float32)),
            r"model.norm.weight has shape \[9\], expected \[8\] by config.json",
        ),
        (replace("model.norm.weight", np.ones(8, np.int32)), "model.norm.weight is I32, expected F32, F16, BF16"),
        (cut_short, "model.safetensors cannot be read .*; download it again"),
        (lambda f: (f / "model.safetensors").unlink(), "only safetensors are read"),
        (index("../other.safetensors"), "outside the folder .*; do not trust it"),
        (index("/etc/passwd"), "outside the folder .*; do not trust it"),
        (index("x" * 5000), r"in x{80}, outside the folder .*; do not trust it"),
        (index("gone.safetensors"), "gone.safetensors does not exist"),
    ],
)
def test_one_line(damaged, spoil, line):
    spoil(damaged)
    refuse(damaged, line)


def test_saving_overwrites_nothing(good, tmp_path):
    model, folder = good
    with pytest.raises(moezoo.UserError, match=r"already holds a model, or a part of one; name another folder$"):
        moezoo.save_pretrained(model, folder)
    (tmp_path / "file").touch()
    with pytest.raises(moezoo.UserError, match=r"cannot be written \(Not a directory\)"):
        moezoo.save_pretrained(model, tmp_path / "file" / "x")


def test_a_folder_that_is_a_models_name_is_answered_with_its_download():
    with pytest.raises(moezoo.UserError) as caught:
        moezoo.from_pretrained("org/name")
    download = "a model of this name is downloaded with: hf download org/name --local-dir name"
    assert str(caught.value) == f"org/name: there is no such folder; name a Hugging Face model folder; {download}"


def test_settings_without_a_key_are_reported(good, tmp_path):
    """Those that are read back at another value; others, also in another form, are not."""
    config = MIXTRAL if isinstance(good[0].config, MixtralConfig) else DEEPSEEK
    changed = dataclasses.replace(config, z_loss=0.25, norm_eps=1e-3)
    with pytest.warns(
        UserWarning, match=r"model: transformers has no key for model.z_loss=0.25 \(read back as 0.0\)"
    ) as caught:
        moezoo.save_pretrained(moezoo.build_model(changed, key=jax.random.key(0)), tmp_path / "model")
    assert len(caught) == 1
    assert moezoo.from_pretrained(tmp_path / "model").config == dataclasses.replace(changed, z_loss=0.0)


def test_what_a_folder_does_not_keep():
    """Of sections too. Which layers have experts is read back in another form."""
    router = Choice("sigmoid", group_score="sum_of_top2", choice_bias="learned", bias_rate=0.5)
    config = GroupedConfig(model_type="hy_v3", layers=4, mlp=8, shared_experts=1, moe_every=2, router=router)
    assert HUB.lost(config) == {"router.bias_rate": (0.5, Choice().bias_rate)}


@pytest.mark.parametrize(
    "config", [KimiLinearConfig(layers=8, attention_layers=(3, 7)), GptOssConfig(layers=4, full_layers=(1, 3))]
)
def test_a_list_that_equals_the_default_is_in_the_folder(config):
    assert family_of(config).hub.lost(config) == {}


def test_generation_settings_name_the_tokens_that_end_a_text(tmp_path):
    """Those of config.json hold where they do not."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert folders.end_of_text(tmp_path) == [3]
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert folders.end_of_text(tmp_path) == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert folders.end_of_text(tmp_path) == [5, 3]


def test_the_dtype_is_that_of_most_numbers(tmp_path):
    """Two large tensors of many."""
    model = moezoo.build_model(dataclasses.replace(MIXTRAL, vocab=300), key=jax.random.key(0))
    moezoo.save_pretrained(model, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    large = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({n: x.astype(ml_dtypes.bfloat16 if n in large else x.dtype) for n, x in load_file(file).items()}, file)
    assert {x.dtype for x in jax.tree.leaves(moezoo.from_pretrained(tmp_path / "m"))} == {jnp.dtype("bfloat16")}
