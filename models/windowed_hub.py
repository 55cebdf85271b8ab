"""Models with a window in most layers from and to the config.json of a Hugging Face folder, and their tensor names.

Of MiMo-V2-Flash two spellings of config.json are read, that of the released folders and that of transformers 5.24,
also together. Both are written: transformers does not read the first, and other programs do not read the second.

| setting | released | transformers 5.24 |
|---|---|---|
| layers with a window | `hybrid_layer_pattern`, 1 for a window | `layer_types` |
| the window | `sliding_window_size`, the tokens before the query | `sliding_window`, with the query |
| layers with an MLP | `moe_layer_freq`, 0 for an MLP | `mlp_layer_types` |
| rotation | `rope_theta`, `swa_rope_theta`, `partial_rotary_factor` | `rope_parameters`, a table per kind of layer |
| key-value heads beside a window | `swa_num_key_value_heads` | twice `num_key_value_heads` |
"""

from collections.abc import Mapping
from typing import Any, Literal

from moezoo.errors import UserError
from moezoo.models.config_json import ConfigJson, rotary_share
from moezoo.models.hub import (
    SILU,
    Found,
    Hub,
    Key,
    ModelType,
    Part,
    Settings,
    check_only,
    common,
    fixed,
    head_dim,
    rope,
)
from moezoo.models.names import ATTENTION, MLP, MOE, USUAL, change, layers, rows
from moezoo.models.windowed import WindowedConfig, kinds, usual_full_layers
from moezoo.typed import show

_ALL, _WINDOW = "full_attention", "sliding_attention"
_BASES = {_ALL: 5e6, _WINDOW: 1e4}
_SHARE = 0.334
# What all folders of a type have, without a key.
_SIGMOID = {"router.score": "sigmoid", "router.choice_bias": "learned", "router.group_score": "sum_of_top2"}
_NORMED = {"norm_over": "head", "sinks": "none", "full_rope_base": None, "rotary_dims": None, "value_scale": 1.0}
_FIXED: Mapping[str, Found] = {
    "mimo_v2_flash": _SIGMOID
    | {"sinks": "windows", "shared_experts": 0, "norm_over": "nothing", "attention_gate": "none"}
    | {"norms": "before", "embeddings": "plain"},
    "exaone_moe": _SIGMOID
    | _NORMED
    | {"attention_bias": "none", "attention_gate": "none", "norms": "before", "embeddings": "plain"},
    "afmoe": _SIGMOID
    | _NORMED
    | {"attention_bias": "none", "attention_gate": "sigmoid", "norms": "around", "router.groups": 1}
    | {"router.gates": "renormalised"},
}


def _fixed(model_type: str, **keys: Any) -> Part:
    return fixed({**_FIXED[model_type], "model_type": model_type, "load_balance": 0.0}, **keys)


def _read_pattern(config: ConfigJson, types: tuple[str, ...] | None, key: str, words: tuple[str, str]) -> Any:
    """Return the kind of each layer, or None where neither `types` nor the numbers of `key` say it.

    Raises `UserError` where the two differ, or a number is neither 0 nor 1, which mean the first and the second word.
    """
    pattern = config.read(key, tuple[int, ...] | None, None, least=0)
    if pattern is None:
        return types
    shown = f"config.json: {key}={show(list(pattern))[:80]}"
    if {*pattern} - {0, 1}:
        raise UserError(f"{shown}: expected 0 or 1 for each layer: {words[0]} or {words[1]}")
    kinds = tuple(words[i] for i in pattern)
    if types not in (None, kinds):
        raise UserError(f"{shown} and the list of {words[0]} and {words[1]} are one setting; delete the wrong one")
    return kinds


def _read_layers(config: ConfigJson, found: Found) -> Found:
    """Return which layers have no window, and which have an MLP."""
    count = found["layers"]
    sights = config.read_layer_types((_ALL, _WINDOW), count)
    sights = _read_pattern(config, sights, "hybrid_layer_pattern", (_ALL, _WINDOW))
    parts = config.read("mlp_layer_types", tuple[Literal["dense", "sparse"], ...] | None, None)
    parts = _read_pattern(config, parts, "moe_layer_freq", ("dense", "sparse"))
    for keys, named in (("layer_types or hybrid_layer_pattern", sights), ("mlp_layer_types or moe_layer_freq", parts)):
        if named is not None and len(named) != count:
            raise UserError(f"config.json: {keys} names {len(named)} layers, but num_hidden_layers={count}")
    full = None if sights is None else tuple(i for i, kind in enumerate(sights) if kind == _ALL)
    return {
        "full_layers": None if full == usual_full_layers(count) else full,
        "mlp_layers": (0,) if parts is None else tuple(i for i, kind in enumerate(parts) if kind == "dense"),
    }


