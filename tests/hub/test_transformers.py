"""All families against transformers, on random tiny models: logits, loss, every gradient, and folders both ways."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from against import agree, load, results, results_of_transformers
from tiny import CONFIGS, ROUTER, YARN, olmoe, qwen3, random_model, third

import moezoo
from moezoo.moe.router import Choice

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 16)).astype(np.int32)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """Our model, and what transformers makes of the folder we write."""
    model = random_model(CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(model, folder)
    return model, load(folder), folder


def test_logits_loss_and_gradients(case):
    model, theirs, _ = case
    agree(results(model, TOKENS, moezoo.Execution()), results_of_transformers(theirs, TOKENS))


def test_round_trip_is_bit_equal(case):
    model, _, folder = case
    again = moezoo.from_pretrained(folder)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_reads_what_transformers_writes(case, tmp_path):
    model, theirs, _ = case
    theirs.save_pretrained(tmp_path / "theirs")
    assert "rope_parameters" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    again = moezoo.from_pretrained(tmp_path / "theirs")
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


# Ways of saying it that transformers reads as well, or keys whose absence means something.
SAID = {
    "theta beside": ("mixtral", lambda c: c.update(rope_parameters={"rope_type": "default"}, rope_theta=50.0)),
    "older key first": ("v3", lambda c: c.update(rope_scaling=c["rope_parameters"] | {"factor": 8.0})),
    "length beside": ("v3", lambda c: c.update(original_max_position_embeddings=16)),
    "betas turned": ("v3", lambda c: c["rope_parameters"].update(beta_fast=0.5, beta_slow=4.0)),
    "no scale": ("v3", lambda c: c.pop("routed_scaling_factor")),
    "no scale of the second": ("v2", lambda c: c.pop("routed_scaling_factor")),
    "pairs of the second": ("v2", lambda c: c.update(rope_interleave=False)),
}


@pytest.mark.parametrize(("name", "edit"), SAID.values(), ids=SAID)
def test_reads_settings_as_transformers_does(name, edit, tmp_path):
    config = (
        third(yarn=YARN, router=replace(ROUTER, groups=8, kept_groups=4), experts=16) if name == "v3" else CONFIGS[name]
    )
    moezoo.save_pretrained(random_model(config), tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    mapping = json.loads(file.read_text())
    edit(mapping)
    file.write_text(json.dumps(mapping))
    wanted = results_of_transformers(load(tmp_path / "m"), TOKENS).logits
    found = moezoo.from_pretrained(tmp_path / "m")(TOKENS).logits
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_limits_are_those_of_transformers_where_nothing_is_said(tmp_path):
    for name, length in (("mixtral", 131072), ("v2", 2048), ("v3", 4096), ("qwen3", 32768), ("olmoe", 4096)):
        moezoo.save_pretrained(random_model(CONFIGS[name]), tmp_path / name)
        file = tmp_path / name / "config.json"
        mapping = json.loads(file.read_text())
        for key in ("max_position_embeddings", "router_aux_loss_coef"):
            mapping.pop(key, None)
        file.write_text(json.dumps(mapping))
        ours, theirs = moezoo.from_pretrained(tmp_path / name).config, load(tmp_path / name).config
        assert ours.max_length == theirs.max_position_embeddings == length
        assert name in ("v2", "v3") or ours.load_balance == theirs.router_aux_loss_coef


def drop(*keys):
    """Leave keys out of a config.json."""
    return lambda c: [c.pop(key) for key in keys]


# Keys of the grouped families that a folder may leave out, name otherwise, or fill with what means nothing.
_SAID_BY_BOTH = ("rope_parameters", "norm_topk_prob", "initializer_range", "attention_bias")
LEFT_OUT = {
    "qwen3 head size": (qwen3(head_dim=4), drop("head_dim")),
    "qwen3 defaults": (
        qwen3(mlp_layers=(), rope_base=1e4, router=Choice(gates="scores")),
        drop("mlp_only_layers", "decoder_sparse_step", "sliding_window", *_SAID_BY_BOTH),
    ),
    "qwen3 other layers": (qwen3(), lambda c: c.update(mlp_only_layers=[1, 9])),
    "qwen3 experts": (qwen3(), lambda c: c.update(num_local_experts=c.pop("num_experts"))),
    "qwen3 yarn length": (
        qwen3(yarn=replace(YARN, mscale=0.0, mscale_all=0.0), max_length=64),
        lambda c: c["rope_parameters"].pop("original_max_position_embeddings"),
    ),
    "olmoe defaults": (
        olmoe(rope_base=1e4, clip_qkv=None),
        drop("num_key_value_heads", "clip_qkv", *_SAID_BY_BOTH),
    ),
    "olmoe experts": (olmoe(), lambda c: c.update(num_local_experts=c.pop("num_experts"))),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_reads_what_is_left_out_as_transformers_does(name, tmp_path):
    config, edit = LEFT_OUT[name]
    moezoo.save_pretrained(random_model(config), tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    mapping = json.loads(file.read_text())
    edit(mapping)
    file.write_text(json.dumps(mapping))
    wanted = results_of_transformers(load(tmp_path / "m"), TOKENS).logits
    found = moezoo.from_pretrained(tmp_path / "m")(TOKENS).logits
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
