"""Folders with the published tensor names, made here without moezoo, against NumPy.

Loading and saving read one table of names. An error in it, such as gate for up, is the same in both directions, so a
folder that moezoo wrote cannot show it. Here every name is written down a second time, with its part in the published
formulas, and the oracle computes the logits.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import oracle
import oracle_convolution
import oracle_deepseek
import oracle_delta
import pytest
from oracle_grouped import Grouped, clamped_swiglu, with_experts
from oracle_rope import Rope
from oracle_router import Choice, softmax
from safetensors.numpy import load_file, save_file
from tape import stack

import moezoo
from moezoo.hub.folders import hub_model_config

VOCAB, EMBED, HEADS, KV_HEADS, MLP, EXPERT_MLP, EXPERTS, CHOSEN = 20, 16, 4, 2, 14, 10, 4, 2
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 7)
NO_LOSSES = oracle.Losses(0.0, 0.0, "batch")

# The array of the oracle that a tensor holds, and how to cut it out of the tensor [outputs, inputs].
Parts = Mapping[str, Callable[[np.ndarray], np.ndarray]]


class Tensor(NamedTuple):
    """A published tensor: its shape, and the oracle's arrays in it."""

    shape: tuple[int, ...]
    parts: Parts


class Published(NamedTuple):
    """A family as published: config.json, tensors outside layers are common; tensors of each layer; the formulas.

    `final_norm`: the name of the last norm, which is not the same everywhere.
    """

    config: dict[str, Any]
    layers: list[dict[str, Tensor]]
    family: oracle.Family
    final_norm: str = "model.norm.weight"


def vector(size: int, name: str) -> Tensor:
    """Return a tensor of one dimension."""
    return Tensor((size,), {name: np.copy})


def matrix(outputs: int, inputs: int, name: str) -> Tensor:
    """Return a matrix that the oracle has as [inputs, outputs]."""
    return Tensor((outputs, inputs), {name: np.transpose})


def to_heads(heads: int, size: int, name: str, inputs: int = EMBED) -> Tensor:
    """Return a projection to heads, whose rows are head by head."""
    return Tensor((heads * size, inputs), {name: lambda w: w.T.reshape(inputs, heads, size)})


def from_heads(size: int) -> Tensor:
    """Return the projection of all heads' results, whose columns are head by head."""
    return Tensor((EMBED, HEADS * size), {"out": lambda w: w.T.reshape(HEADS, size, EMBED)})


