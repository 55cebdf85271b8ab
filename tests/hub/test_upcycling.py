"""Dense folders become mixtures of experts: every array against the tensors of the file, meshes, noise, refusals."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_folders import LLAMA3, WITH, write_config, write_dense
from few_bit_folders import FP8_CONFIG, Case, encode_fp8, is_projection, write_few_bits, write_folder
from refusals import refused

import moezoo
from moezoo.hub.folders import hub_model_config
from moezoo.models import FAMILIES, build_model
from moezoo.nn.containers import as_arrays
from moezoo.nn.rotary import Llama3
from moezoo.parallel.mesh_execution import on_mesh

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12)).astype(np.int32)
THREE = moezoo.Upcycle(experts=3, per_token=2, seed=5)
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return a function from a name in `WITH` to its folder."""
    made: dict[str, Any] = {}

    def find(name):
        if name not in made:
            made[name] = write_dense(tmp_path_factory.mktemp("dense") / "m", name)
        return made[name]

    return find


def parts(model):
    """Return the feed-forward part of all layers."""
    ((block,),) = (stack.blocks for stack in model.stacks)
    return block.feed_forward


def mlp(folder, layer, ours):
    """Return a matrix of the file, [inputs, outputs]."""
    return folder.tensors[f"model.layers.{layer}.mlp.{NAMES[ours]}.weight"].T


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_every_expert_is_the_mlp_and_each_byte_is_read_once(dense, name, reads):
    folder = dense(name)
    model = moezoo.from_pretrained(folder.folder, upcycle=THREE)
    for ours in NAMES:
        array = getattr(parts(model).experts, ours)
        for layer, expert in itertools.product(range(2), range(3)):
            np.testing.assert_array_equal(array[layer, expert], mlp(folder, layer, ours))
    fresh = jax.jit(lambda: parts(build_model(model.config, key=jax.random.key(5))).router)()
    assert_equal(parts(model).router, fresh)
    (ranges,) = (sorted(found, key=lambda run: run.start) for found in reads.values())
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    assert sum(map(len, ranges)) == sum(tensor.nbytes for tensor in folder.tensors.values())
    # One expert with the only gate is the dense model.
    one = moezoo.from_pretrained(folder.folder, upcycle=moezoo.Upcycle(experts=1, per_token=1))
    logits = jax.jit(lambda m: m(TOKENS).logits)
    np.testing.assert_allclose(logits(model), logits(one), rtol=0, atol=1e-5)


def execution_of(rules, **mesh):
    return moezoo.Execution(moezoo.make_mesh(moezoo.MeshShape(**mesh)), moezoo.compose(f"rules={rules}").rules)


def test_noise_differs_by_expert_and_layer_and_not_by_mesh(dense):
    folder = dense("qwen3")
    eight = moezoo.Upcycle(experts=8, noise=0.1)
    model = moezoo.from_pretrained(folder.folder, upcycle=eight)
    drawn = []
    for ours in NAMES:
        for layer, expert in itertools.product(range(2), range(8)):
            copy = mlp(folder, layer, ours)
            noise = np.asarray(getattr(parts(model).experts, ours)[layer, expert] - copy, np.float64) / copy.std()
            assert abs(noise.mean()) < 0.03
            assert noise.std() == pytest.approx(0.1, rel=0.15)
            drawn.append(noise.ravel())
    correlation = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlation).max() < 0.25  # 48 x 47 / 2 pairs of 384 numbers: 5 deviations
    assert np.asarray(parts(model).router.weight).std() > 0.1
    for execution in (execution_of("fsdp_ep", expert=8), execution_of("tensor", expert=2, tensor=2)):
        there = moezoo.from_pretrained(folder.folder, execution, upcycle=eight)
        assert_equal(there, model)
        for array, sharding in zip(
            jax.tree.leaves(there), jax.tree.leaves(on_mesh(execution).shardings(there)), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_few_bits_are_widened_or_kept(tmp_path):
    plain = write_dense(tmp_path / "plain", "qwen3").folder
    table = FP8_CONFIG | {"weight_block_size": [8, 8]}
    few = write_few_bits(plain, tmp_path, Case(None, is_projection, encode_fp8((8, 8)), table))
    wide = moezoo.from_pretrained(few.wide, dtype=jnp.bfloat16, upcycle=THREE)
    assert_equal(moezoo.from_pretrained(few.few, dtype=jnp.bfloat16, upcycle=THREE), wide)
    kept = moezoo.from_pretrained(few.few, dtype="stored", upcycle=THREE)
    assert parts(kept).experts.gate.values.shape == (2, 3, 16, 24)
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), as_arrays(kept))
    assert_equal(parts(experts).experts, parts(wide).experts)
    with refused("upcycle.noise=0.5: model.layers.0.mlp.", "stays in few bits", "dtype=bfloat16"):
        moezoo.from_pretrained(few.few, dtype="stored", upcycle=dataclasses.replace(THREE, noise=0.5))


def test_older_folders_of_llama_hold_frequencies(dense, tmp_path):
    folder = dense("llama")
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.array([1, 50**-0.5], np.float32)}
    write_folder(tmp_path / "m", folder.tensors | more, folder.keys)
    with pytest.warns(UserWarning, match="1 tensor is not loaded, for rotary frequencies: model.layers.0"):
        moezoo.from_pretrained(tmp_path / "m", upcycle=THREE)