def _full_layers(config: ConfigJson, count: int, key: str) -> tuple[int, ...]:
    """Return the layers without a window: those of a list, or else every `key`-th, by default every fourth."""
    types = config.read_layer_types((_ALL, _WINDOW), count)
    if types is None:
        every = config.read(key, int, 4)
        return tuple(range(every - 1, count, every))
    config.get(key)
    return tuple(i for i, kind in enumerate(types) if kind == _ALL)


def _every(key: str) -> Part:
    """Return which layers have no window, of types in which `key` says it where no list does."""

    def read(config: ConfigJson, found: Found) -> Found:
        full = _full_layers(config, found["layers"], key)
        return {"full_layers": None if full == usual_full_layers(found["layers"]) else full}

    def write(c: WindowedConfig) -> Mapping[str, Any]:
        return {"layer_types": [_ALL if sight == "all" else _WINDOW for sight, _ in kinds(c)[0]]}

    return Part(read, write, {"full_layers": "layer_types"}, forms=("full_layers",))


def _read_first(config: ConfigJson, found: Found) -> Found:
    """Return the layers with an MLP: those of a list, or else the first ones. transformers writes both, and the list
    counts."""
    types = config.read("mlp_layer_types", tuple[Literal["dense", "sparse"], ...] | None, None)
    first = config.read("first_k_dense_replace", int, 1, least=0)
    if types is None:
        return {"mlp_layers": tuple(range(min(first, found["layers"])))}
    if len(types) != found["layers"]:
        count = found["layers"]
        raise UserError(f"config.json: mlp_layer_types names {len(types)} layers, but num_hidden_layers={count}")
    return {"mlp_layers": tuple(i for i, kind in enumerate(types) if kind == "dense")}


def _write_first(c: WindowedConfig) -> Mapping[str, Any]:
    parts = [part for _, part in kinds(c)[0]]
    types = ["dense" if part == "mlp" else "sparse" for part in parts]
    return {"mlp_layer_types": types, "first_k_dense_replace": parts.index("moe")}


def _write_layers(c: WindowedConfig) -> Mapping[str, Any]:
    return {
        "layer_types": [_ALL if sight == "all" else _WINDOW for sight, _ in kinds(c)[0]],
        "hybrid_layer_pattern": [int(sight == "window") for sight, _ in kinds(c)[0]],
        "mlp_layer_types": ["dense" if part == "mlp" else "sparse" for _, part in kinds(c)[0]],
        "moe_layer_freq": [int(part == "moe") for _, part in kinds(c)[0]],
    }


def _read_window(config: ConfigJson, found: Found) -> Found:
    """Return the window. The released folders have the tokens before the query under both keys."""
    before = config.read("sliding_window_size", int | None, None, least=0)
    window = config.read("sliding_window", int, 129 if before is None else before, least=0)
    if before is None:
        return {"window": window}
    if window not in (before, before + 1):
        raise UserError(
            f"config.json: sliding_window={window} and sliding_window_size={before}, the tokens before the query, are "
            "one setting; delete the wrong one"
        )
    return {"window": before + 1}


def _read_rope(config: ConfigJson, found: Found) -> Found:
    """Return the bases of both kinds of layers, and the rotated dimensions, which are the same in both."""
    tables, head = config.table("rope_parameters"), found["head_dim"]
    outside = {_ALL: config.read("rope_theta", float | None, None)}
    outside[_WINDOW] = config.read("swa_rope_theta", float | None, None)
    share = config.read("partial_rotary_factor", float | None, None)
    bases, shares = {}, {share} - {None}
    for kind, base in outside.items():
        bases[kind] = _BASES[kind] if base is None else base
        if tables is None:
            continue
        table = tables.table(kind)
        if table is None:
            raise UserError(f"config.json: rope_parameters.{kind} is missing; write its rope_type and rope_theta")
        table.read("rope_type", Literal["default"], "default")
        bases[kind] = table.read("rope_theta", float)
        if base not in (None, bases[kind]):
            key = "rope_theta" if kind == _ALL else "swa_rope_theta"
            there = f"rope_parameters.{kind}.rope_theta={bases[kind]}"
            raise UserError(f"config.json: {key}={base} and {there} are one setting; delete the wrong one")
        shares.add(table.read("partial_rotary_factor", float, _SHARE))
        table.refuse_others()
    if tables is not None:
        tables.refuse_others()
    if len(shares) > 1:
        raise UserError(
            f"config.json: partial_rotary_factor has the values {sorted(shares)}: this family rotates the same part of "
            "a head in all layers; write one value"
        )
    part = shares.pop() if shares else _SHARE
    if not 0 < part <= 1:
        raise UserError(f"config.json: partial_rotary_factor={part}: expected a number above 0 and at most 1")
    rotated = int(head * part)
    rotary_dims = None if rotated == head else rotated
    return {"rope_base": bases[_WINDOW], "full_rope_base": bases[_ALL], "rotary_dims": rotary_dims}


