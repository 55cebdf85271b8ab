"""Tiny models of all families, in the variants that transformers also has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import moezoo
from moezoo.hub.tensors import tensors
from moezoo.models import (
    DeepSeekConfig,
    Gemma4Config,
    GptOssConfig,
    GroupedConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    Llama4Config,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    Qwen35Config,
    WindowedConfig,
    family_of,
)
from moezoo.models.blueprint import Blueprint
from moezoo.models.config_json import OLDER_ROPE
from moezoo.moe.router import Choice
from moezoo.nn.delta import DeltaSizes
from moezoo.nn.rotary import CountScale, Llama3, QueryScale, Yarn
from moezoo.nn.state_space import StateSpaceSizes

SMALL: dict[str, Any] = {"vocab": 40, "embed": 16, "heads": 4, "expert_mlp": 12, "experts": 8, "experts_per_token": 2}
ROUTER = DeepSeekConfig().router
LFM2_ROUTER = Lfm2MoeConfig().router
SIGMOID = replace(ROUTER, groups=1, kept_groups=1)
# The original length is short, so that the ramp between kept and slowed frequencies falls within the few pairs.
YARN = Yarn(factor=4.0, length=64, beta_fast=4.0, beta_slow=0.5)


def mixtral(**changes: Any) -> MixtralConfig:
    """Return a tiny Mixtral."""
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "rope_base": 100.0, "z_loss": 0.0}
    return MixtralConfig(**{**SMALL, **sizes, **changes})


def qwen3(**changes: Any) -> GroupedConfig:
    """Return a tiny Qwen3-MoE whose second layer has an MLP."""
    sizes: dict[str, Any] = {"layers": 3, "kv_heads": 2, "head_dim": 8, "mlp": 20, "mlp_layers": (1,)}
    return GroupedConfig(**{**SMALL, **sizes, "rope_base": 100.0, **changes})


def of_type(model_type: str, **changes: Any) -> GroupedConfig:
    """Return a tiny model of another type of that family; `changes` has what its type always has."""
    router = {"ernie4_5_moe": Choice(choice_bias="learned", least_sum=0.4)}.get(model_type, SIGMOID)
    mlp = SMALL["expert_mlp"] if model_type in ("minimax_m2", "solar_open") else 20  # no layer of these has an MLP
    sizes: dict[str, Any] = {"mlp": mlp, "mlp_layers": (), "layers": 2, "model_type": model_type, "router": router}
    if model_type == "glm4_moe":
        sizes |= {"load_balance": 0.0001, "load_balance_over": "sequence"}
    return qwen3(**{**sizes, **changes})


QWEN2: dict[str, Any] = {"norm_over": "nothing", "shared_mlp": 10}


def olmoe(**changes: Any) -> OlmoeConfig:
    """Return a tiny OLMoE that clips some of its queries, keys and values."""
    sizes: dict[str, Any] = {"layers": 2, "head_dim": 4, "rope_base": 100.0, "clip_qkv": 0.7, "z_loss": 0.0}
    return OlmoeConfig(**{**SMALL, **sizes, **changes})


def gpt_oss(**changes: Any) -> GptOssConfig:
    """Return a tiny gpt-oss with an odd number of layers, that clamps some of the numbers in its experts."""
    sizes: dict[str, Any] = {"layers": 5, "kv_heads": 2, "head_dim": 8, "window": 5, "swiglu_limit": 0.7}
    yarn = replace(YARN, mscale=0.0, mscale_all=0.0, truncate=False)
    return GptOssConfig(**{**SMALL, **sizes, "yarn": yarn, "rope_base": 100.0, **changes})


def deepseek_v3(**changes: Any) -> DeepSeekConfig:
    """Return a tiny DeepSeek-V3."""
    sizes: dict[str, Any] = {"q_lora": 6, "kv_lora": 5, "nope_dim": 6, "rope_dim": 8, "value_dim": 7, "mlp": 20}
    return DeepSeekConfig(**{**SMALL, **sizes, "layers": 2, **changes})


def deepseek_v2(**changes: Any) -> DeepSeekConfig:
    """Return a tiny DeepSeek-V2; transformers needs an even offset to the rotated part of the latent."""
    return deepseek_v3(**{"kv_lora": 4, "router": Choice(gates="scores"), "load_balance": 0.003, **changes})


def mistral4(**changes: Any) -> DeepSeekConfig:
    """Return a tiny Mistral 4 whose queries have three different factors within the tests' 19 tokens."""
    router = Choice(groups=4, kept_groups=2, group_score="sum_of_top2", scale=1.5)
    scale = QueryScale(beta=0.7, length=8)
    return deepseek_v3(**{"router": router, "query_scale": scale, "yarn": replace(YARN, length=8), **changes})