def swiglu(prefix: str, width: int, names: tuple[str, str, str], ours: str = "") -> dict[str, Tensor]:
    """Return the matrices of down(silu(gate x) * up x); `names` are those of gate, up and down."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {
        gate: matrix(width, EMBED, f"{ours}gate"),
        up: matrix(width, EMBED, f"{ours}up"),
        down: matrix(EMBED, width, f"{ours}down"),
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NORMS = {
    "input_layernorm.weight": vector(EMBED, "attention_norm"),
    "post_attention_layernorm.weight": vector(EMBED, "feed_forward_norm"),
}


def with_router(prefix: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """Return the router and the experts."""
    experts = [swiglu(f"{prefix}.experts.{expert}", EXPERT_MLP, names) for expert in range(EXPERTS)]
    router = {f"{prefix}.gate.weight": matrix(EXPERTS, EMBED, "router")}
    return router | {name: tensor for expert in experts for name, tensor in expert.items()}


def grouped_attention(size: int) -> dict[str, Tensor]:
    """Return norms and projections of grouped-query attention."""
    return NORMS | {
        "self_attn.q_proj.weight": to_heads(HEADS, size, "query"),
        "self_attn.k_proj.weight": to_heads(KV_HEADS, size, "key"),
        "self_attn.v_proj.weight": to_heads(KV_HEADS, size, "value"),
        "self_attn.o_proj.weight": from_heads(size),
    }


COMMON = {"vocab_size": VOCAB, "hidden_size": EMBED, "num_attention_heads": HEADS, "num_experts_per_tok": CHOSEN}
COMMON |= {"rms_norm_eps": 0.01, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False}
GROUPED: dict[str, Any] = {
    "experts_per_token": CHOSEN,
    "norm_eps": 0.01,
    "losses": NO_LOSSES,
    "window": None,
    "clip": None,
}


def mixtral() -> Published:
    """Jiang et al., 2024: w1 is the gate, w3 the other factor, w2 the way down."""
    config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": EXPERT_MLP, "num_local_experts": EXPERTS, "rope_theta": 100.0, "sliding_window": 3}
    layer = grouped_attention(6) | with_router("block_sparse_moe", ("w1", "w3", "w2"))
    settings: dict[str, Any] = GROUPED | {"window": 3}
    family = Grouped(**settings, sparse=(True, True), rope=Rope(100.0), choice=softmax(True))
    return Published(config, [layer] * 2, family)


def qwen3() -> Published:
    """Yang et al., 2025, with biases, and an MLP in the second of three layers."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "num_experts": EXPERTS}
    config |= {"rope_theta": 100.0, "norm_topk_prob": True, "attention_bias": True, "mlp_only_layers": [1]}
    attention = grouped_attention(6) | {
        "self_attn.q_norm.weight": vector(6, "query_norm"),
        "self_attn.k_norm.weight": vector(6, "key_norm"),
    }
    attention |= with_biases(6)
    sparse = attention | with_router("mlp", PROJECTIONS)
    dense = attention | swiglu("mlp", MLP, PROJECTIONS, "dense_")
    kinds = with_experts(3, without=[1])
    family = Grouped(**GROUPED, sparse=kinds, rope=Rope(100.0), choice=softmax(True))
    return Published(config, [sparse, dense, sparse], family)


def olmoe() -> Published:
    """Muennighoff et al., 2024: norms over all heads together; gates that do not sum to 1."""
    config = {"model_type": "olmoe", "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "num_experts": EXPERTS}
    config |= {"intermediate_size": EXPERT_MLP, "rope_theta": 100.0, "clip_qkv": 0.9, "norm_topk_prob": False}
    size = EMBED // HEADS
    layer = grouped_attention(size) | with_router("mlp", PROJECTIONS)
    layer |= {"self_attn.q_norm.weight": vector(HEADS * size, "query_norm")}
    layer |= {"self_attn.k_norm.weight": vector(KV_HEADS * size, "key_norm")}
    settings: dict[str, Any] = GROUPED | {"clip": 0.9}
    family = Grouped(**settings, sparse=(True, True), rope=Rope(100.0), choice=softmax(False))
    return Published(config, [layer] * 2, family)


def biases(size: int) -> dict[str, Tensor]:
    """Return the biases of queries, keys and values."""
    found = {}
    for letter, name, heads in (("q", "query", HEADS), ("k", "key", KV_HEADS), ("v", "value", KV_HEADS)):
        by_head = {f"{name}_bias": lambda b, heads=heads: b.reshape(heads, size)}
        found[f"self_attn.{letter}_proj.bias"] = Tensor((heads * size,), by_head)
    return found


def all_experts(*names: str, size: tuple[int, ...]) -> Tensor:
    """Return a tensor of all experts with the arrays of the oracle in it, which alternate along the last dimension."""
    step = len(names)
    parts = {name: lambda w, at=at: w[..., at::step] for at, name in enumerate(names)}
    return Tensor((EXPERTS, *size[:-1], step * size[-1]), parts)


def with_biases(size: int) -> dict[str, Tensor]:
    """Return the biases of grouped-query attention."""
    return {"self_attn.o_proj.bias": vector(EMBED, "out_bias"), **biases(size)}


def gpt_oss() -> Published:
    """OpenAI, 2025: one tensor holds all experts of a layer, in which gate and up alternate; the first has a window."""
    config = {"model_type": "gpt_oss", "num_hidden_layers": 3, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": EXPERT_MLP, "num_local_experts": EXPERTS, "sliding_window": 3, "swiglu_limit": 0.9}
    config |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}}
    config["rope_scaling"] |= {"truncate": False, "original_max_position_embeddings": 16}
    config["rope_theta"] = 100.0
    layer = (
        grouped_attention(6)
        | with_biases(6)
        | {
            "self_attn.sinks": vector(HEADS, "sinks"),
            "mlp.router.weight": matrix(EXPERTS, EMBED, "router"),
            "mlp.router.bias": vector(EXPERTS, "router_bias"),
            "mlp.experts.gate_up_proj": all_experts("gate", "up", size=(EMBED, EXPERT_MLP)),
            "mlp.experts.gate_up_proj_bias": all_experts("gate_bias", "up_bias", size=(EXPERT_MLP,)),
            "mlp.experts.down_proj": all_experts("down", size=(EXPERT_MLP, EMBED)),
            "mlp.experts.down_proj_bias": all_experts("down_bias", size=(EMBED,)),
        }
    )
    settings: dict[str, Any] = GROUPED | {"window": 3}
    family = Grouped(
        **settings,
        sparse=(True,) * 3,
        rope=Rope(100.0, False, 4.0, 16, 4.0, 0.5, 0.0, 0.0, False),
        choice=softmax(True),
        full=(1,),
        activation=clamped_swiglu(1.702, 0.9),
    )
    return Published(config, [layer] * 3, family)