def _write_rope(c: WindowedConfig) -> Mapping[str, Any]:
    if c.full_rope_base is None:
        raise UserError("model.full_rope_base=null: all layers of MiMo-V2-Flash rotate in transformers; set a base")
    part = {"partial_rotary_factor": rotary_share(c.rotary_dims or c.head_dim, c.head_dim)}
    bases = {_ALL: c.full_rope_base, _WINDOW: c.rope_base}
    tables = {kind: {"rope_type": "default", "rope_theta": base, **part} for kind, base in bases.items()}
    return {"rope_parameters": tables, "rope_theta": c.full_rope_base, "swa_rope_theta": c.rope_base, **part}


def _read_kv_heads(config: ConfigJson, found: Found) -> Found:
    heads = config.read("num_key_value_heads", int, 4)
    return {"full_kv_heads": heads, "kv_heads": 2 * heads}


_MIMO: Settings = {
    **common(131072, norm_eps=1e-5),
    "norm_eps": Key("rms_norm_eps layernorm_epsilon", 1e-5),
    "norm": Part(write=lambda c: {"layernorm_epsilon": c.norm_eps}),
    "kv_heads": Part(
        _read_kv_heads,
        lambda c: {"num_key_value_heads": c.full_kv_heads},
        {"full_kv_heads": "num_key_value_heads", "kv_heads": "num_key_value_heads"},
    ),
    "head_dim": Key("head_dim", 192),
    "value_dim": Key("v_head_dim", 128),
    "value_scale": Key("attention_value_scale", 0.707, null=1.0),
    "windows": Part(
        write=lambda c: {
            "swa_num_attention_heads": c.heads,
            "swa_num_key_value_heads": c.kv_heads,
            "swa_head_dim": c.head_dim,
            "swa_v_head_dim": c.value_dim,
        }
    ),
    "sinks": fixed(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False),
    "attention_bias": Key("attention_bias", False, words=("none", "inputs")),
    "mlp": Key("intermediate_size", 16384),
    "expert_mlp": Key("moe_intermediate_size", 2048),
    "experts": Key("n_routed_experts num_local_experts", 256),
    "experts_per_token": Key("num_experts_per_tok", 8),
    "router.groups": Key("n_group", 1),
    "router.kept_groups": Key("topk_group", 1),
    "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
    "router.scale": Key("routed_scaling_factor", 1.0, null=1.0),
    "fixed": _fixed("mimo_v2_flash", scoring_func="sigmoid", topk_method="noaux_tc"),
}
_FURTHER: Settings = {
    "layers_of": Part(
        _read_layers,
        _write_layers,
        {"full_layers": "layer_types", "mlp_layers": "mlp_layer_types"},
        forms=("full_layers",),
    ),
    "window": Part(
        _read_window,
        lambda c: {"sliding_window": c.window - 1, "sliding_window_size": c.window - 1},
        {"window": "sliding_window_size"},
    ),
    "rope": Part(
        _read_rope,
        _write_rope,
        {"full_rope_base": "rope_theta", "rope_base": "swa_rope_theta", "rotary_dims": "partial_rotary_factor"},
    ),
    "hidden_act": SILU,
}
# Sizes that layers with a window have in the released code, and in transformers by the other keys.
_ONLY: Mapping[str, Any] = {
    "swa_num_attention_heads": lambda found: found["heads"],
    "swa_num_key_value_heads": lambda found: found["kv_heads"],
    "swa_head_dim": lambda found: found["head_dim"],
    "swa_v_head_dim": lambda found: found["value_dim"],
    "attention_chunk_size": lambda found: found["window"] - 1,
    "add_swa_attention_sink_bias": (True,),
    "add_full_attention_sink_bias": (False,),
    "n_shared_experts": (0,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_scaling": (),
}
# Heads of one size in all layers. What is rotated has one base.
_EQUAL_HEADS: Settings = {
    "equal": Part(lambda config, found: {"value_dim": found["head_dim"], "full_kv_heads": found["kv_heads"]})
}
_ONE_BASE: Settings = {"rope": rope(), "hidden_act": SILU}
_EXAONE: Settings = {
    **common(2048, norm_eps=1e-5),
    "kv_heads": Key("num_key_value_heads", 32),
    "head_dim": Key("head_dim", None, null=head_dim),
    "mlp": Key("intermediate_size", 16384),
    "expert_mlp": Key("moe_intermediate_size", 1024),
    "experts": Key("num_experts", 64),
    "experts_per_token": Key("num_experts_per_tok", 8),
    "shared_experts": Key("num_shared_experts", 1),
    "router.groups": Key("n_group", 1),
    "router.kept_groups": Key("topk_group", 1),
    "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
    "router.scale": Key("routed_scaling_factor", 2.5),
    "window": Key("sliding_window", 4096),
    "full": _every("sliding_window_pattern"),
    "first": Part(_read_first, _write_first, {"mlp_layers": "mlp_layer_types"}),
    "fixed": _fixed("exaone_moe", scoring_func="sigmoid", topk_method="noaux_tc"),
    **_EQUAL_HEADS,
}
_AFMOE: Settings = {
    **common(16384, norm_eps=1e-5),
    "kv_heads": Key("num_key_value_heads", None, null=lambda found: found["heads"]),
    "head_dim": Key("head_dim", 128),
    "mlp": Key("intermediate_size", 6144),
    "expert_mlp": Key("moe_intermediate_size", 1408),
    "experts": Key("num_experts", 64),
    "experts_per_token": Key("num_experts_per_tok", 6),
    "shared_experts": Key("num_shared_experts", 2),
    "router.scale": Key("route_scale", 1.0),
    "embeddings": Key("mup_enabled", False, words=("plain", "scaled")),
    "window": Key("sliding_window", 1024),
    "full": _every("global_attn_every_n_layers"),
    "first": Part(
        lambda config, found: {
            "mlp_layers": tuple(range(min(config.read("num_dense_layers", int, 1, least=0), found["layers"])))
        },
        lambda c: {"num_dense_layers": [*(part for _, part in kinds(c)[0]), "moe"].index("moe")},
        {"mlp_layers": "num_dense_layers"},
    ),
    "fixed": _fixed("afmoe", score_func="sigmoid", route_norm=True),
    **_EQUAL_HEADS,
}
_EXAONE_ONLY: Mapping[str, Any] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
}
# The second group is of the released code, in which transformers does not look.
_AFMOE_ONLY: Mapping[str, Any] = {
    "attention_bias": (False,),
    "score_func": ("sigmoid",),
    "route_norm": (True,),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
}
_MTP = "num_nextn_predict_layers num_mtp_layers"  # further layers, which are not loaded
_MIMO_ROWS = change(USUAL, *rows("attention.", ATTENTION, "sinks=attention_sink_bias"))
_EXAONE_ROWS = change(USUAL, *rows(f"{MOE}router.", MLP, "choice_bias=e_score_correction_bias"))
_AFMOE_NORMS = """
    after_attention_norm.scale=post_attention_layernorm.weight feed_forward_norm.scale=pre_mlp_layernorm.weight
    after_feed_forward_norm.scale=post_mlp_layernorm.weight
"""
_AFMOE_ROWS = change(
    layers(norms=_AFMOE_NORMS),
    *rows("attention.", ATTENTION, "gate=gate_proj.weight"),
    *rows(f"{MOE}router.", MLP, "weight=router.gate.weight choice_bias=expert_bias"),
)