REFUSED = {
    "qwen3 use_sliding_window": ({"max_window_layers": 1, "sliding_window": 4}, "only one window for all 2 layers"),
    "mistral attention_bias": (True, "supports only false"),
    "llama attention_bias": (True, "supports only false"),
    "llama mlp_bias": (True, "supports only false"),
    "llama hidden_act": ("gelu", "supports only silu"),
    "mistral rope_scaling": ({"rope_type": "yarn", "factor": 8.0}, "rope_type=yarn: this family supports only"),
    "llama rope_scaling": ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
    "llama rope_parameters": (
        LLAMA3 | {"high_freq_factor": 0.5},
        "low_freq_factor=1.0 must be at most high_freq_factor=0.5",
    ),
    "qwen3 rope_scaling": ({"rope_type": "dynamic", "factor": 8.0}, "rope_type=dynamic: this family supports only"),
    "mistral head_dim": (7, "head_dim=7 must be at least 2 and a multiple of 2"),
    "qwen3 num_hidden_layers": (3, "15 tensors are missing: model.layers.2"),
    "llama intermediate_size": (20, "shape [24, 16], expected [20, 16] by config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mixture_cannot_express_is_refused_by_its_key(dense, tmp_path, case):
    (name, key), (value, why) = case.split(), REFUSED[case]
    folder = dense(name)
    others = {key: True, **value} if key == "use_sliding_window" else {key: value}
    write_folder(tmp_path / "m", folder.tensors, folder.keys | others)
    with refused(str(tmp_path / "m"), why):
        moezoo.from_pretrained(tmp_path / "m", upcycle=THREE)


def test_dense_folders_without_upcycling_and_others_with_it_are_refused(dense, tmp_path):
    folder = dense("llama").folder
    for read in (moezoo.from_pretrained, hub_model_config):
        with refused(f"{folder}/config.json: model_type=llama is a dense model", "upcycle.experts=8"):
            read(folder)
    (tmp_path / "m").mkdir()
    write_config(tmp_path / "m", {"model_type": "mixtral"})
    with refused(str(tmp_path), "model_type=mixtral is a mixture of experts, and upcycle is for llama, mistral, qwen3"):
        moezoo.from_pretrained(tmp_path / "m", upcycle=THREE)
    write_config(tmp_path / "m", {"model_type": "lama"})
    with refused(str(tmp_path), "unknown model_type 'lama'; ", "llama"):
        moezoo.from_pretrained(tmp_path / "m", upcycle=THREE)
    with refused("upcycle.per_token=3 exceeds upcycle.experts=2; choose at most 2"):
        moezoo.Upcycle(experts=2, per_token=3)
    with refused("upcycle.noise=0.5 but upcycle.experts=0", "write upcycle.experts=8"):
        moezoo.Upcycle(noise=0.5)
    with refused("mesh.expert=8", "model.experts=3"):
        moezoo.from_pretrained(folder, execution_of("fsdp_ep", expert=8), upcycle=THREE)


_FULL: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
# config.json as published, and our settings.
PUBLISHED = {
    "Qwen3-0.6B": (
        _FULL
        | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        | {"rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960}
        | {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28, "attention_bias": False}
        | {"attention_dropout": 0.0, "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645},
        {"head_dim": 128, "expert_mlp": 3072, "rope_base": 1e6, "tied_embeddings": True, "window": None},
    ),
    "Mistral-7B-v0.1": (
        _FULL
        | {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-05}
        | {"rope_theta": 10000.0, "max_position_embeddings": 32768, "sliding_window": 4096},
        {"head_dim": 128, "expert_mlp": 14336, "window": 4096, "rope_base": 1e4, "kv_heads": 8},
    ),
    "Llama-2-7b": (
        _FULL
        | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-05}
        | {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
        {"head_dim": 128, "window": None, "rope_base": 1e4, "kv_heads": 32, "max_length": 4096, "norm_eps": 1e-5},
    ),
    "Llama-3.2-1B": (
        _FULL
        | {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}
        | {"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072, "mlp_bias": False}
        | {"tie_word_embeddings": True, "attention_bias": False, "eos_token_id": [128001, 128008, 128009]}
        | {"rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}},
        {"head_dim": 64, "kv_heads": 8, "rope_base": 5e5, "llama3": Llama3(32.0, 8192, 1.0, 4.0)},
    ),
    "the first Llama": (
        _FULL
        | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-06, "max_sequence_length": 2048},
        {"head_dim": 128, "kv_heads": 32, "rope_base": 1e4, "max_length": 2048, "norm_eps": 1e-6},
    ),
    "SmolLM2-135M": (
        _FULL
        | {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-05}
        | {"rope_theta": 100000, "rope_interleaved": False, "is_llama_config": True, "tie_word_embeddings": True}
        | {"max_position_embeddings": 8192, "mlp_bias": False, "attention_bias": False, "pretraining_tp": 1},
        {"head_dim": 64, "kv_heads": 3, "rope_base": 1e5, "tied_embeddings": True, "norm_eps": 1e-5},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    mapping, wanted = PUBLISHED[name]
    family = FAMILIES["grouped" if mapping["model_type"] == "qwen3" else "mixtral"]
    assert family.dense is not None
    config = family.dense.read(family.config, mapping)
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert (config.embed, config.layers) == (mapping["hidden_size"], mapping["num_hidden_layers"])
    family.hub.write(moezoo.Upcycle(experts=8).widen(config))  # a folder of the mixture can hold them


def test_all_names_are_of_types_that_are_read():
    assert {name.split()[0] for name in WITH} == {kind for f in FAMILIES.values() if f.dense for kind in f.dense.types}
