"""Upcycled models against the dense models in transformers, and against transformers' mixtures of the saved folders."""

import json

import jax
import numpy as np
import pytest
from dense_folders import WITH, write_config, write_dense
from peer_results import load, torch, transformers

import moezoo
from moezoo.models import FAMILIES

TOKENS = np.random.default_rng(1).integers(0, 40, (2, 19)).astype(np.int32)  # longer than the windows
CLASSES = {"qwen3": "Qwen3MoeForCausalLM", "mistral": "MixtralForCausalLM", "llama": "MixtralForCausalLM"}


def logits_of(theirs):
    with torch.no_grad():
        return theirs(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("name", WITH)
def test_the_mixture_starts_with_the_logits_of_the_dense_model(name, tmp_path):
    folder = write_dense(tmp_path / "dense", name).folder
    wanted = logits_of(
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    )
    model = moezoo.from_pretrained(folder, upcycle=moezoo.Upcycle(experts=4, per_token=3))
    found = jax.jit(lambda m: m(TOKENS).logits)(model)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    moezoo.save_pretrained(model, tmp_path / "sparse")
    sparse = load(tmp_path / "sparse")
    assert type(sparse).__name__ == CLASSES[name.split()[0]]
    assert sparse.config.num_experts_per_tok == 3
    np.testing.assert_allclose(logits_of(sparse), wanted, rtol=0, atol=1e-5)
    again = moezoo.from_pretrained(tmp_path / "sparse")  # scaled positions are under rope_parameters
    assert again.config == model.config
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", CLASSES)
def test_missing_keys_are_those_of_transformers(kind, tmp_path):
    keys = {"vocab_size": 40, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32}
    write_config(tmp_path, {"model_type": kind, "intermediate_size": 24, **keys})
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    family = FAMILIES["grouped" if kind == "qwen3" else "mixtral"]
    assert family.dense is not None
    ours = family.dense.read(family.config, json.loads((tmp_path / "config.json").read_text()))
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.max_length == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.window == getattr(theirs, "sliding_window", None)
