"""All families against transformers on random tiny models: logits, loss, every gradient, and reading and writing."""

import itertools
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest
from peer_results import assert_agreement, load, results, results_of_transformers, torch, transformers
from tiny_models import (
    CONFIGS,
    QWEN2,
    ROUTER,
    SIGMOID,
    YARN,
    afmoe,
    deepseek_v3,
    exaone,
    gemma4,
    gpt_oss,
    llama4,
    mimo,
    nemotron_h,
    of_type,
    olmoe,
    qwen3,
)

import moezoo
from moezoo.models import DeepSeek, DeepSeekConfig
from moezoo.models.config_json import OLDER_ROPE
from moezoo.moe.router import Choice
from moezoo.nn.rotary import CountScale, Yarn

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 16)).astype(np.int32)
# Their settings change numbers, but no path of gradients that the others do not have: CI compares their logits alone.
LOGITS_ALONE = (
    "mixtral all experts, tied",
    "qwen3 mscales, tied",
    "glm plain",
    "dots plain",
    "ernie every other",
    "olmoe shared heads, tied",
    "gpt_oss layers",
    "gpt_oss no window",
    "v3 two mscales",
    "v3 no mscale",
    "v3 two dense",
    "v3 none dense, tied",
    "v3 all experts",
    "v2",
    "v2 lite, tied",
    "v3.2",
    "mistral 4 plain",
    "kimi linear two dense",
    "gemma4 no cap",
    "qwen3.5 attention first, tied",
    "qwen3.5 attention alone",
    "next equal heads",
    "next plain",
    "qwen2 window, tied",
    "lfm2 biases, untied",
    "lfm2 two dense",
    "llama4 no stretches",
    "mimo plain, tied",
    "exaone groups, tied",
    "afmoe plain, tied",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in LOGITS_ALONE)) for name in CONFIGS]
)
def test_logits_loss_and_gradients(save, peer, name):
    assert_agreement(results(save(name).model, TOKENS, moezoo.Execution()), results_of_transformers(peer(name), TOKENS))


@pytest.mark.parametrize("name", LOGITS_ALONE)
def test_logits(save, peer, name):
    assert_same_logits(save(name).model, peer(name))


def assert_same_logits(ours, theirs):
    """Assert that both libraries' models compute the same logits."""
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS.astype(np.int64))).logits
    found = jax.jit(lambda model: model(TOKENS).logits)(ours)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_reading_is_bit_equal(save, peer, name, tmp_path):
    """Our folder, and the one that transformers writes of it."""
    model, folder = save(name)
    peer(name).save_pretrained(tmp_path / "theirs")
    keys = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert ("rope_parameters" in keys) == hasattr(model.config, "rope_base")
    again = moezoo.from_pretrained(folder)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    sparse = getattr(model.config, "index_topk", None)
    with pytest.warns(UserWarning, match="10 tensors .* sparse attention's index: ") if sparse else nullcontext():
        theirs = moezoo.from_pretrained(tmp_path / "theirs")
    for a, b, wanted in zip(*map(jax.tree.leaves, (again, theirs, model)), strict=True):
        np.testing.assert_array_equal(a, wanted)
        np.testing.assert_array_equal(b, wanted)
        assert a.dtype == b.dtype == wanted.dtype


def assert_equal_logits(save, config, edit, folder):
    """Assert that both libraries compute the same logits after `edit` has changed config.json.

    Rotary settings are in `rope_parameters` alone before it.
    """
    shutil.copytree(save(config).folder, folder)
    file = folder / "config.json"
    mapping = {key: value for key, value in json.loads(file.read_text()).items() if key not in OLDER_ROPE}
    edit(mapping)
    file.write_text(json.dumps(mapping))
    assert_same_logits(moezoo.from_pretrained(folder), load(folder))


# Other spellings of a setting that transformers reads too, and keys with a default that is not ours.
def as_glm(c):
    """Write a config.json of deepseek_v3 as one of glm4_moe_lite."""
    dense = c.pop("first_k_dense_replace")
    types = ["dense"] * dense + ["sparse"] * (c["num_hidden_layers"] - dense)
    c.update(model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], mlp_layer_types=types)


