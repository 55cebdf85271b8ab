"""Folders of Qwen3.5 and Qwen3-Next: inside a model for images, with tensors of further layers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import by_table, refused
from safetensors.numpy import load_file, save_file
from tiny_models import keys_of, qwen3_next, qwen35, random_model

import moezoo
from moezoo.models import Qwen35, Qwen35Config
from moezoo.nn.delta import DeltaSizes
from moezoo.tools.parity import compare as parity

PEERS = "transformers is not installed: pip install -e '.[peers]'"
VISION = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 8, "patch_size": 2}
VISION |= {"out_hidden_size": 16, "num_position_embeddings": 4}
# Of the layers for multi-token prediction, whose names begin neither with `model.` nor with `model.language_model.`.
FURTHER = {"mtp.fc.weight": np.arange(6.0, dtype=np.float32).reshape(2, 3), "mtp.layers.0.mlp.gate.weight": np.ones(2)}


def edit_files(folder: Path, edit: Any) -> dict[str, np.ndarray]:
    """Write what `edit` makes of the tensors of a folder, and return it."""
    file = folder / "model.safetensors"
    tensors = edit(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("packed", [True, False])
def test_inside_a_model_for_images(tmp_path, packed):
    """A folder of transformers' own model, trained here: all modules agree, and all other tensors are as they were."""
    transformers = pytest.importorskip("transformers", reason=PEERS)
    pytest.importorskip("torch", reason=PEERS)
    config = qwen35(layers=3)
    inner = Qwen35.hub.write(config)
    inner["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    outer = transformers.Qwen3_5MoeConfig(text_config=inner, vision_config=VISION)
    theirs: Any = transformers.AutoModelForImageTextToText.from_config(outer)
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=not packed)
    source = edit_files(tmp_path / "theirs", lambda tensors: tensors | FURTHER)
    assert ("model.language_model.layers.0.mlp.experts.gate_up_proj" in source) == packed
    with pytest.warns(UserWarning, match="not loaded, for ") as caught:
        model = moezoo.from_pretrained(tmp_path / "theirs")
    purposes = [str(each.message).partition(" for ")[2].partition(":")[0] for each in caught]
    assert purposes == ["images", "multi-token prediction"]
    assert model.config == config
    model = jax.tree.map(lambda x: 1.5 * x, model)
    with pytest.warns(UserWarning, match="are from there, for "):
        moezoo.save_pretrained(model, tmp_path / "ours", like=tmp_path / "theirs")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    kept = {name for name in source if ".visual." in name} | FURTHER.keys()
    assert written.keys() == source.keys()
    assert len(kept) > len(FURTHER)
    assert {name for name in source if np.array_equal(source[name], written[name]) and source[name].any()} <= kept
    assert all(np.array_equal(source[name], written[name]) for name in kept)
    with pytest.warns(UserWarning, match="not loaded, for "):
        result = parity.compare(tmp_path / "ours")
    assert result.first is None, result
    found = {row.theirs.removeprefix("model.language_model.") for row in result.rows}
    assert {"layers.0.linear_attn", "layers.0.linear_attn.in_proj_b", "layers.1.self_attn", "lm_head"} <= found


def test_packed_documents_are_read_alone():
    """By the whole model: convolutions, states and attention end with a document."""
    model = random_model(qwen35())
    tokens, lengths = np.random.default_rng(5).integers(0, 40, (1, 13)), (6, 1, 4)
    segments, positions = np.zeros((2, 1, 13), np.int32)
    alone, at = np.zeros((1, 13, 40), np.float32), 0
    for number, length in enumerate(lengths, 1):
        part = np.s_[:, at : at + length]
        segments[part], positions[part] = number, np.arange(length)
        alone[part] = model(tokens[part]).logits
        at += length
    packed = model(tokens, segments=segments, positions=positions).logits
    np.testing.assert_allclose(packed[:, :at], alone[:, :at], rtol=0, atol=2e-5)


