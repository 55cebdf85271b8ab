"""Llama 4 from and to the config.json of a Hugging Face folder, and its tensor names.

Which layers rotate, which see all tokens and which have experts are three lists. Where one is missing, transformers
makes it of an interval, or of the first list.
"""

from collections.abc import Mapping
from typing import Any, Literal

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson
from moezoo.models.hub import SILU, Found, Hub, Key, ModelType, Part, Settings, common, required, rope
from moezoo.models.llama4 import Llama4Config, kinds
from moezoo.models.names import LAYER, MOE, SWIGLU, layers, rows
from moezoo.typed import show

_STRETCH, _ALL = "chunked_attention", "full_attention"


def _read_attention(config: ConfigJson, found: Found) -> Found:
    """Return the stretch, the layers without rotation, and those that see all."""
    count = found["layers"]
    stretch = config.read("attention_chunk_size", int | None, 8192)
    listed = config.read("no_rope_layers", tuple[Literal[0, 1], ...] | None, None)
    every = config.read("no_rope_layer_interval", int, 4)
    rotate = listed or tuple(int((i + 1) % every != 0) for i in range(count))
    if len(rotate) != count:
        raise UserError(
            f"config.json: no_rope_layers names {len(rotate)} layers, but num_hidden_layers={count}; one of them is "
            "wrong"
        )
    types = config.read_layer_types((_STRETCH, _ALL), count)
    if types is not None and stretch is None and _STRETCH in types:
        raise UserError(
            f"config.json: attention_chunk_size=null, but layer {types.index(_STRETCH)} of layer_types is {_STRETCH}; "
            "write the size of a chunk"
        )
    plain = tuple(i for i in range(count) if not rotate[i])
    full = plain if types is None else tuple(i for i, kind in enumerate(types) if kind == _ALL)
    return {
        "stretch": None if len(full) == count and types is not None else stretch,
        "plain_layers": None if plain == tuple(range(3, count, 4)) else plain,
        "full_layers": None if full == plain or len(full) == count else full,
    }


def _write_attention(c: Llama4Config) -> Mapping[str, Any]:
    made = kinds(c)[0]
    return {
        "attention_chunk_size": c.stretch,
        "no_rope_layers": [int(kind.rotates) for kind in made],
        "layer_types": [_ALL if kind.sees == "all" else _STRETCH for kind in made],
    }


def _read_scale(config: ConfigJson, found: Found) -> Found:
    scales = config.read("attn_temperature_tuning", Any, True)
    if not isinstance(scales, bool | int):  # the first released folders have the number 4 for true
        raise UserError(f"config.json: attn_temperature_tuning={show(scales)[:80]}: expected true or false")
    beta, length = config.read("attn_scale", float, 0.1), config.read("floor_scale", int, 8192)
    return {"query_scale": {"beta": beta if scales else 0.0, "length": length}}


def _write_scale(c: Llama4Config) -> Mapping[str, Any]:
    beta, length = c.query_scale.beta, c.query_scale.length
    return {"attn_temperature_tuning": beta != 0, "attn_scale": beta, "floor_scale": length}


def _read_experts(config: ConfigJson, found: Found) -> Found:
    """Return which layers have experts."""
    count, every = found["layers"], config.read("interleave_moe_layer_step", int, 1)
    listed = config.read("moe_layers", tuple[int, ...] | None, None, least=0)
    usual = tuple(range(every - 1, count, every))
    experts = set(usual if listed is None else listed) & {*range(count)}
    if not experts:
        shown = f"interleave_moe_layer_step={every}" if listed is None else f"moe_layers={show(list(listed))[:80]}"
        raise UserError(f"config.json: {shown} leaves no layer of num_hidden_layers={count} with experts")
    if experts - {*usual}:
        every, usual = 1, range(count)
    return {"moe_every": every, "mlp_layers": tuple(i for i in usual if i not in experts)}


def _write_experts(c: Llama4Config) -> Mapping[str, Any]:
    listed = [i for i, kind in enumerate(kinds(c)[0]) if kind.feed_forward == "moe"]
    return {"interleave_moe_layer_step": c.moe_every, "moe_layers": listed}


_SETTINGS: Settings = {
    **common(131072, norm_eps=1e-5),
    **required("experts=num_local_experts expert_mlp=intermediate_size mlp=intermediate_size_mlp"),
    "kv_heads": Key("num_key_value_heads", 8, null=lambda found: found["heads"]),
    "head_dim": Key("head_dim", 128, null=lambda found: found["embed"] // found["heads"]),
    "attention_bias": Key("attention_bias", False, words=("none", "all")),
    "norm_turned": Key("use_qk_norm", True),
    "load_balance": Key("router_aux_loss_coef", 0.001),
}
_FURTHER: Settings = {
    "attention": Part(
        _read_attention,
        _write_attention,
        {"stretch": "attention_chunk_size", "plain_layers": "no_rope_layers", "full_layers": "layer_types"},
        forms=("plain_layers", "full_layers"),
    ),
    "scale": Part(_read_scale, _write_scale, {"query_scale.beta": "attn_scale", "query_scale.length": "floor_scale"}),
    "with_experts": Part(
        _read_experts, _write_experts, {"moe_every": "interleave_moe_layer_step", "mlp_layers": "moe_layers"}
    ),
    "rope": rope("llama3", 5e5),
    "hidden_act": SILU,
}
_THERE = f"{LAYER}feed_forward."
_FEED_FORWARD = (
    *rows(MOE, _THERE, SWIGLU),
    *rows(f"{MOE}router.", f"{_THERE}router.", "weight=weight"),
    *rows(f"{MOE}experts.", f"{_THERE}experts.", "gate+up=gate_up_proj down=down_proj", "transposed"),
    *rows(f"{MOE}shared.", f"{_THERE}shared_expert.", SWIGLU),
)
# transformers reads neither of the first two.
_WITHOUT_EFFECT = "router_jitter_noise for_llm_compressor"
HUB = Hub(
    {"llama4_text": "gates on what experts read, attention in stretches, layers without rotation; Llama 4"},
    {
        "llama4_text": ModelType(
            "Llama4", _SETTINGS, _FURTHER, layers(feed_forward=_FEED_FORWARD), without_effect=_WITHOUT_EFFECT
        )
    },
    lambda config: "llama4_text",
)