def with_older_rope(c):
    """Write a list in place of `first_k_dense_replace`, and rotary positions under their older keys."""
    rope = c.pop("rope_parameters")
    c.pop("first_k_dense_replace")
    c.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, mlp_layer_types=["dense", "sparse"])


def drop(*keys):
    """Return a function that removes keys."""
    return lambda c: [c.pop(key) for key in keys]


_RELEASED = ("hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon")
SPELLINGS = {
    "theta outside rope_parameters": (
        "mixtral",
        lambda c: c.update(rope_parameters={"rope_type": "default"}, rope_theta=50.0),
    ),
    "older key": ("v3", lambda c: c.update(rope_scaling=c.pop("rope_parameters"))),
    "length outside rope_parameters": ("v3", lambda c: c.update(original_max_position_embeddings=16)),
    "betas swapped": ("v3", lambda c: c["rope_parameters"].update(beta_fast=0.5, beta_slow=4.0)),
    "v3 without scale": ("v3", lambda c: c.pop("routed_scaling_factor")),
    "v2 without scale": ("v2", lambda c: c.pop("routed_scaling_factor")),
    "glm": ("v3 two dense", as_glm),
    "glm plain": ("v3 plain", as_glm),
    "v3.2 list": ("v3.2", with_older_rope),
    "glm 5 shared index": ("glm 5", lambda c: c.update(indexer_types=["full", "shared"], qk_head_dim=14)),
    "mistral 4 older": ("mistral 4", lambda c: c.update(rope_scaling=c.pop("rope_parameters"))),
    "glm share at the top": (
        "glm plain",
        lambda c: (c.update(rope_theta=50.0, partial_rotary_factor=0.25), c.pop("rope_parameters")),
    ),
    "glm half": ("glm plain", lambda c: c["rope_parameters"].pop("partial_rotary_factor")),
    "glm older key": (
        "glm",
        lambda c: c.update(rope_scaling=c.pop("rope_parameters") | {"partial_rotary_factor": 0.25}),
    ),
    "minimax dimensions": (
        "minimax",
        lambda c: (c.update(rope_theta=50.0, rotary_dim=6), c.pop("rope_parameters")),
    ),
    "minimax whole": ("minimax", lambda c: (c.pop("rotary_dim"), c["rope_parameters"].pop("partial_rotary_factor"))),
    "minimax share at the top": (
        "minimax",
        lambda c: (c.update(rope_theta=50.0, partial_rotary_factor=0.25), drop("rope_parameters", "rotary_dim")(c)),
    ),
    "ernie end": ("ernie", lambda c: c.update(moe_layer_end_index=-1)),
    "glm 5 older types": (
        "glm 5",
        lambda c: c.update(layer_types=["deepseek_sparse_attention", "qwen_sparse_attention"]),
    ),
    "dots older types": ("dots", lambda c: c.update(layer_types=["attention"] * c["num_hidden_layers"])),
    "attention factor": ("qwen3 window", lambda c: c["rope_parameters"].update(attention_factor=1.7)),
    "attention factor of v3": ("v3", lambda c: c["rope_parameters"].update(attention_factor=1.7)),
    "yarn as Qwen documents it": (
        "qwen3",
        lambda c: c.update(
            max_position_embeddings=12,
            rope_theta=c.pop("rope_parameters")["rope_theta"],
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        ),
    ),
    "gemma4 older heads": ("gemma4", drop("per_layer_config")),
    "gemma4 older heads, own values": (
        "gemma4 own values",
        lambda c: (c.pop("per_layer_config"), c.update(num_global_key_value_heads=1)),
    ),
    "gemma4 heads by layer": ("gemma4", drop("global_head_dim", "num_global_key_value_heads")),
    "gemma4 last layer": ("gemma4", lambda c: c.update(layer_types=["sliding_attention"] * 2)),
    "mimo as transformers writes it": (
        "mimo",
        lambda c: (
            c.update(sliding_window=c.pop("sliding_window_size") + 1, attention_value_scale=None),
            [c.pop(key) for key in [*c] if key.startswith(("swa_", "add_")) or key in _RELEASED],
        ),
    ),
    "llama4 as first released": (
        "llama4",
        lambda c: (c.update(no_rope_layers=[], no_rope_layer_interval=2, moe_layers=None), c.pop("layer_types")),
    ),
    "llama4 other lists": (
        "llama4 no stretches",
        lambda c: c.update(
            attention_chunk_size=3,
            layer_types=["full_attention", "chunked_attention"],
            moe_layers=[1, 7],
            interleave_moe_layer_step=1,
        ),
    ),
    "v2 pairs": ("v2", lambda c: c.update(rope_interleave=False)),
    # transformers clamps to another key, and only where it reads a text.
    "nemotron steps": (
        "nemotron",
        lambda c: c.update(time_step_limit=[0.7, {"__float__": "Infinity"}], time_step_min=0.7),
    ),
    "nemotron pattern": ("nemotron latent", drop("layers_block_type", "num_hidden_layers")),
    "nemotron older parts": (
        "nemotron",
        lambda c: (
            c.update(layers_block_type=["mamba", "moe", "attention", "mlp"], time_step_limit=[0.0, float("inf")]),
            c.pop("hybrid_override_pattern"),
        ),
    ),
    "nemotron defaults": (
        nemotron_h(groups=1, head_dim=128, router=replace(SIGMOID, scale=1.0)),
        drop(
            *("hybrid_override_pattern", "layers_block_type", "n_group", "topk_group", "routed_scaling_factor"),
            *("head_dim", "conv_kernel", "use_conv_bias", "norm_topk_prob", "n_shared_experts", "mlp_hidden_act"),
        ),
    ),
}


