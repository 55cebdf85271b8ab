"""LFM2 with experts from and to the config.json of a Hugging Face folder, and its tensor names."""

from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson
from moezoo.models.hub import (
    SILU,
    Found,
    Hub,
    Key,
    ModelType,
    Part,
    check_only,
    common,
    fixed,
    head_dim,
    required,
    rope,
)
from moezoo.models.lfm2_moe import Lfm2MoeConfig, every_fourth, kinds
from moezoo.models.names import ATTENTION, LAYER, MOE, change, layers, rows

_FEED_FORWARD, _CONVOLUTION = f"{LAYER}feed_forward.", f"{LAYER}conv."
_W = "gate=w1.weight up=w3.weight down=w2.weight"
_MIXERS = (
    *rows(
        "attention.",
        ATTENTION,
        """
        query=q_proj.weight key=k_proj.weight value=v_proj.weight out=out_proj.weight
        query_norm.scale=q_layernorm.weight key_norm.scale=k_layernorm.weight
        """,
        beside="query",
    ),
    *rows(
        "attention.",
        _CONVOLUTION,
        """
        input_gate+output_gate+value=in_proj.weight out=out_proj.weight
        input_gate_bias+output_gate_bias+value_bias=in_proj.bias filter_bias=conv.bias out_bias=out_proj.bias
        """,
        beside="filters",
    ),
    *rows("attention.", _CONVOLUTION, "filters=conv.weight", "filters"),
)
_ROWS = change(
    layers(
        _MIXERS,
        (
            *rows(MOE, _FEED_FORWARD, _W),
            *rows(f"{MOE}router.", _FEED_FORWARD, "weight=gate.weight choice_bias=expert_bias"),
            *rows(f"{MOE}experts.", f"{_FEED_FORWARD}experts.{{expert}}.", _W),
        ),
        "feed_forward_norm.scale=ffn_norm.weight",
    ),
    *rows("", LAYER, "attention_norm.scale=operator_norm.weight"),
    *rows("", "", "unembedding.norm.scale=model.embedding_norm.weight"),
)
_ATTENDS, _CONVOLVES = "full_attention", "conv"


def _read_mixers(config: ConfigJson, found: Found) -> Found:
    """Return which layers attend. Raises `UserError` where no key says it."""
    count = found["layers"]
    types = config.read_layer_types((_ATTENDS, _CONVOLVES), count)
    if types is None:
        raise UserError(f"config.json: layer_types is missing; write '{_ATTENDS}' or '{_CONVOLVES}' for each layer")
    attends = tuple(i for i, kind in enumerate(types) if kind == _ATTENDS)
    return {"attention_layers": None if attends == every_fourth(count) else attends}


def _write_mixers(c: Lfm2MoeConfig) -> Mapping[str, Any]:
    mixers = [mixer for run in kinds(c) for mixer, _ in run]
    return {"layer_types": [_ATTENDS if mixer == "attention" else _CONVOLVES for mixer in mixers]}


_FIXED = {"router.score": "sigmoid", "router.added_to_sum": 1e-6, "load_balance": 0.0}  # no class has such a loss
_LFM2_MOE = ModelType(
    "Lfm2Moe",
    {
        **common(128000),
        "norm_eps": Key("norm_eps", 1e-5),
        "tied_embeddings": Key("tie_word_embeddings tie_embedding", True),
        **required("experts=num_experts"),
        "kv_heads": Key("num_key_value_heads", 8),
        "head_dim": Key("head_dim", None, null=head_dim),
        "mlp": Key("intermediate_size", 7168),
        "expert_mlp": Key("moe_intermediate_size", 1792),
        "dense_layers": Key("num_dense_layers", 2, least=0),
        "mixers": Part(_read_mixers, _write_mixers, {"attention_layers": "layer_types"}, forms=("attention_layers",)),
        "taps": Key("conv_L_cache", 3),
        "convolution_bias": Key("conv_bias", False, words=("none", "all")),
    },
    {
        "router.choice_bias": Key("use_expert_bias", True, words=("none", "learned")),
        "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
        "router.scale": Key("routed_scaling_factor", 1.0),
        "router": fixed(_FIXED),
        "rope": rope("yarn", 1e6),
        "hidden_act": SILU,
    },
    _ROWS,
)


def _check(c: Lfm2MoeConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` for what no folder has."""
    only = {"router.score": "sigmoid", "router.groups": 1, "router.least_sum": 0.0}
    only |= {"router.added_to_sum": 1e-6} if c.router.gates == "renormalised" else {}
    check_only(c, "LFM2", only)


HUB = Hub(
    {"lfm2_moe": "gated short convolutions in most layers, attention in others, sigmoid router; LFM2-8B-A1B"},
    {"lfm2_moe": _LFM2_MOE},
    lambda config: "lfm2_moe",
    _check,
)
