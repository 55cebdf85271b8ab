"""Gemma 4 from and to the config.json of a Hugging Face folder, and its tensor names.

Sizes of heads in layers that see all tokens are `per_layer_config`, by layer, as transformers 5.24 writes them, or
`global_head_dim` and `num_global_key_value_heads`, as in released folders.
"""

from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson
from moezoo.models.gemma4 import Gemma4Config, kinds
from moezoo.models.hub import Found, Hub, Key, ModelType, Part, Settings, common, fixed, required
from moezoo.models.names import LAYER, MOE, SWIGLU, layers, rows
from moezoo.typed import show

_WINDOW, _ALL = "sliding_attention", "full_attention"
_DEFAULT = {_WINDOW: {"rope_type": "default", "rope_theta": 1e4}}
_DEFAULT |= {_ALL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}


def _read_size(config: ConfigJson, found: Found) -> Found:
    """Refuse the other sizes of Gemma 4, by what only they have. Values of missing keys are those of transformers."""
    for key, wanted, default, what in (
        ("enable_moe_block", True, False, "a Gemma 4 without experts"),
        ("hidden_size_per_layer_input", 0, 256, "a Gemma 4 with an embedding per layer"),
        ("num_kv_shared_layers", 0, 0, "a Gemma 4 whose layers share keys and values"),
    ):
        value = config.get(key)
        if (default if value is None else value) != wanted:
            raise UserError(
                f"config.json: {key}={show(default if value is None else value)[:80]}: {what} is not supported; load "
                "one of the size 26B-A4B"
            )
    return {}


def _read_layers(config: ConfigJson, found: Found) -> Found:
    """Return the layers that see all tokens. The last one does, whatever it is called, as in transformers."""
    count = found["layers"]
    types = config.read_layer_types((_WINDOW, _ALL), count)
    if types is None:
        return {"full_layers": None}
    full = tuple(i for i, kind in enumerate(types) if kind == _ALL or i == count - 1)
    return {"full_layers": None if {*full} == {*range(5, count, 6), count - 1} else full}


def _read_heads(config: ConfigJson, found: Found) -> Found:
    """Return the sizes of heads in layers that see all tokens."""
    usual = (found["head_dim"], found["kv_heads"])
    size = config.read("global_head_dim", int, 512)
    number = config.read("num_global_key_value_heads", int | None, None)
    number = number if number is not None and found["full_values"] == "keys" else usual[1]
    if config.get("per_layer_config") is None:
        return {"full_head_dim": size, "full_kv_heads": number}
    by_layer, count = config.table("per_layer_config") or ConfigJson({}, "per_layer_config."), found["layers"]
    full = {*range(5, count, 6), count - 1} if found["full_layers"] is None else {*found["full_layers"]}
    given = dict.fromkeys(range(count), usual)
    for i in range(count):
        if (own := by_layer.table(str(i))) is not None:
            given[i] = (own.read("head_dim", int, usual[0]), own.read("num_key_value_heads", int, usual[1]))
            own.refuse_others()
    by_layer.refuse_others()
    of_kind = {kind: {given[i] for i in range(count) if (i in full) == (kind == _ALL)} for kind in (_WINDOW, _ALL)}
    if len(of_kind[_ALL]) > 1 or of_kind[_WINDOW] - {usual}:
        raise UserError(
            "config.json: per_layer_config gives layers of one kind other heads: this family supports one size for all "
            f"layers of {_ALL}, and head_dim={usual[0]} and num_key_value_heads={usual[1]} for the others"
        )
    (own_size, own_number) = of_kind[_ALL].pop()
    for key, own in (("global_head_dim", own_size), ("num_global_key_value_heads", own_number)):
        counts = key == "global_head_dim" or found["full_values"] == "keys"
        if counts and config.get(key) not in (None, own):
            raise UserError(
                f"config.json: {key}={config.get(key)} and per_layer_config, which has {own}, are one setting; delete "
                "the wrong one"
            )
    return {"full_head_dim": own_size, "full_kv_heads": own_number}


def _write_heads(c: Gemma4Config) -> Mapping[str, Any]:
    usual = {"head_dim": c.head_dim, "num_key_value_heads": c.kv_heads}
    own = {"head_dim": c.full_head_dim, "num_key_value_heads": c.full_kv_heads}
    own = {key: value for key, value in own.items() if value != usual[key]}
    full = [i for i, kind in enumerate(kinds(c)[0]) if kind == "all"]
    # Most programs read the first two, and transformers since 5.24 the last.
    return {
        "global_head_dim": c.full_head_dim,
        "num_global_key_value_heads": c.full_kv_heads,
        "per_layer_config": {str(i): own for i in full} if own else {},
    }


