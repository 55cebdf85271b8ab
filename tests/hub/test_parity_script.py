"""A folder compared with transformers module by module; the comparison names the module with a planted fault."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import operator
import re
import shutil
from typing import Any

import equinox as eqx
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, YARN

import moezoo
from moezoo.cli.command import execute
from moezoo.moe.router import Choice
from moezoo.nn.rotary import Rotary
from moezoo.tools.parity import compare as parity
from moezoo.tools.parity import peer
from moezoo.tools.parity.command import COMMAND

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")


@pytest.fixture(scope="session")
def folders(save):
    """Return a function from a name in CONFIGS to its folder."""
    return lambda name: save(name).folder


# A folder of each kind, and modules in addition to the embedding, the last norm, the logits and three of each layer.
KINDS = {
    "mixtral window": {"block_sparse_moe", "block_sparse_moe.gate", "block_sparse_moe.experts"},
    "qwen3 every other": {"self_attn.q_norm", "self_attn.k_norm", "mlp", "mlp.gate", "mlp.experts"},
    "minimax": {"self_attn.q_norm", "block_sparse_moe", "block_sparse_moe.gate", "block_sparse_moe.experts"},
    "hy": {"self_attn.k_norm", "mlp.router.gate", "mlp.experts", "mlp.shared_mlp"},
    "ernie": {"mlp", "mlp.gate", "mlp.experts", "mlp.shared_experts"},
    "olmoe": {"self_attn.q_norm", "mlp.gate", "mlp.experts"},
    "gpt_oss": {"mlp", "mlp.router", "mlp.experts"},
    "v3": {"self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "mlp", "mlp.gate", "mlp.shared_experts"},
    "v3 two dense": {"mlp", "mlp.gate", "mlp.experts", "mlp.shared_experts"},
    "glm 5": {"self_attn.q_a_layernorm", "mlp.gate", "mlp.experts"},
    "kimi linear": {"self_attn.kv_a_layernorm", "mlp", "block_sparse_moe.gate", "block_sparse_moe.shared_experts"},
    "mistral 4": {"self_attn.q_a_layernorm", "mlp.gate", "mlp.experts", "mlp.shared_experts"},
    "v2 groups": {"self_attn.q_a_layernorm", "mlp.gate", "mlp.experts"},
    "v2 lite, tied": {"self_attn.kv_a_layernorm", "mlp", "mlp.gate", "mlp.experts", "mlp.shared_experts"},
}


@pytest.mark.parametrize("name", KINDS)
def test_agrees(folders, name):
    result = parity.compare(folders(name))
    assert result.first is None, result
    assert result.worst.difference < 1e-5
    names = [row.theirs for row in result.rows]
    assert names[0] == "model.embed_tokens"
    assert names[-2:] == ["model.norm", "lm_head"]
    inside = [m[1] for m in map(re.compile(r"model\.layers\.\d+\.(.*)").match, names) if m]
    assert KINDS[name] | {"input_layernorm", "self_attn", "post_attention_layernorm"} <= set(inside)
    layers = [int(m[1]) for m in map(re.compile(r"model\.layers\.(\d+)$").match, names) if m]
    assert layers == list(range(CONFIGS[name].layers))
    assert len(set(names)) == len(names)
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm")
    order = [*(f"model.layers.1.{part}" for part in parts), "model.layers.1", "model.norm"]
    assert [name for name in names if name in order] == order
    assert ("self_attn.q_a_layernorm" in inside) == (getattr(CONFIGS[name], "q_lora", None) is not None)
    assert str(result).endswith(
        f"all {len(names)} modules agree within 1e-04 {result.verdict[result.verdict.find('(') :]}"
    )


@pytest.mark.parametrize(("name", "modules"), [("nemotron", 18), ("sarvam", 20), ("afmoe", 36), ("exaone", 30)])
def test_agrees_where_modules_are_other_ones_in_memory(folders, name, modules):
    """Their names, the order of their dimensions, or where the embedding is multiplied."""
    result = parity.compare(folders(name))
    assert result.first is None, result
    assert result.worst.difference < 1e-5
    assert len(result.rows) == modules


def find(path: str):
    """Return a function that finds a part of a model, below `block` in its last stack, below `dense` in its first."""
    start, _, rest = path.partition(".")
    stack = {"block": -1, "dense": 0}.get(start)
    if stack is None:
        return operator.attrgetter(path)
    return lambda model: operator.attrgetter(rest)(model.stacks[stack].blocks[0])


def change_part(path: str, function: Any):
    """Return a function that changes one part of a model."""
    return lambda model: eqx.tree_at(find(path), model, replace_fn=function)


def scale(path: str, by: float = 1.01):
    return change_part(path, lambda x: x * by)


def scale_second_layer(path: str, by: float):
    return change_part(path, lambda x: x.at[1].multiply(1 + by))


def change_settings(path: str, **values: Any):
    """Return a function that changes static settings of one module."""

    def change(model):
        module = find(path)(model)
        # `tree_at` replaces leaves only, and static fields are not leaves.
        other = object.__new__(type(module))
        for name, value in (vars(module) | values).items():
            object.__setattr__(other, name, value)
        return eqx.tree_at(find(path), model, other)

    return change


UNSCALED = Choice(groups=4, kept_groups=2, gates="scores", scale=1.0)
EXPERTS, CHOICE_BIAS = "block.feed_forward.experts.down", "block.feed_forward.router.choice_bias"
HALVES = Rotary(8, 1e4, YARN, "halves")


# The folder, the change to our model after loading, and the module to name. The first layer of "v3" is dense.
@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("mixtral", scale("embedding.weight"), "model.embed_tokens"),
        (
            "mixtral",
            scale_second_layer("block.feed_forward_norm.scale", 0.01),
            "model.layers.1.post_attention_layernorm",
        ),
        ("mixtral", change_settings("block.attention_norm", epsilon=0.01), "model.layers.0.input_layernorm"),
        ("mixtral", scale_second_layer("block.attention.query", 0.1), "model.layers.1.self_attn"),
        ("mixtral", change_settings("block.attention", rotary=Rotary(8, 1e4)), "model.layers.0.self_attn"),
        ("mixtral window", change_settings("block.attention", window=6), "model.layers.0.self_attn"),
        (
            "mixtral",
            scale_second_layer("block.feed_forward.router.weight", 0.01),
            "model.layers.1.block_sparse_moe.gate",
        ),
        (
            "mixtral",
            change_part(EXPERTS, lambda x: x.at[1, 2].multiply(1.01)),
            "model.layers.1.block_sparse_moe.experts",
        ),
        ("mixtral", scale("unembedding.norm.scale"), "model.norm"),
        ("mixtral", scale("unembedding.weight"), "lm_head"),
        ("v3", change_part(CHOICE_BIAS, lambda x: x.at[0, ::2].add(0.5)), "model.layers.1.mlp.gate"),
        ("v2 groups", change_settings("block.feed_forward.router", choice=UNSCALED), "model.layers.1.mlp.gate"),
        (
            "v3",
            change_part("block.attention.query_down", lambda x: x.at[:, 0].multiply(1.1)),
            "input of model.layers.1.self_attn.q_a_layernorm",
        ),
        ("v3", scale("block.attention.kv_norm.scale"), "model.layers.1.self_attn.kv_a_layernorm"),
        ("v3", change_settings("block.attention", rotary=HALVES), "model.layers.1.self_attn"),
        ("v3", scale("block.feed_forward.shared.up"), "model.layers.1.mlp.shared_experts"),
        ("v3", scale("dense.feed_forward.gate", 1.1), "model.layers.0.mlp"),
    ],
)
def test_names_what_was_changed(folders, monkeypatch, name, change, expected):
    load = parity.from_pretrained
    monkeypatch.setattr(parity, "from_pretrained", lambda *a, **k: change(load(*a, **k)))
    result = parity.compare(folders(name))
    line = r"first divergence: (.+) \(ours: (.+)\), \d\.\de[+-]\d\d relative, expected at most 1e-04(;.*)?"
    found = re.fullmatch(line, result.verdict)
    assert found is not None, result.verdict
    assert found[1] == expected
    assert result.first is not None
    assert found[2] == result.first.ours
    assert "  <-" in str(result)


def test_nan_diverges(folders, monkeypatch):
    load = parity.from_pretrained
    spoil = change_part("block.attention.out", lambda x: x.at[1, 0].set(float("nan")))
    monkeypatch.setattr(parity, "from_pretrained", lambda *a, **k: spoil(load(*a, **k)))
    result = parity.compare(folders("mixtral"))
    assert result.first is not None
    assert result.first.theirs == "model.layers.1.self_attn"
    assert "nan relative" in result.verdict


def test_rerouted_tokens_are_counted():
    row = parity.ModuleDifference(
        "model.layers.1.mlp.gate", "stacks[0].blocks[0][1].feed_forward.router", 0.5, 1e-7, rerouted=1
    )
    one = parity.Comparison((row,), 1e-4, 100).verdict
    assert "1 of 100 tokens go to other experts" in one
    assert one.endswith("try another seed")
    many = parity.Comparison((dataclasses.replace(row, rerouted=50),), 1e-4, 100).verdict
    assert many.endswith("50 of 100 tokens go to other experts")


def test_an_untested_window_is_reported():
    row = parity.ModuleDifference("lm_head", "unembedding.weight", 1e-6, None)
    assert "window of 16 was not tested" in parity.Comparison((row,), 1e-4, 16, unreached=16).verdict


@pytest.fixture
def call(capsys):
    """Call the command; return its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as caught:
            execute(COMMAND, arguments, "moezoo parity")
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_command_agrees_and_diverges(folders, call):
    code, out, err = call(f"folder={folders('mixtral')}", "tokens=5")
    assert (code, err) == (0, "")
    assert re.search(r"\n\nall 17 modules agree within 1e-04 \(worst: .*\)\n$", out)
    code, out, err = call(f"folder={folders('mixtral')}", "tokens=5", "tolerance=1e-9")
    assert (code, err) == (1, "")
    assert "\nfirst divergence: model.layers.0.input_layernorm (ours: stacks[0].blocks[0][0].attention_norm), " in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "folder is missing; write folder=FOLDER"),
        (["folder=nowhere"], "nowhere: there is no such folder; name a Hugging Face model folder"),
        (["foldr=nowhere"], "foldr: there is no key 'foldr'; did you mean 'folder'?"),
        (["folder=nowhere", "tokens=0"], "tokens=0 must be at least 1"),
    ],
)
def test_refuses_in_one_line(call, arguments, line):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {line}")
    assert len(err.splitlines()) == 1