@pytest.mark.parametrize(("name", "edit"), SPELLINGS.values(), ids=SPELLINGS)
def test_reads_settings_as_transformers_does(save, name, edit, tmp_path):
    config = (
        deepseek_v3(yarn=YARN, router=replace(ROUTER, groups=8, kept_groups=4), experts=16)
        if name == "v3"
        else CONFIGS[name]
        if isinstance(name, str)
        else name
    )
    assert_equal_logits(save, config, edit, tmp_path / "m")


def test_missing_limits_are_those_of_transformers(save, tmp_path):
    lengths = {"mixtral": 131072, "v2": 2048, "v3": 4096, "qwen3": 32768, "olmoe": 4096, "glm plain": 131072}
    lengths |= {"llama4": 131072, "qwen2": 32768}
    lengths |= {"minimax": 196608, "hy": 131072, "dots": 2048, "ernie": 131072, "gpt_oss": 131072}
    for name, length in lengths.items():
        shutil.copytree(save(name).folder, tmp_path / name)
        file = tmp_path / name / "config.json"
        mapping = json.loads(file.read_text())
        for key in ("max_position_embeddings", "router_aux_loss_coef"):
            mapping.pop(key, None)
        file.write_text(json.dumps(mapping))
        ours = moezoo.from_pretrained(tmp_path / name).config
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert ours.max_length == theirs.max_position_embeddings == length
        has_loss = hasattr(theirs, "router_aux_loss_coef")
        assert has_loss == (name not in ("v2", "v3", "glm plain", "hy", "dots"))
        assert not has_loss or ours.load_balance == theirs.router_aux_loss_coef


def test_missing_keys_of_deepseeks_kin_are_those_of_transformers(tmp_path):
    """Without keys of the router, of the layers and of lengths."""
    full = DeepSeek.hub.write(deepseek_v3(layers=4, experts=16))
    missing = ("n_group", "topk_group", "routed_scaling_factor", "max_position_embeddings", "first_k_dense_replace")
    missing += ("scoring_func", "topk_method", *OLDER_ROPE)
    plain = {key: value for key, value in full.items() if key not in missing}
    for model_type in sorted(set(DeepSeek.hub.types) - {"deepseek_v2", "kimi_k2"}):
        keys = plain | {"model_type": model_type}
        if model_type == "mistral4":
            yarn = {"rope_type": "yarn", "rope_theta": 50.0, "llama_4_scaling_beta": 0.2, "factor": 2.0}
            keys["rope_parameters"] = yarn | {"original_max_position_embeddings": 64}
        ours = DeepSeek.hub.read(DeepSeekConfig, keys)
        (tmp_path / "config.json").write_text(json.dumps(keys))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        r = ours.router
        assert (r.groups, r.kept_groups, r.scale) == (theirs.n_group, theirs.topk_group, theirs.routed_scaling_factor)
        assert ours.max_length == theirs.max_position_embeddings
        types = getattr(theirs, "mlp_layer_types", None)
        assert ours.dense_layers == (types.count("dense") if types else theirs.first_k_dense_replace)
        assert ours.index_topk == getattr(theirs, "index_topk", None)
        again = DeepSeek.hub.write(ours)["model_type"]
        assert again == ("deepseek_v3" if model_type == "glm4_moe_lite" else model_type)