def _read_rope(config: ConfigJson, found: Found) -> Found:
    tables = config.table("rope_parameters") or ConfigJson(_DEFAULT, "rope_parameters.")
    given = {}
    for kind, types in ((_WINDOW, ("default",)), (_ALL, ("default", "proportional"))):
        table = tables.table(kind)
        if table is None:
            raise UserError(f"config.json: rope_parameters.{kind} is missing; write its rope_type and rope_theta")
        name = table.read("rope_type", str)
        if name not in types:
            raise UserError(
                f"config.json: rope_parameters.{kind}.rope_type={show(name)[:80]}: this family supports only "
                f"{' and '.join(types)} there"
            )
        share = table.read("partial_rotary_factor", float, 1.0) if name == "proportional" else 1.0
        given[kind] = table.read("rope_theta", float), share
        table.refuse_others({"partial_rotary_factor": (1,), "factor": (1,)})
    tables.refuse_others()
    (base, _), (full, share) = given[_WINDOW], given[_ALL]
    return {"rope_base": base, "full_rope_base": full, "full_rope_share": share}


def _write_rope(c: Gemma4Config) -> Mapping[str, Any]:
    full = {"rope_type": "proportional", "partial_rotary_factor": c.full_rope_share, "rope_theta": c.full_rope_base}
    return {"rope_parameters": {_WINDOW: {"rope_type": "default", "rope_theta": c.rope_base}, _ALL: full}}


_SETTINGS: Settings = {
    "size": Part(_read_size, lambda c: {"enable_moe_block": True, "hidden_size_per_layer_input": 0}),
    **common(131072, norm_eps=1e-6, tied=True),
    **required("experts=num_experts experts_per_token=top_k_experts expert_mlp=moe_intermediate_size"),
    "mlp": Key("intermediate_size", 9216),
    "kv_heads": Key("num_key_value_heads", 4),
    "head_dim": Key("head_dim", 256),
    "window": Key("sliding_window", 512),
    "logit_cap": Key("final_logit_softcapping", None),
    "full_values": Key("attention_k_eq_v", False, words=("own", "keys")),
    "fixed": fixed({"load_balance": 0.0}, num_kv_shared_layers=0, hidden_activation="gelu_pytorch_tanh"),
}
_FURTHER: Settings = {
    "full_layers": Part(
        _read_layers,
        lambda c: {"layer_types": [_ALL if kind == "all" else _WINDOW for kind in kinds(c)[0]]},
        {"full_layers": "layer_types"},
        forms=("full_layers",),
    ),
    "full_heads": Part(
        _read_heads,
        _write_heads,
        {"full_head_dim": "global_head_dim", "full_kv_heads": "num_global_key_value_heads"},
    ),
    "rope": Part(_read_rope, _write_rope, {"rope_base": "rope_theta", "full_rope_base": "rope_theta"}),
}
_NORMS = """
    after_attention_norm.scale=post_attention_layernorm.weight
    feed_forward.norms.before_shared.scale=pre_feedforward_layernorm.weight
    feed_forward.norms.after_shared.scale=post_feedforward_layernorm_1.weight
    feed_forward.norms.before_experts.scale=pre_feedforward_layernorm_2.weight
    feed_forward.norms.after_experts.scale=post_feedforward_layernorm_2.weight
    after_feed_forward_norm.scale=post_feedforward_layernorm.weight scale=layer_scalar
"""
_FEED_FORWARD = (
    *rows(f"{MOE}router.", f"{LAYER}router.", "weight=proj.weight input_scale=scale expert_scale=per_expert_scale"),
    *rows(f"{MOE}experts.", f"{LAYER}experts.", "gate+up=gate_up_proj down=down_proj", "of_experts"),
    *rows(f"{MOE}shared.", f"{LAYER}mlp.", SWIGLU),
)
# Text attends causally whatever pictures do; the rest is of what `_read_size` refuses.
_ONLY: Mapping[str, Any] = {
    "attention_bias": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": ("vision",),
}
_WITHOUT_EFFECT = "use_double_wide_mlp vocab_size_per_layer_input"
HUB = Hub(
    {"gemma4_text": "an MLP beside the experts, windows in most layers, a cap on logits; Gemma 4 26B-A4B"},
    {
        "gemma4_text": ModelType(
            "Gemma4", _SETTINGS, _FURTHER, layers(feed_forward=_FEED_FORWARD, norms=_NORMS), _ONLY, _WITHOUT_EFFECT
        )
    },
    lambda config: "gemma4_text",
)