def _check(c: WindowedConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` for what no folder has."""
    only: dict[str, Any] = {**_FIXED[c.model_type], "router.least_sum": 0.0, "router.added_to_sum": 1e-20}
    only |= {} if c.router.groups > 1 else {"router.group_score": c.router.group_score}
    if c.model_type == "mimo_v2_flash":
        only |= {"kv_heads": 2 * c.full_kv_heads} | ({} if c.attention_bias == "none" else {"attention_bias": "inputs"})
    else:
        only |= {"value_dim": c.head_dim, "full_kv_heads": c.kv_heads, "rotary_dims": None}
    if c.model_type == "afmoe":
        only |= {"mlp_layers": tuple(range(mapping["num_dense_layers"]))}
    check_only(c, c.model_type, only)


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of layers for multi-token prediction."""
    del expected
    begins = ("model.mtp.", "mtp.")
    return {name: "multi-token prediction" for name in left if name.startswith(begins)}


HUB = Hub(
    {
        "mimo_v2_flash": "sinks and more key-value heads in layers with a window, narrower values; MiMo-V2-Flash",
        "exaone_moe": "norms of each query and key, no rotation without a window, shared experts; K-EXAONE",
        "afmoe": "as exaone_moe, with a gate on attention and norms around each part; Trinity",
    },
    {
        "mimo_v2_flash": ModelType("MiMoV2Flash", _MIMO, _FURTHER, _MIMO_ROWS, _ONLY, _MTP),
        "exaone_moe": ModelType("ExaoneMoe", _EXAONE, _ONE_BASE, _EXAONE_ROWS, _EXAONE_ONLY, _MTP),
        "afmoe": ModelType("Afmoe", _AFMOE, _ONE_BASE, _AFMOE_ROWS, _AFMOE_ONLY, "load_balance_coeff use_grouped_mm"),
    },
    lambda config: config.model_type,
    _check,
    find_unused,
)