def kimi_linear(**changes: Any) -> KimiLinearConfig:
    """Return a tiny Kimi Linear, whose mixers by the delta rule have other heads than attention."""
    sizes: dict[str, Any] = {"kv_lora": 5, "nope_dim": 6, "rope_dim": 3, "value_dim": 7, "mlp": 20, "layers": 2}
    delta = DeltaSizes(key_heads=2, value_heads=2, key_dim=5, value_dim=5)
    return KimiLinearConfig(**{**SMALL, **sizes, "delta": delta, "attention_layers": (0,), **changes})


def lfm2(**changes: Any) -> Lfm2MoeConfig:
    """Return a tiny LFM2 whose first layer has a convolution and an MLP."""
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "mlp": 20, "rope_base": 100.0}
    return Lfm2MoeConfig(**{**SMALL, **sizes, "attention_layers": (1,), **changes})


def nemotron_h(heads: int = 4, groups: int = 2, taps: int = 4, **changes: Any) -> NemotronHConfig:
    """Return a tiny Nemotron-H with a layer of each part. No two adjacent dimensions of a layer have the same size."""
    sizes: dict[str, Any] = {"mamba": StateSpaceSizes(heads, 5, groups, 6, taps), "layers": 4, "pattern": "ME*-"}
    sizes |= {"kv_heads": 2, "head_dim": 8, "mlp": 20, "shared_mlp": 10, "router": SIGMOID}
    return NemotronHConfig(**{**SMALL, **sizes, **changes})


def gemma4(**changes: Any) -> Gemma4Config:
    """Return a tiny Gemma 4 whose first layer of two has a window, and whose cap bends some logits."""
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "full_head_dim": 16, "mlp": 20, "window": 5}
    rope = {"rope_base": 100.0, "full_rope_base": 100.0}
    return Gemma4Config(**{**SMALL, **sizes, **rope, "logit_cap": 3.0, **changes})


def llama4(**changes: Any) -> Llama4Config:
    """Return a tiny Llama 4 whose second layer does not rotate; texts have four stretches, and factors of queries."""
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "mlp": 20, "stretch": 5, "plain_layers": (1,)}
    sizes |= {"experts_per_token": 1, "query_scale": CountScale(0.7, 4), "rope_base": 100.0}
    return Llama4Config(**{**SMALL, **sizes, **changes})


def mimo(**changes: Any) -> WindowedConfig:
    """Return a tiny MiMo-V2-Flash: of four layers two have a window, and one an MLP."""
    sizes: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "rotary_dims": 4, "mlp": 20}
    sizes |= {"window": 5, "full_layers": (0, 2), "rope_base": 50.0, "full_rope_base": 100.0}
    return WindowedConfig(**{**SMALL, **sizes, **changes})


def exaone(**changes: Any) -> WindowedConfig:
    """Return a tiny K-EXAONE, whose layers with a window alone rotate."""
    sizes: dict[str, Any] = {"model_type": "exaone_moe", "value_dim": changes.get("head_dim", 8), "value_scale": 1.0}
    sizes |= {"full_kv_heads": 2, "rotary_dims": None, "full_rope_base": None, "sinks": "none", "norm_over": "head"}
    return mimo(**{**sizes, "layers": 3, "full_layers": (1,), "shared_experts": 1, **changes})


def afmoe(**changes: Any) -> WindowedConfig:
    """Return a tiny Trinity, with norms around each part and a gate on attention."""
    sizes: dict[str, Any] = {"attention_gate": "sigmoid", "norms": "around", "embeddings": "scaled"}
    return exaone(**{"model_type": "afmoe", **sizes, **changes})