def test_help(call):
    code, out, _ = call("--help")
    assert code == 0
    for part in ("folder=FOLDER", "tokens=16", "tolerance=1e-4", "seed=0", "[peers]", "Exit codes"):
        assert part in out


def test_peers_that_are_not_installed(folders, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(moezoo.UserError, match=r"^not installed: torch; .*moezoo\[peers\]"):
        parity.compare(folders("mixtral"))


def test_what_transformers_cannot_load(folders, tmp_path):
    folder = shutil.copytree(folders("v3"), tmp_path / "kimi")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "architectures": ["Kimi"]}))
    with pytest.raises(moezoo.UserError) as caught:
        parity.compare(folder)
    assert str(caught.value) == (
        f"{folder}: transformers {importlib.metadata.version('transformers')} has no class for model_type=kimi_k2, so "
        "there is nothing to compare it with; a copy of the folder with model_type=deepseek_v3 in config.json can be, "
        "as it computes the same"
    )


def test_few_bits_that_transformers_does_not_have(few_bits):
    """It would take the bits for numbers of another shape, and report that."""
    folder = few_bits("nvfp4 of ModelOpt").few
    with refused(f"{folder}: transformers cannot load it (it has no quant_method=modelopt; compare what convert "):
        parity.compare(folder)


def test_few_bits_that_only_a_file_of_modelopt_states(few_bits, tmp_path):
    folder = shutil.copytree(few_bits("nvfp4 of ModelOpt").few, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    line = "it does not read hf_quant_config.json, which alone states nvfp4 of ModelOpt; compare what convert "
    with refused(f"{folder}: transformers cannot load it ({line}"):
        parity.compare(folder)


def test_few_bits_are_widened(few_bits, monkeypatch):
    """Products of compressed-tensors round activations, which moezoo does not: a right folder would diverge."""
    monkeypatch.setattr("transformers.CompressedTensorsConfig", dict)
    assert peer._widening(few_bits("fp8 channels").few) == {"quantization_config": {"dequantize": True}}


def test_layers_of_multi_token_prediction_are_left_out(folders, tmp_path):
    folder = shutil.copytree(folders("v3"), tmp_path / "more")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.2.eh_proj.weight": tensors["lm_head.weight"]}, file)
    with pytest.warns(UserWarning, match="1 tensor is not loaded"):
        assert parity.compare(folder).first is None
