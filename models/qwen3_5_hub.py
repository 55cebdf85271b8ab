"""Qwen3-Next and Qwen3.5 from and to the config.json of a Hugging Face folder, and their tensor names.

The two types differ in the tensors of the delta rule, and Qwen3-Next has a few more settings:

| | `qwen3_5_moe_text`, inside `qwen3_5_moe` | `qwen3_next` |
|---|---|---|
| queries, keys, values | `in_proj_qkv`: all queries, all keys, all values | `in_proj_qkvz`: all of a key head |
| gates, strengths, decays | a tensor each | gates in the same tensor; strengths and decays in one, by key heads |
| layers with an MLP | none | `mlp_only_layers`, `decoder_sparse_step` |
| gates of experts | renormalised | `norm_topk_prob` |
"""

from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson
from moezoo.models.grouped_hub import check_same
from moezoo.models.grouped_keys import BY_LIST, heads_and_rope
from moezoo.models.hub import Found, Hub, Key, ModelType, Part, Settings, common, fixed
from moezoo.models.names import ATTENTION, GATED_SHARED, Rows, layers, rows
from moezoo.models.qwen3_5 import Qwen35Config, kinds
from moezoo.typed import show

_ABOUT = {
    "qwen3_next": "gated delta rule in most layers, attention with an output gate in others; Qwen3-Next",
    "qwen3_5_moe_text": "as qwen3_next; the text part of Qwen3.5, which folders have inside a `qwen3_5_moe`",
}
_FULL_ATTENTION = rows(
    "attention.",
    ATTENTION,
    """
    query+gate=q_proj.weight key=k_proj.weight value=v_proj.weight out=o_proj.weight
    query_bias+gate_bias=q_proj.bias key_bias=k_proj.bias value_bias=v_proj.bias out_bias=o_proj.bias
    query_norm.scale=q_norm.weight key_norm.scale=k_norm.weight
    """,
    beside="gate",
)
_DELTA = ("attention.", f"{ATTENTION.removesuffix('self_attn.')}linear_attn.")
_CONVOLUTIONS = "+".join(f"convolutions[{i}].weight" for i in range(3))
_EITHER = (
    *_FULL_ATTENTION,
    *rows(*_DELTA, f"{_CONVOLUTIONS}=conv1d.weight", "filters"),
    *rows(*_DELTA, "decay.rate=A_log decay.bias=dt_bias norm.scale=norm.weight out=out_proj.weight", beside="strength"),
)
_NEXT = (
    *rows(*_DELTA, "query+key+value+gate.weight=in_proj_qkvz.weight", "flat", beside="strength", groups="key"),
    *rows(*_DELTA, "strength+decay.weight=in_proj_ba.weight", "flat", groups="key"),
)
_APART = (
    *rows(*_DELTA, "query+key+value=in_proj_qkv.weight", "flat", beside="strength"),
    *rows(*_DELTA, "gate.weight=in_proj_z.weight strength=in_proj_b.weight decay.weight=in_proj_a.weight"),
)
_LINEAR, _FULL = "linear_attention", "full_attention"


def _read_mixers(config: ConfigJson, found: Found) -> Found:
    """Return which layers have attention. Raises `UserError` where a list and an interval differ."""
    layers, key = found["layers"], "full_attention_interval"
    every = config.read(key, int | None, None)
    types = config.read_layer_types((_FULL, _LINEAR), layers)
    if types is None:
        return {"attention_every": every or 4, "attention_layers": None}
    listed = tuple(i for i, kind in enumerate(types) if kind == _FULL)
    for interval in (every,) if every else (4, *(i + 1 for i in listed[:1])):
        if listed == tuple(range(interval - 1, layers, interval)):
            return {"attention_every": interval, "attention_layers": None}
    if every is not None:
        raise UserError(f"config.json: {key}={every} contradicts layer_types={show(types)[:80]}; delete the wrong one")
    return {"attention_layers": listed}


def _write_mixers(c: Qwen35Config) -> Mapping[str, Any]:
    interval = {"full_attention_interval": c.attention_every} if c.attention_layers is None else {}
    return {"layer_types": [_FULL if mixer == "attention" else _LINEAR for mixer, _ in kinds(c)[0]], **interval}


def _type(architecture: str, model_type: str, delta: Rows, settings: Settings, only: Mapping[str, Any]) -> ModelType:
    """Return a model type with the numbers that missing keys stand for, as in transformers."""
    both: Settings = {
        **common(32768, norm_eps=1e-6),
        "kv_heads": Key("num_key_value_heads", 2),
        "delta.key_heads": Key("linear_num_key_heads", 16),
        "delta.value_heads": Key("linear_num_value_heads", 32),
        "delta.key_dim": Key("linear_key_head_dim", 128),
        "delta.value_dim": Key("linear_value_head_dim", 128),
        "delta.taps": Key("linear_conv_kernel_dim", 4),
        "mixers": Part(
            _read_mixers,
            _write_mixers,
            {"attention_layers": "layer_types"},
            forms=("attention_layers", "attention_every"),
        ),
        "attention_bias": Key("attention_bias", False, words=("none", "all")),
        "experts": Key("num_experts"),
        "expert_mlp": Key("moe_intermediate_size", 512),
        "shared_mlp": Key("shared_expert_intermediate_size", 512),
        "load_balance": Key("router_aux_loss_coef", 0.001),
        "model_type": fixed({"model_type": model_type}),
    }
    # Positions in pictures, which are equal in texts, and further layers, which are not loaded.
    further = heads_and_rope(size=256, share=0.25, others=("mrope_section", "mrope_interleaved"))
    unread = "mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype intermediate_size"
    return ModelType(architecture, both | settings, further, layers((*_EITHER, *delta), GATED_SHARED), only, unread)


_GATED: Mapping[str, Any] = {"attn_output_gate": (True,), "use_sliding_window": (False,)}
_TYPES = {
    "qwen3_next": _type(
        "Qwen3Next",
        "qwen3_next",
        _NEXT,
        {
            "mlp": Key("intermediate_size", 5632),
            "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
            **BY_LIST,
        },
        _GATED,
    ),
    "qwen3_5_moe_text": _type(
        "Qwen3_5Moe",
        "qwen3_5_moe",
        _APART,
        {"gate": fixed(attn_output_gate=True)},
        _GATED | {"mlp_only_layers": ([],), "decoder_sparse_step": (1,), "norm_topk_prob": (True,)},
    ),
}


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of layers for multi-token prediction, and those for images."""
    del expected
    purposes = {"mtp.": "multi-token prediction", "model.visual.": "images"}
    return {name: purpose for name in left for begins, purpose in purposes.items() if name.startswith(begins)}


def _check(config: Qwen35Config, mapping: Mapping[str, Any]) -> None:
    check_same(HUB, kinds, config, mapping)


HUB = Hub(
    _ABOUT,
    _TYPES,
    lambda config: "qwen3_5_moe_text" if config.model_type == "qwen3_5_moe" else config.model_type,
    _check,
    find_unused,
)