def qwen35(key_heads: int = 2, value_heads: int = 4, taps: int = 4, **changes: Any) -> Qwen35Config:
    """Return a tiny Qwen3.5 whose second layer attends. No two adjacent dimensions of a layer have the same size."""
    sizes: dict[str, Any] = {"delta": DeltaSizes(key_heads, value_heads, 6, 5, taps), "layers": 2}
    sizes |= {} if "attention_layers" in changes else {"attention_every": 2}
    sizes |= {"kv_heads": 2, "head_dim": 8, "rotary_dims": 4, "shared_mlp": 10, "rope_base": 100.0}
    return Qwen35Config(**{**SMALL, **sizes, **changes})


def qwen3_next(*heads: int, **changes: Any) -> Qwen35Config:
    """Return a tiny Qwen3-Next."""
    return qwen35(*heads, **{"model_type": "qwen3_next", "mlp": 20, **changes})


CONFIGS = {
    "mixtral": mixtral(),
    "mixtral window": mixtral(window=5),
    "mixtral all experts, tied": mixtral(experts_per_token=8, tied_embeddings=True),
    "qwen3": qwen3(attention_bias="all"),
    "qwen3 every other": qwen3(layers=4, moe_every=2, mlp_layers=(), router=Choice(gates="scores")),
    "qwen3 window": qwen3(window=5, mlp_layers=(0, 2), yarn=replace(YARN, mscale=0.0, mscale_all=0.0)),
    "qwen3 mscales, tied": qwen3(yarn=replace(YARN, mscale=0.7, mscale_all=1.3), mlp_layers=(), tied_embeddings=True),
    "qwen2": of_type(
        "qwen2_moe", **QWEN2, attention_bias="inputs", layers=3, mlp_layers=(1,), router=Choice(gates="scores")
    ),
    "qwen2 window, tied": of_type(
        "qwen2_moe",
        **QWEN2,
        window=5,
        layers=4,
        moe_every=2,
        router=Choice(),
        yarn=replace(YARN, mscale=0.0, mscale_all=0.0),
        tied_embeddings=True,
    ),
    "glm": of_type(
        "glm4_moe",
        router=ROUTER,
        attention_bias="inputs",
        rotary_dims=4,
        mlp_layers=(0,),
        shared_experts=2,
        yarn=replace(YARN, length=32, mscale=0.0, mscale_all=0.0),
    ),
    "glm plain": of_type(
        "glm4_moe", norm_over="nothing", rotary_dims=6, shared_experts=1, router=replace(SIGMOID, gates="scores")
    ),
    "sarvam": of_type("sarvam_moe", router=ROUTER, mlp_layers=(0,), shared_experts=2, load_balance=0.0),
    "minimax": of_type("minimax_m2", norm_over="projection", rotary_dims=4, router=replace(SIGMOID, scale=1.0)),
    "hy": of_type("hy_v3", attention_bias="all", layers=3, mlp_layers=(1,), shared_experts=1),
    "dots": of_type("dots1", attention_bias="all", window=5, mlp_layers=(0,), shared_experts=2, router=ROUTER),
    "dots plain": of_type("dots1", kv_heads=4, shared_experts=1, router=replace(SIGMOID, gates="scores")),
    "solar": of_type("solar_open", norm_over="nothing", attention_bias="inputs", shared_experts=2, router=ROUTER),
    "solar plain": of_type(
        "solar_open",
        norm_over="nothing",
        shared_experts=1,
        router=replace(SIGMOID, gates="scores"),
        yarn=replace(YARN, mscale=0.0, mscale_all=0.0),
        tied_embeddings=True,
    ),
    "ernie": of_type("ernie4_5_moe", norm_over="nothing", rope_pairs="interleaved", mlp_layers=(0,), shared_experts=2),
    "ernie every other": of_type(
        "ernie4_5_moe",
        norm_over="nothing",
        rope_pairs="interleaved",
        layers=4,
        moe_every=2,
        mlp_layers=(3,),
        tied_embeddings=True,
    ),
    "olmoe": olmoe(),
    "olmoe shared heads, tied": olmoe(
        kv_heads=2, clip_qkv=None, router=Choice(), attention_bias="all", tied_embeddings=True
    ),
    "gpt_oss": gpt_oss(),
    "gpt_oss layers": gpt_oss(
        layers=4, full_layers=(0, 1), attention_bias="none", yarn=replace(YARN, mscale=0.0, mscale_all=0.0)
    ),
    "gpt_oss no window": gpt_oss(
        window=None, kv_heads=4, swiglu_alpha=0.8, yarn=Yarn(mscale=0.0, mscale_all=0.0, truncate=False)
    ),
    "v3": deepseek_v3(yarn=YARN),
    "v3 two mscales": deepseek_v3(yarn=replace(YARN, mscale=0.7, mscale_all=1.3)),
    "v3 no mscale": deepseek_v3(yarn=replace(YARN, mscale=0.0, mscale_all=0.0)),
    "v3 plain": deepseek_v3(
        q_lora=None, router=replace(ROUTER, groups=1, kept_groups=1, gates="scores"), rope_pairs="halves"
    ),
    "v3 two dense": deepseek_v3(layers=3, dense_layers=2, shared_experts=2),
    "v3 none dense, tied": deepseek_v3(dense_layers=0, tied_embeddings=True),
    "v3 all experts": deepseek_v3(experts_per_token=8, router=replace(ROUTER, kept_groups=4)),
    "v2": deepseek_v2(),
    "v2 groups": deepseek_v2(yarn=YARN, router=Choice(groups=4, kept_groups=2, gates="scores", scale=16.0)),
    "v3.2": deepseek_v3(yarn=YARN, index_topk=19),  # as many tokens as the tests' longest texts have
    "glm 5": deepseek_v3(
        dense_layers=0, index_topk=30, index_pairs="interleaved", router=replace(ROUTER, groups=1, kept_groups=1)
    ),
    "mistral 4": mistral4(dense_layers=0),
    "mistral 4 plain": mistral4(
        q_lora=None,
        rope_pairs="halves",
        router=Choice(gates="scores", group_score="sum_of_top2"),
        yarn=Yarn(),
        shared_experts=2,
    ),
    "kimi linear": kimi_linear(router=replace(ROUTER, scale=2.446)),
    "kimi linear none dense": kimi_linear(
        layers=2,
        attention_layers=None,
        dense_layers=0,
        q_lora=6,
        shared_experts=2,
        router=replace(SIGMOID, gates="scores"),
    ),
    "kimi linear two dense": kimi_linear(
        layers=3,
        dense_layers=2,
        attention_layers=None,
        delta=DeltaSizes(4, 4, 6, 6, 3),
        shared_experts=0,
        router=SIGMOID,
    ),
    "lfm2": lfm2(),
    "lfm2 biases, untied": lfm2(
        taps=4,
        convolution_bias="all",
        dense_layers=0,
        attention_layers=(0,),
        router=replace(LFM2_ROUTER, gates="scores", choice_bias="none", scale=1.7),
        yarn=replace(YARN, mscale=0.0, mscale_all=0.0),
        tied_embeddings=False,
    ),
    "lfm2 two dense": lfm2(layers=3, attention_layers=None, dense_layers=2, taps=1, experts_per_token=1),
    "nemotron": nemotron_h(),
    "nemotron latent": nemotron_h(6, 3, 3, layers=5, pattern="EM*EM", expert_latent=8, router=ROUTER, kv_heads=4),
    "nemotron no bias": nemotron_h(
        4,
        1,
        pattern="E*MM",
        mamba=StateSpaceSizes(4, 5, 1, 6, bias="none"),
        router=replace(SIGMOID, gates="scores"),
    ),
    "gemma4": gemma4(),
    "gemma4 own values": gemma4(
        layers=3, full_layers=(0, 2), full_values="own", full_kv_heads=2, full_rope_share=0.8, tied_embeddings=False
    ),
    "gemma4 no cap": gemma4(full_layers=(0, 1), logit_cap=None, full_head_dim=8, full_kv_heads=2, full_rope_share=1.0),
    "llama4": llama4(),
    "llama4 two experts": llama4(
        layers=3,
        experts_per_token=2,
        mlp_layers=(0,),
        plain_layers=(0,),
        full_layers=(1,),
        norm_turned=False,
        query_scale=CountScale(0.0, 4),
        attention_bias="all",
        llama3=Llama3(4.0, 32, 1.0, 1.0),
        tied_embeddings=True,
    ),
    "llama4 no stretches": llama4(stretch=None, moe_every=2),
    "mimo": mimo(),
    "mimo plain, tied": mimo(
        layers=2,
        full_layers=None,
        full_kv_heads=2,
        kv_heads=4,
        value_dim=8,
        value_scale=1.0,
        rotary_dims=None,
        attention_bias="inputs",
        router=replace(ROUTER, gates="scores"),
        tied_embeddings=True,
    ),
    "exaone": exaone(shared_experts=2),
    "exaone groups, tied": exaone(
        mlp_layers=(1,),
        full_layers=(0, 2),
        kv_heads=4,
        full_kv_heads=4,
        router=replace(ROUTER, gates="scores"),
        tied_embeddings=True,
    ),
    "afmoe": afmoe(shared_experts=2, router=replace(SIGMOID, scale=1.7)),
    "afmoe plain, tied": afmoe(mlp_layers=(), full_layers=(), embeddings="plain", tied_embeddings=True),
    "v2 lite, tied": deepseek_v2(
        yarn=replace(YARN, mscale=0.707, mscale_all=0.707), q_lora=None, shared_experts=2, tied_embeddings=True
    ),
    "qwen3.5": qwen35(),
    "qwen3.5 attention first, tied": qwen35(2, 2, attention_layers=(0,), tied_embeddings=True),
    "qwen3.5 biases": qwen35(
        1, 4, 3, attention_bias="all", rotary_dims=None, yarn=replace(YARN, mscale=0.0, mscale_all=0.0)
    ),
    "qwen3.5 attention alone": qwen35(attention_every=1, kv_heads=4),
    "next": qwen3_next(attention_bias="all", mlp_layers=(0,), router=Choice(gates="scores"), rotary_dims=6),
    "next four heads, tied": qwen3_next(2, 8, 2, attention_layers=(0,), tied_embeddings=True),
    "next equal heads": qwen3_next(3, 3, layers=4, moe_every=2, yarn=replace(YARN, mscale=0.0, mscale_all=0.0)),
    "next plain": qwen3_next(),
}