def stored(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder of the model."""
    moezoo.save_pretrained(model, folder)
    return load_file(folder / "model.safetensors")


def rows_of(array: Any, heads: int) -> np.ndarray:
    """Return a weight [inputs, heads, ...] as [heads, outputs of a head, inputs]."""
    return np.moveaxis(np.asarray(array).reshape(len(array), heads, -1), 0, -1)


def test_the_tensors_of_the_delta_rule(tmp_path):
    """By hand: two key heads, of which each serves two value heads."""
    model = random_model(qwen3_next(layers=1))
    mixer = jax.tree.map(lambda x: x[0], model.stacks[0].blocks[0].attention)
    q, k, v, z = (rows_of(x, 2) for x in (mixer.query, mixer.key, mixer.value, mixer.gate.weight))
    found, at = stored(model, tmp_path / "next"), "model.layers.0.linear_attn."
    by_key_head = np.concatenate([q[0], k[0], v[0], z[0], q[1], k[1], v[1], z[1]])
    np.testing.assert_array_equal(found[f"{at}in_proj_qkvz.weight"], by_key_head)
    b, a = np.asarray(mixer.strength).T, np.asarray(mixer.decay.weight).T
    np.testing.assert_array_equal(found[f"{at}in_proj_ba.weight"], np.concatenate([b[:2], a[:2], b[2:], a[2:]]))
    filters = [np.asarray(each.weight).reshape(4, -1).T for each in mixer.convolutions]
    np.testing.assert_array_equal(found[f"{at}conv1d.weight"], np.concatenate(filters)[:, None])
    object.__setattr__(model, "config", qwen35(layers=1))
    found = stored(model, tmp_path / "3.5")
    flat = np.concatenate([x.reshape(-1, 16) for x in (q, k, v)])
    np.testing.assert_array_equal(found[f"{at}in_proj_qkv.weight"], flat)
    np.testing.assert_array_equal(found[f"{at}in_proj_z.weight"], z.reshape(-1, 16))
    np.testing.assert_array_equal(found[f"{at}in_proj_b.weight"], b)
    np.testing.assert_array_equal(found[f"{at}in_proj_a.weight"], a)


def test_queries_and_output_gates_are_one_tensor(tmp_path):
    model = random_model(qwen35(layers=1, attention_every=1, attention_bias="all"))
    attention = jax.tree.map(lambda x: x[0], model.stacks[0].blocks[0].attention)
    found = stored(model, tmp_path / "m")
    both = np.concatenate([rows_of(x, 4) for x in (attention.query, attention.gate)], axis=1).reshape(-1, 16)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"], both)
    biases = np.concatenate([attention.query_bias, attention.gate_bias], axis=1).reshape(-1)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.bias"], biases)


@pytest.mark.parametrize("kind", [qwen35, qwen3_next])
@pytest.mark.parametrize("split", ["heads", "head_dim"])
def test_each_device_reads_its_part(tmp_path, kind, split):
    """Of tensors in which heads of several arrays take turns; parts of heads too."""
    model = random_model(kind(delta=DeltaSizes(2, 4, 6, 8)))
    moezoo.save_pretrained(model, tmp_path / "m")
    rules = moezoo.Rules("by_heads", {split: ("fsdp",), "embed": ("expert",)}, {}, ("fsdp", "expert"), ())
    execution = moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(fsdp=2, expert=2)), rules)
    again = moezoo.from_pretrained(tmp_path / "m", execution)
    for ours, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@by_table(
    """
    name => keys => line
    qwen3.5 => {"linear_num_value_heads": 3} => linear_num_value_heads=3 ... linear_num_key_heads=2 ... multiple of 2
    qwen3.5 => {"layer_types": ["linear_attention", "sliding_attention"]}
        => layer_types names 'sliding_attention': expected full_attention or linear_attention
    qwen3.5 => {"layer_types": ["linear_attention"]} => layer_types names 1 layers, but num_hidden_layers=2
    qwen3.5 => {"full_attention_interval": 3} => full_attention_interval=3 contradicts layer_types=
    qwen3.5 => {"norm_topk_prob": false} => norm_topk_prob=false ... only true
    qwen3.5 => {"attn_output_gate": false} => attn_output_gate=false ... only true
    qwen3.5 => {"linear_conv_kernel_dim": 0} => linear_conv_kernel_dim=0 ... at least 1
    next => {"mlp_only_layers": [0, 1]} => ... leave no layer of num_hidden_layers=2 with experts
    """
)
def test_refused(tmp_path, name, keys, line):
    (tmp_path / "config.json").write_text(json.dumps(keys_of(name) | json.loads(keys)))
    with refused(f"{tmp_path}/config.json: {line}"):
        moezoo.from_pretrained(tmp_path)


def test_lists_and_intervals():
    """Which layers attend: a list, or every one after so many; without keys every fourth."""
    keys = {name: value for name, value in keys_of("qwen3.5").items() if name not in ("layer_types",)}
    keys |= {"num_hidden_layers": 8}

    def read(**changes: Any) -> tuple[int, Any]:
        config = Qwen35.hub.read(Qwen35Config, keys | changes)
        return config.attention_every, config.attention_layers

    full, linear = "full_attention", "linear_attention"
    assert read(full_attention_interval=None) == (4, None)
    assert read(full_attention_interval=3) == (3, None)
    assert read(full_attention_interval=None, layer_types=[linear, full] * 4) == (2, None)
    assert read(full_attention_interval=None, layer_types=[full, linear] * 4) == (4, (0, 2, 4, 6))
    assert read(full_attention_interval=9, layer_types=[linear] * 8) == (9, None)


def test_settings_that_no_folder_of_qwen3_5_has(tmp_path):
    for changes, key in (({"mlp_layers": (0,)}, "mlp_layers"), ({"moe_every": 2}, "mlp_layers")):
        with refused(f"model.{key}=", "a qwen3_5_moe folder of it would be read as"):
            moezoo.save_pretrained(moezoo.build_model(qwen35(**changes), key=jax.random.key(0)), tmp_path / "m")