# Keys of the grouped families that a folder may leave out, call by another name, or fill with unused values.
_IN_BOTH = ("rope_parameters", "norm_topk_prob", "initializer_range", "attention_bias")
_ERNIE_LAYERS = ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")
LEFT_OUT = {
    "qwen3 head size": (qwen3(head_dim=4), drop("head_dim")),
    "qwen3 defaults": (
        qwen3(mlp_layers=(), rope_base=1e4, router=Choice(gates="scores")),
        drop("mlp_only_layers", "decoder_sparse_step", "sliding_window", *_IN_BOTH),
    ),
    "qwen3 other layers": (qwen3(), lambda c: c.update(mlp_only_layers=[1, 9])),
    "qwen3 experts": (qwen3(), lambda c: c.update(num_local_experts=c.pop("num_experts"))),
    "qwen3 yarn length": (
        qwen3(yarn=replace(YARN, mscale=0.0, mscale_all=0.0), max_length=64),
        lambda c: c["rope_parameters"].pop("original_max_position_embeddings"),
    ),
    "qwen2 defaults": (
        of_type("qwen2_moe", **QWEN2, attention_bias="inputs", rope_base=1e4, router=Choice(gates="scores")),
        drop(
            *("qkv_bias", "use_sliding_window", "sliding_window", "layer_types", "norm_topk_prob", "rope_parameters"),
            *("rms_norm_eps", "mlp_only_layers", "decoder_sparse_step"),
        ),
    ),
    "olmoe defaults": (
        olmoe(rope_base=1e4, clip_qkv=None),
        drop("num_key_value_heads", "clip_qkv", *_IN_BOTH),
    ),
    "gpt_oss defaults": (
        gpt_oss(
            heads=16,
            kv_heads=8,
            head_dim=64,
            window=128,
            swiglu_limit=7.0,
            rope_base=150000.0,
            yarn=Yarn(32.0, 4096, mscale=0.0, mscale_all=0.0, truncate=False),
        ),
        drop(
            *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "swiglu_limit", "swiglu_alpha"),
            *("rope_parameters", "initializer_range", "attention_bias", "rms_norm_eps"),
        ),
    ),
    "dots defaults": (
        of_type("dots1", shared_experts=1, rope_base=1e4, router=replace(SIGMOID, scale=1.0, gates="scores")),
        drop("layer_types", "n_group", "topk_group", "routed_scaling_factor", *_IN_BOTH),
    ),
    "glm defaults": (
        of_type("glm4_moe", norm_over="nothing", rope_base=1e4, rotary_dims=4, shared_experts=1, mlp_layers=(0,)),
        drop("first_k_dense_replace", "n_shared_experts", "use_qk_norm", "n_group", "topk_group", *_IN_BOTH),
    ),
    "hy defaults": (
        of_type(
            "hy_v3",
            head_dim=128,
            rope_base=11158840.0,
            router=replace(SIGMOID, scale=2.826),
            shared_experts=1,
            mlp_layers=(0,),
        ),
        drop(
            "head_dim",
            "mlp_layer_types",
            "num_shared_experts",
            "router_scaling_factor",
            "rope_parameters",
            "attention_bias",
        ),
    ),
    "ernie defaults": (
        of_type(
            "ernie4_5_moe",
            norm_over="nothing",
            rope_pairs="interleaved",
            rope_base=5e5,
            mlp_layers=(0,),
            shared_experts=2,
            router=Choice(choice_bias="learned", least_sum=1e-12),
        ),
        drop("moe_num_shared_experts", "moe_norm_min", "rope_parameters", *_ERNIE_LAYERS),
    ),
    "gemma4 defaults": (
        gemma4(layers=7, rope_base=1e4, full_rope_base=1e6, full_values="own", full_kv_heads=2, logit_cap=None),
        drop(
            *("layer_types", "rope_parameters", "num_kv_shared_layers", "attention_k_eq_v", "final_logit_softcapping"),
            *("per_layer_config", "num_global_key_value_heads", "hidden_activation"),
        ),
    ),
    "mimo as released": (
        mimo(full_layers=None, layers=7, rope_base=1e4, full_rope_base=5e6, rotary_dims=2),
        drop(
            *("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "attention_value_scale"),
            *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "attention_bias"),
        ),
    ),
    "exaone defaults": (
        exaone(layers=4, full_layers=(3,), head_dim=4, rope_base=1e4, router=SIGMOID),
        drop(
            *("layer_types", "mlp_layer_types", "first_k_dense_replace", "head_dim", "num_shared_experts"),
            *("rope_parameters", "rms_norm_eps", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
        ),
    ),
    "exaone two spellings": (exaone(mlp_layers=(1,)), lambda c: c.update(first_k_dense_replace=3)),
    "afmoe defaults": (
        afmoe(
            layers=4, full_layers=(3,), kv_heads=4, full_kv_heads=4, shared_experts=2, rope_base=1e4, embeddings="plain"
        ),
        drop(
            *("layer_types", "num_dense_layers", "num_key_value_heads", "mup_enabled", "route_scale"),
            *("num_shared_experts", "rope_parameters", "rms_norm_eps"),
        ),
    ),
    "sarvam defaults": (
        of_type("sarvam_moe", head_dim=64, mlp_layers=(0,), shared_experts=1, rope_base=8e6, load_balance=0.0),
        lambda c: (
            c.update(n_routed_experts=c.pop("num_experts")),
            drop(
                *("head_dim", "first_k_dense_replace", "num_shared_experts", "n_group", "topk_group", "rms_norm_eps"),
                *("routed_scaling_factor", "norm_topk_prob", "use_qk_norm", "rope_parameters"),
            )(c),
        ),
    ),
    "llama4 defaults": (
        llama4(layers=4, plain_layers=None, stretch=8192, query_scale=CountScale(), rope_base=5e5, kv_heads=2),
        drop(
            *("no_rope_layers", "layer_types", "attention_chunk_size", "moe_layers", "interleave_moe_layer_step"),
            *("attn_temperature_tuning", "attn_scale", "floor_scale", "rope_parameters", "use_qk_norm"),
            *("rms_norm_eps", "attention_bias", "initializer_range"),
        ),
    ),
    "olmoe experts": (olmoe(), lambda c: c.update(num_local_experts=c.pop("num_experts"))),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_reads_missing_keys_as_transformers_does(save, name, tmp_path):
    config, edit = LEFT_OUT[name]
    assert_equal_logits(save, config, edit, tmp_path / "m")


def test_packed_documents_of_gemma4_are_read_alone(save, peer):
    """By layers with a window and without: as transformers reads them packed, where positions restart, and alone."""
    model, starts = save("gemma4").model, (0, 9, 16)
    segments = np.array([[1] * 9 + [2] * 7] * 2, np.int32)
    positions = np.array([[*range(9), *range(7)]] * 2, np.int32)
    ids, at = (torch.tensor(x.astype(np.int64)) for x in (TOKENS, positions))
    with torch.no_grad():
        wanted = peer("gemma4")(ids, position_ids=at, use_cache=False).logits  # with a cache nothing is packed
        alone = [peer("gemma4")(ids[:, a:b]).logits for a, b in itertools.pairwise(starts)]
    found = jax.jit(lambda model: model(TOKENS, segments=segments, positions=positions).logits)(model)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found, np.concatenate(alone, 1), rtol=0, atol=1e-4)


def test_stretches_of_packed_documents_begin_with_the_document(save, peer):
    """As the chunks of transformers do where positions restart, and not where the row does."""
    name = "llama4 two experts"  # without the factor on queries, which transformers counts from the start of rows
    model, positions = save(name).model, np.array([[*range(9), *range(7)]] * 2, np.int32)
    segments = np.array([[1] * 9 + [2] * 7] * 2, np.int32)
    ids, at = (torch.tensor(x.astype(np.int64)) for x in (TOKENS, positions))
    with torch.no_grad():
        wanted = peer(name)(ids, position_ids=at, use_cache=False)  # with a cache nothing is packed
    found = jax.jit(lambda model: model(TOKENS, segments=segments, positions=positions).logits)(model)
    np.testing.assert_allclose(found, wanted.logits, rtol=0, atol=1e-4)