# One of each kind of config.json.
PLAIN: dict[str, Any] = (
    {
        "mixtral": mixtral(),
        "qwen3": qwen3(),
        "olmoe": olmoe(clip_qkv=None),
        "gpt_oss": gpt_oss(),
        "v2": deepseek_v2(),
        "v3": deepseek_v3(),
        "v3.2": deepseek_v3(index_topk=8),
        "mistral4": mistral4(),
        "qwen3.5": qwen35(),
        "next": qwen3_next(),
        "lfm2": lfm2(),
        "gemma4": gemma4(),
        "llama4": llama4(),
        "mimo": mimo(),
        "exaone": exaone(),
        "afmoe": afmoe(router=SIGMOID),
    }
    | {name: CONFIGS[name] for name in ("qwen2", "glm", "sarvam", "minimax", "hy", "dots", "ernie", "kimi linear")}
    | {name: CONFIGS[name] for name in ("nemotron", "solar")}
)


def keys_of(name: str) -> dict[str, Any]:
    """Return the config.json of a model in `PLAIN`, with rotary settings in one place, which tests change."""
    keys = family_of(PLAIN[name]).hub.write(PLAIN[name])
    return {key: value for key, value in keys.items() if key not in OLDER_ROPE}


def write_zeros(folder: Path, name: str, **keys: Any) -> None:
    """Write the files of a model in `PLAIN` whose numbers are zero, with some keys of config.json changed."""
    (folder / "config.json").write_text(json.dumps(keys_of(name) | keys))
    names = tensors(Blueprint(PLAIN[name]).shapes, family_of(PLAIN[name]).hub)
    save_file({t.name: np.zeros(t.shape, np.float32) for t in names}, folder / "model.safetensors")


def _slowed(path: Any, x: Any) -> Any:
    return jnp.full_like(x, -0.5) if jax.tree_util.keystr(path).endswith(".decay.rate") else x


def random_model(config):
    """Return a model in which every array is random; norms are not one and biases are not zero.

    States of the delta rule decay slowly: sums of large decays would be rounded, in gradients to 5e-4.
    """
    model = jax.jit(lambda: moezoo.build_model(config, key=jax.random.key(1)))()  # one compilation instead of hundreds
    rng = np.random.default_rng(2)
    leaves, structure = jax.tree.flatten(jax.tree_util.tree_map_with_path(_slowed, model))
    noisy = [np.asarray(x) + (0.1 + 0.1 * (x.ndim < 3)) * rng.standard_normal(x.shape, np.float32) for x in leaves]
    return jax.tree.unflatten(structure, [jnp.asarray(x) for x in noisy])