SIGMOID = Choice("sigmoid", 1, 1, "max", True, 1.0)
NO_BIAS = np.zeros((1, EXPERTS))  # that of the folder takes its place


def glm4() -> Published:
    """GLM-4.5 Team, 2025: a layer with an MLP, one with experts and shared experts; a third of each head is rotated."""
    config = {"model_type": "glm4_moe", "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "n_routed_experts": EXPERTS}
    config |= {"rope_theta": 100.0, "partial_rotary_factor": 1 / 3, "attention_bias": True, "use_qk_norm": True}
    config |= {"first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "n_group": 2}
    attention = grouped_attention(6) | biases(6)
    attention |= {f"self_attn.{at}_norm.weight": vector(6, f"{n}_norm") for at, n in (("q", "query"), ("k", "key"))}
    sparse = attention | with_router("mlp", PROJECTIONS)
    sparse |= swiglu("mlp.shared_experts", 2 * EXPERT_MLP, PROJECTIONS, "shared_")
    sparse["mlp.gate.e_score_correction_bias"] = vector(EXPERTS, "bias")
    choice = Choice("sigmoid", 2, 1, "sum_of_top2", True, 1.7)
    family = Grouped(**GROUPED, sparse=(False, True), rope=Rope(100.0), choice=choice, rotary_dims=2, bias=NO_BIAS)
    return Published(config, [attention | swiglu("mlp", MLP, PROJECTIONS, "dense_"), sparse], family)


def minimax() -> Published:
    """MiniMax, 2025: Mixtral's names, norms over all heads together; the bias is beside the router."""
    config = {"model_type": "minimax_m2", "num_hidden_layers": 1, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": EXPERT_MLP, "num_local_experts": EXPERTS, "rope_theta": 100.0, "rotary_dim": 4}
    layer = grouped_attention(6) | with_router("block_sparse_moe", ("w1", "w3", "w2"))
    layer |= {"self_attn.q_norm.weight": vector(HEADS * 6, "query_norm")}
    layer |= {"self_attn.k_norm.weight": vector(KV_HEADS * 6, "key_norm")}
    layer["block_sparse_moe.e_score_correction_bias"] = vector(EXPERTS, "bias")
    family = Grouped(**GROUPED, sparse=(True,), rope=Rope(100.0), choice=SIGMOID, rotary_dims=4, bias=NO_BIAS)
    return Published(config, [layer], family)


def hunyuan() -> Published:
    """Tencent, 2026: the router is a part of a part."""
    config = {"model_type": "hy_v3", "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "num_experts": EXPERTS}
    config |= {"rope_theta": 100.0, "num_shared_experts": 2, "router_scaling_factor": 1.7}
    attention = grouped_attention(6)
    attention |= {f"self_attn.{at}_norm.weight": vector(6, f"{n}_norm") for at, n in (("q", "query"), ("k", "key"))}
    sparse = attention | with_router("mlp", PROJECTIONS)
    sparse["mlp.router.gate.weight"] = sparse.pop("mlp.gate.weight")
    sparse |= swiglu("mlp.shared_mlp", 2 * EXPERT_MLP, PROJECTIONS, "shared_")
    sparse["mlp.expert_bias"] = vector(EXPERTS, "bias")
    choice = replace(SIGMOID, scale=1.7)
    family = Grouped(**GROUPED, sparse=(False, True), rope=Rope(100.0), choice=choice, bias=NO_BIAS)
    return Published(config, [attention | swiglu("mlp", MLP, PROJECTIONS, "dense_"), sparse], family)


def ernie() -> Published:
    """Baidu, 2025: no norms of heads, neighbours turn together, and the bias is a row."""
    config = {"model_type": "ernie4_5_moe", "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "head_dim": 6}
    config |= {"intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "moe_num_experts": EXPERTS}
    config |= {"rope_theta": 100.0, "moe_num_shared_experts": 1, "moe_norm_min": 0.6}
    attention = grouped_attention(6)
    sparse = attention | with_router("mlp", PROJECTIONS)
    sparse |= swiglu("mlp.shared_experts", EXPERT_MLP, PROJECTIONS, "shared_")
    sparse["mlp.moe_statics.e_score_correction_bias"] = Tensor((1, EXPERTS), {"bias": lambda b: b[0]})
    choice = Choice("softmax", 1, 1, "max", True, 1.0, least_sum=0.6)
    family = Grouped(**GROUPED, sparse=(False, True), rope=Rope(100.0, True), choice=choice, bias=NO_BIAS)
    return Published(config, [attention | swiglu("mlp", MLP, PROJECTIONS, "dense_"), sparse], family)


KV_LORA, Q_LORA, NOPE, ROPE, VALUE = 5, 8, 6, 4, 6  # plain keys are as wide as values, so that they can be confused


def key_and_value() -> Tensor:
    """Return kv_b_proj: for each head the rows of the plain key, then those of the value."""
    both = to_heads(HEADS, NOPE + VALUE, "both", KV_LORA)
    cut = both.parts["both"]
    return Tensor(both.shape, {"key_up": lambda w: cut(w)[..., :NOPE], "value_up": lambda w: cut(w)[..., NOPE:]})


def deepseek(model_type: str) -> Published:
    """DeepSeek-AI, 2024, V2 and V3: one layer with an MLP, one with experts and a shared expert of double width."""
    third = model_type == "deepseek_v3"
    config = {"model_type": model_type, "num_hidden_layers": 2, "first_k_dense_replace": 1, "kv_lora_rank": KV_LORA}
    config |= {"q_lora_rank": Q_LORA if third else None, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    config |= {"v_head_dim": VALUE, "intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "n_group": 2}
    config |= {"n_routed_experts": EXPERTS, "n_shared_experts": 2, "topk_group": 1, "routed_scaling_factor": 1.7}
    config |= {"norm_topk_prob": third, "topk_method": "noaux_tc" if third else "group_limited_greedy"}
    config |= {"rope_theta": 100.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}}
    config["rope_scaling"] |= {"mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 16}
    attention = NORMS | {
        "self_attn.kv_a_proj_with_mqa.weight": matrix(KV_LORA + ROPE, EMBED, "kv_down"),
        "self_attn.kv_a_layernorm.weight": vector(KV_LORA, "kv_norm"),
        "self_attn.kv_b_proj.weight": key_and_value(),
        "self_attn.o_proj.weight": from_heads(VALUE),
    }
    if third:
        attention["self_attn.q_a_proj.weight"] = matrix(Q_LORA, EMBED, "query_down")
        attention["self_attn.q_a_layernorm.weight"] = vector(Q_LORA, "query_norm")
        attention["self_attn.q_b_proj.weight"] = to_heads(HEADS, NOPE + ROPE, "query_up", Q_LORA)
    else:
        attention["self_attn.q_proj.weight"] = to_heads(HEADS, NOPE + ROPE, "query")
    sparse = attention | with_router("mlp", PROJECTIONS)
    sparse |= swiglu("mlp.shared_experts", 2 * EXPERT_MLP, PROJECTIONS, "shared_")
    if third:
        sparse["mlp.gate.e_score_correction_bias"] = vector(EXPERTS, "bias")
    choice = Choice("sigmoid", 2, 1, "sum_of_top2", True, 1.7) if third else Choice("softmax", 2, 1, "max", False, 1.7)
    family = oracle_deepseek.DeepSeek(
        experts_per_token=CHOSEN,
        dense_layers=1,
        nope_dim=NOPE,
        rope=Rope(100.0, True, 4.0, 16, 4.0, 0.5, 0.7, 1.3),
        choice=choice,
        bias=np.zeros((1, EXPERTS)),  # V3's is that of the folder
        bias_rate=0.0,
        norm_eps=0.01,
        losses=NO_LOSSES,
    )
    return Published(config, [attention | swiglu("mlp", MLP, PROJECTIONS, "dense_"), sparse], family)


HEAD, DELTA_HEADS, TAPS = 3, 2, 3


def delta_rule() -> dict[str, Tensor]:
    """Return the mixer of Kimi Linear by the delta rule."""
    wide = DELTA_HEADS * HEAD
    heads = lambda w: w.reshape(DELTA_HEADS, HEAD)  # noqa: E731
    found = NORMS | {
        "self_attn.A_log": Tensor((1, 1, DELTA_HEADS, 1), {"delta_decay_rate": np.ravel}),
        "self_attn.dt_bias": Tensor((wide,), {"delta_decay_bias": heads}),
        "self_attn.b_proj.weight": matrix(DELTA_HEADS, EMBED, "delta_strength"),
        "self_attn.o_norm.weight": vector(HEAD, "delta_norm"),
        "self_attn.o_proj.weight": Tensor(
            (EMBED, wide), {"delta_out": lambda w: w.T.reshape(DELTA_HEADS, HEAD, EMBED)}
        ),
    }
    for letter, ours in (("f", "decay"), ("g", "gate")):
        found[f"self_attn.{letter}_a_proj.weight"] = matrix(HEAD, EMBED, f"delta_{ours}_down")
        found[f"self_attn.{letter}_b_proj.weight"] = to_heads(DELTA_HEADS, HEAD, f"delta_{ours}_up", HEAD)
    for letter, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        found[f"self_attn.{letter}_proj.weight"] = to_heads(DELTA_HEADS, HEAD, f"delta_{ours}")
        # The filter of each channel; the last tap is that of the token itself.
        taps = lambda w: w.reshape(DELTA_HEADS, HEAD, TAPS).transpose(2, 0, 1)  # noqa: E731
        found[f"self_attn.{letter}_conv1d.weight"] = Tensor((wide, 1, TAPS), {f"delta_{ours}_filter": taps})
    return found


def kimi_linear() -> Published:
    """Kimi Team, 2025: the delta rule in layers 1, which has an MLP, and 3; attention without rotation in layer 2."""
    config = {"model_type": "kimi_linear", "num_hidden_layers": 3, "first_k_dense_replace": 1, "kv_lora_rank": KV_LORA}
    config |= {"q_lora_rank": None, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    config |= {"intermediate_size": MLP, "moe_intermediate_size": EXPERT_MLP, "num_experts": EXPERTS}
    config |= {"num_experts_per_token": CHOSEN, "num_shared_experts": 2, "num_expert_group": 2, "topk_group": 1}
    config |= {"routed_scaling_factor": 1.7, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
    config |= {"use_grouped_topk": True, "moe_layer_freq": 1, "mla_use_nope": True, "model_max_length": 64}
    config |= {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 72, "num_nextn_predict_layers": 0}
    config["linear_attn_config"] = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": DELTA_HEADS}
    config["linear_attn_config"] |= {"head_dim": HEAD, "short_conv_kernel_size": TAPS}
    attention = NORMS | {
        "self_attn.q_proj.weight": to_heads(HEADS, NOPE + ROPE, "query"),
        "self_attn.kv_a_proj_with_mqa.weight": matrix(KV_LORA + ROPE, EMBED, "kv_down"),
        "self_attn.kv_a_layernorm.weight": vector(KV_LORA, "kv_norm"),
        "self_attn.kv_b_proj.weight": key_and_value(),
        "self_attn.o_proj.weight": from_heads(VALUE),
    }
    sparse = with_router("block_sparse_moe", ("w1", "w3", "w2"))
    sparse |= swiglu("block_sparse_moe.shared_experts", 2 * EXPERT_MLP, PROJECTIONS, "shared_")
    sparse["block_sparse_moe.gate.e_score_correction_bias"] = vector(EXPERTS, "bias")
    family = oracle_delta.KimiLinear(
        experts_per_token=CHOSEN,
        dense_layers=1,
        nope_dim=NOPE,
        rope=None,
        choice=Choice("sigmoid", 2, 1, "sum_of_top2", True, 1.7),
        bias=np.zeros((2, EXPERTS)),  # that of the folder
        bias_rate=0.0,
        norm_eps=0.01,
        losses=NO_LOSSES,
        attends=(1,),
    )
    dense = delta_rule() | swiglu("mlp", MLP, PROJECTIONS, "dense_")
    return Published(config, [dense, attention | sparse, delta_rule() | sparse], family)


def lfm2() -> Published:
    """Liquid AI, 2025: gated convolutions in layers 0, which has an MLP, and 2; attention with norms in layer 1."""
    config = {"model_type": "lfm2_moe", "num_hidden_layers": 3, "num_dense_layers": 1, "intermediate_size": MLP}
    config |= {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": TAPS, "conv_bias": True}
    config |= {"num_key_value_heads": KV_HEADS, "moe_intermediate_size": EXPERT_MLP, "num_experts": EXPERTS}
    config |= {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "rope_theta": 100.0}
    config |= {"norm_eps": 0.01, "rms_norm_eps": None}  # the key that others have
    size = EMBED // HEADS
    norms = {
        "operator_norm.weight": vector(EMBED, "attention_norm"),
        "ffn_norm.weight": vector(EMBED, "feed_forward_norm"),
    }
    attention = norms | {
        "self_attn.q_proj.weight": to_heads(HEADS, size, "query"),
        "self_attn.k_proj.weight": to_heads(KV_HEADS, size, "key"),
        "self_attn.v_proj.weight": to_heads(KV_HEADS, size, "value"),
        "self_attn.out_proj.weight": from_heads(size),
        "self_attn.q_layernorm.weight": vector(size, "query_norm"),
        "self_attn.k_layernorm.weight": vector(size, "key_norm"),
    }
    # What goes into the filter is the first part times the third; the second is a factor of what comes out.
    parts = dict(zip(("input_gate", "output_gate", "value"), range(0, 3 * EMBED, EMBED), strict=True))
    convolution = norms | {
        "conv.in_proj.weight": Tensor(
            (3 * EMBED, EMBED),
            {f"convolution_{part}": lambda w, at=at: w[at : at + EMBED].T for part, at in parts.items()},
        ),
        "conv.in_proj.bias": Tensor(
            (3 * EMBED,),
            {f"convolution_{part}_bias": lambda b, at=at: b[at : at + EMBED] for part, at in parts.items()},
        ),
        "conv.conv.weight": Tensor((EMBED, 1, TAPS), {"convolution_filter": lambda w: w[:, 0].T}),
        "conv.conv.bias": vector(EMBED, "convolution_filter_bias"),
        "conv.out_proj.weight": matrix(EMBED, EMBED, "convolution_out"),
        "conv.out_proj.bias": vector(EMBED, "convolution_out_bias"),
    }
    sparse = with_router("feed_forward", ("w1", "w3", "w2"))
    sparse["feed_forward.expert_bias"] = vector(EXPERTS, "bias")
    settings: dict[str, Any] = GROUPED | {"sparse": (False, True, True), "attends": (1,), "rope": Rope(100.0)}
    family = oracle_convolution.Lfm2(**settings, choice=Choice("sigmoid", 1, 1, "max", True, 1.7, added=1e-6))
    dense = convolution | swiglu("feed_forward", MLP, ("w1", "w3", "w2"), "dense_")
    return Published(config, [dense, attention | sparse, convolution | sparse], family, "model.embedding_norm.weight")


FAMILIES = {
    "mixtral": mixtral,
    "qwen3": qwen3,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "glm4": glm4,
    "minimax": minimax,
    "hunyuan": hunyuan,
    "ernie": ernie,
    "v2": lambda: deepseek("deepseek_v2"),
    "v3": lambda: deepseek("deepseek_v3"),
    "kimi linear": kimi_linear,
    "lfm2": lfm2,
}
OUTSIDE = {
    "model.embed_tokens.weight": Tensor((VOCAB, EMBED), {"embedding": np.copy}),
    "lm_head.weight": matrix(VOCAB, EMBED, "unembedding"),
}


def draw(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Return random numbers; vectors, which are norms and biases, are near 1."""
    noise = rng.standard_normal(tensor.shape, np.float32)
    return 1 + 0.3 * noise if len(tensor.shape) == 1 else np.float32(0.4) * noise


def folder_and_parameters(published: Published) -> tuple[dict[str, np.ndarray], oracle.Parameters]:
    """Return random tensors by their published names, and the same numbers by the names of the oracle."""
    rng, named, layers = np.random.default_rng(3), {}, dict[str, list[np.ndarray]]()
    parameters = {}
    outside = OUTSIDE | {published.final_norm: vector(EMBED, "final_norm")}
    for name, tensor in outside.items():
        named[name] = draw(tensor, rng)
        parameters |= {ours: cut(named[name]) for ours, cut in tensor.parts.items()}
    for number, layer in enumerate(published.layers):
        experts = dict[str, list[np.ndarray]]()
        for name, tensor in layer.items():
            array = named[f"model.layers.{number}.{name}"] = draw(tensor, rng)
            for ours, cut in tensor.parts.items():
                (experts if re.search(r"\.experts\.\d", name) else layers).setdefault(ours, []).append(cut(array))
        for ours, arrays in experts.items():
            layers.setdefault(ours, []).append(np.stack(arrays))
    parameters |= {ours: np.stack(arrays) for ours, arrays in layers.items()}
    return named, {ours: array.astype(np.float64) for ours, array in parameters.items()}


def logits(parameters: oracle.Parameters, family: oracle.Family) -> np.ndarray:
    """Return the oracle's logits of one row of tokens."""
    p, at = oracle.TapedParameters(parameters), oracle.Coordinates(np.ones(len(TOKENS)), np.arange(len(TOKENS)))
    x, _ = family.layers(p, stack([p("embedding", int(token)) for token in TOKENS]), at)
    return (oracle.norm(x, p("final_norm"), family.norm_eps) @ p("unembedding")).data


@pytest.mark.parametrize("name", FAMILIES)
def test_published_folder(name, tmp_path):
    """Its logits are those of NumPy, and saving gives back every tensor."""
    published = FAMILIES[name]()
    named, parameters = folder_and_parameters(published)
    family: Any = published.family
    if "bias" in parameters:
        family = replace(family, bias=parameters.pop("bias"))
    (tmp_path / "m").mkdir()
    save_file(named, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps(COMMON | published.config))

    model = moezoo.from_pretrained(tmp_path / "m")
    wanted = logits(parameters, family)
    found = jax.jit(lambda model: model(TOKENS[None]).logits[0])(model)
    # Some hundred roundings to 6e-8 of values of order one.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * abs(wanted).max())

    moezoo.save_pretrained(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(named)
    for key, array in named.items():
        np.testing.assert_array_equal(again[key], array, strict=True)
    assert hub_model_config(tmp_path / "again") == model.config
