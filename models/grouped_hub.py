"""Configurations of models with grouped-query attention from and to the config.json of a Hugging Face folder."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from moezoo.convert import convert, show, types_of
from moezoo.errors import UserError
from moezoo.models.config_json import (
    COMMON_KEYS,
    YARN_KEYS,
    ConfigJson,
    RopeSettings,
    read_rope,
    write_rope,
)
from moezoo.models.deepseek_hub import find_unused as find_next_token_layers
from moezoo.models.grouped import NAMES as NAMES
from moezoo.models.grouped import GroupedConfig, kinds
from moezoo.models.grouped import layer_names as layer_names
from moezoo.moe.router import Choice
from moezoo.nn.yarn import Yarn

MODEL_TYPES = {
    "qwen3_moe": "norms of each query and key, softmax router; Qwen3-MoE",
    "glm4_moe": "part of each head is rotated, sigmoid router with a choice bias, shared experts; GLM-4.5, 4.6 and 4.7",
    "minimax_m2": "as glm4_moe without shared experts, norms over all queries and over all keys; MiniMax-M2",
    "hy_v3": "norms of each query and key, sigmoid router with a choice bias, shared experts; Hunyuan 3",
    "dots1": "as hy_v3, with a router that first chooses groups of experts; dots.llm1",
    "ernie4_5_moe": "interleaved rotation, softmax router with a choice bias, shared experts; ERNIE 4.5",
}


class _Layers(NamedTuple):
    """Which layers have experts: `read(config, layers)` returns `moe_every` and `mlp_layers`, `write` the `keys`."""

    keys: tuple[str, ...]
    read: Callable[[ConfigJson, int], tuple[int, Iterable[int]]]
    write: Callable[[GroupedConfig], dict[str, Any]]


class _Flag(NamedTuple):
    """What false and true of a key mean for a setting of ours, and which of them a missing key is."""

    ours: str
    false: str
    true: str
    default: bool


class _Type(NamedTuple):
    """What a model type has in its config.json.

    Attributes:
        architecture: the name of its class in transformers, without `ForCausalLM`.
        keys: our settings (`router.NAME` of the router) and the keys that hold them as they are. Where a tuple has
            several keys, transformers reads all, and the first is written.
        defaults: for missing keys.
        always: our settings that no key holds, and the only value of each.
        flags: keys that are true or false.
        layers: which layers have experts.
        rope_base: the base where no key has it.
        share: the rotated share of each head where no key has it; None for whole heads without such a key.
        only, without_effect: as for `ConfigJson.refuse_others`.
        head_dim: the size of heads where no key has it; None: it follows from the other sizes.
    """

    architecture: str
    keys: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]
    always: dict[str, Any]
    flags: dict[str, _Flag]
    layers: _Layers
    rope_base: float = 1e4
    share: float | None = None
    only: Mapping[str, tuple[Any, ...]] = {}
    without_effect: tuple[str, ...] = ()
    head_dim: int | None = None


def _each(config: GroupedConfig, without: str, other: str) -> list[str]:
    return [other if kind == "moe" else without for kind in kinds(config)[0]]


def _read_listed(config: ConfigJson, layers: int) -> tuple[int, Iterable[int]]:
    listed = config.read("mlp_only_layers", tuple[int, ...] | None, None) or ()
    return config.read("decoder_sparse_step", int, 1), [i for i in listed if 0 <= i < layers]


def _read_first(default: int) -> Callable[[ConfigJson, int], tuple[int, Iterable[int]]]:
    return lambda config, layers: (1, range(min(layers, config.read("first_k_dense_replace", int, default, least=0))))


def _read_types(config: ConfigJson, layers: int) -> tuple[int, Iterable[int]]:
    types = config.read("mlp_layer_types", tuple[Literal["dense", "sparse"], ...] | None, None)
    types = ("dense", *["sparse"] * (layers - 1)) if types is None else types
    if len(types) != layers:
        raise UserError(f"config.json: mlp_layer_types names {len(types)} layers, but num_hidden_layers={layers}")
    without = [i for i, kind in enumerate(types) if kind == "dense"]
    # Another spelling, which transformers does not read.
    first = config.read("first_k_dense_replace", int | None, None, least=0)
    if first is not None and [*range(first)] != without:
        raise UserError(f"config.json: first_k_dense_replace={first} contradicts mlp_layer_types; delete the wrong one")
    return 1, without


def _read_interval(config: ConfigJson, layers: int) -> tuple[int, Iterable[int]]:
    every = config.read("moe_layer_interval", int, 1)
    start = config.read("moe_layer_start_index", int, 1, least=0)
    end = config.read("moe_layer_end_index", int, -1, least=-1)
    inside = range(start, (layers if end == -1 else end + 1))
    return every, [i for i in range(every - 1, layers, every) if i not in inside]


def _write_interval(config: GroupedConfig) -> dict[str, Any]:
    with_experts = [i for i, kind in enumerate(kinds(config)[0]) if kind == "moe"]
    ends = {"moe_layer_start_index": with_experts[0], "moe_layer_end_index": with_experts[-1]}
    return {"moe_layer_interval": config.moe_every, **ends}


_LISTED = _Layers(
    ("decoder_sparse_step", "mlp_only_layers"),
    _read_listed,
    lambda c: {"decoder_sparse_step": c.moe_every, "mlp_only_layers": list(c.mlp_layers)},
)
_BY_TYPE = _Layers(
    ("mlp_layer_types",), _read_types, lambda c: {"mlp_layer_types": _each(c, without="dense", other="sparse")}
)
_INTERVAL = _Layers(
    ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index"), _read_interval, _write_interval
)
_NO_MLP = _Layers((), lambda config, layers: (1, ()), lambda c: {})


def _first(default: int) -> _Layers:
    """The first layers have an MLP; `default` of them where the key is missing."""
    key = "first_k_dense_replace"
    return _Layers((key,), _read_first(default), lambda c: {key: (*kinds(c)[0], "moe").index("moe")})


_COMMON: dict[str, tuple[str, ...]] = {ours: (key,) for ours, key in COMMON_KEYS.items()}
_COMMON |= {"kv_heads": ("num_key_value_heads",), "mlp": ("intermediate_size",)}
_COMMON |= {"expert_mlp": ("moe_intermediate_size",)}
_LOSS = {"load_balance": ("router_aux_loss_coef",)}
_GROUPS: dict[str, tuple[str, ...]] = {"router.groups": ("n_group",), "router.kept_groups": ("topk_group",)}
_V3_KEYS = _COMMON | _GROUPS | {"router.scale": ("routed_scaling_factor",)}
_V3_KEYS |= {"experts": ("n_routed_experts", "num_local_experts"), "shared_experts": ("n_shared_experts",)}
_ONE_GROUP = {"router.groups": 1, "router.kept_groups": 1}
# Settings of most types that have no key.
_PLAIN: dict[str, Any] = {"norm_over": "head", "rope_pairs": "halves", "window": None, "router.least_sum": 0.0}
_SIGMOID: dict[str, Any] = {"router.score": "sigmoid", "router.choice_bias": "learned"}
_SIGMOID |= {"router.group_score": "sum_of_top2"}
_SOFTMAX: dict[str, Any] = {"router.score": "softmax", "router.group_score": "max", "router.scale": 1.0} | _ONE_GROUP
_RENORMALISED = {"router.gates": "renormalised"}
_GATES = {"norm_topk_prob": _Flag("router.gates", "scores", "renormalised", default=False)}
_BIAS = {"attention_bias": _Flag("attention_bias", "none", "all", default=False)}
_MTP = ("num_nextn_predict_layers", "num_mtp_layers")  # further layers, which are not loaded

_TYPES: dict[str, _Type] = {
    "qwen3_moe": _Type(
        "Qwen3Moe",
        # transformers reads both names of the experts, and its newer versions write the first.
        _COMMON | _LOSS | {"experts": ("num_experts", "num_local_experts")},
        {"max_length": 32768, "init_std": 0.02, "load_balance": 0.001},
        {k: v for k, v in _PLAIN.items() if k != "window"}
        | _SOFTMAX
        | {"router.choice_bias": "none", "shared_experts": 0},
        _GATES | _BIAS,
        _LISTED,
        # Of models with shared experts, biases and norms that Qwen3-MoE has not, or always has.
        only={"shared_expert_intermediate_size": (0,), "qkv_bias": (False,), "use_qk_norm": (True,)},
    ),
    "glm4_moe": _Type(
        "Glm4Moe",
        _V3_KEYS,
        {"max_length": 131072, "init_std": 0.02, "shared_experts": 1, "router.scale": 1.0} | _ONE_GROUP,
        {k: v for k, v in _PLAIN.items() if k != "norm_over"} | _SIGMOID,
        {
            "norm_topk_prob": _GATES["norm_topk_prob"]._replace(default=True),
            "use_qk_norm": _Flag("norm_over", "nothing", "head", default=False),
            "attention_bias": _Flag("attention_bias", "none", "inputs", default=False),
        },
        _first(1),
        share=0.5,
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        without_effect=_MTP,
    ),
    "minimax_m2": _Type(
        "MiniMaxM2",
        {ours: keys for ours, keys in (_COMMON | _LOSS).items() if ours != "mlp"}
        | {"expert_mlp": ("intermediate_size",), "experts": ("num_local_experts", "num_experts")},
        {"max_length": 196608, "init_std": 0.02, "load_balance": 0.001},
        _PLAIN
        | _SIGMOID
        | _RENORMALISED
        | _ONE_GROUP
        | {"norm_over": "projection", "attention_bias": "none", "router.scale": 1.0, "shared_experts": 0},
        {},
        _NO_MLP,
        rope_base=5e6,
        head_dim=128,
        share=1.0,
        only={
            "router_jitter_noise": (0,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "layernorm_full_attention_beta": (1,),
            "layernorm_mlp_beta": (1,),
        },
        # Of layers that no MiniMax-M2 has: for multi-token prediction, with an MLP, with linear attention.
        without_effect=(
            "use_mtp",
            "num_mtp_modules",
            "mtp_transformer_layers",
            "mlp_intermediate_size",
            "shared_moe_mode",
            "layernorm_linear_attention_beta",
        ),
    ),
    "hy_v3": _Type(
        "HYV3",
        _COMMON
        | {"experts": ("num_experts", "num_local_experts"), "shared_experts": ("num_shared_experts",)}
        | {"router.scale": ("router_scaling_factor",)},
        {"max_length": 131072, "init_std": 0.006, "shared_experts": 1, "router.scale": 2.826},
        _PLAIN | _SIGMOID | _RENORMALISED | _ONE_GROUP,
        _BIAS,
        _BY_TYPE,
        rope_base=11_158_840.0,
        head_dim=128,
        only={
            "moe_router_enable_expert_bias": (True,),
            "moe_router_use_sigmoid": (True,),
            "qk_norm": (True,),
            "route_norm": (True,),
        },
        # Rounding, kernels, a token.
        without_effect=(
            "enable_moe_fp32_combine",
            "enable_lm_head_fp32",
            "enable_attention_fp32_softmax",
            "use_grouped_mm",
            "eod_token_id",
            *_MTP,
        ),
    ),
    "dots1": _Type(
        "Dots1",
        _V3_KEYS,
        {"max_length": 2048, "init_std": 0.02, "router.scale": 1.0} | _ONE_GROUP,
        {k: v for k, v in _PLAIN.items() if k != "window"} | _SIGMOID,
        _GATES | _BIAS,
        _first(0),
        only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        without_effect=("use_sliding_window", "aux_loss_alpha", "seq_aux", "ep_size"),  # transformers reads none
    ),
    "ernie4_5_moe": _Type(
        "Ernie4_5_Moe",
        _COMMON
        | _LOSS
        | {"experts": ("moe_num_experts", "num_experts"), "experts_per_token": ("moe_k", "num_experts_per_tok")}
        | {"shared_experts": ("moe_num_shared_experts",), "router.least_sum": ("moe_norm_min",)},
        {"max_length": 131072, "init_std": 0.02, "load_balance": 0.001, "shared_experts": 2, "router.least_sum": 1e-12}
        | {"tied_embeddings": True},
        {k: v for k, v in _PLAIN.items() if k != "router.least_sum"}
        | _SOFTMAX
        | _RENORMALISED
        | {"norm_over": "nothing", "rope_pairs": "interleaved", "attention_bias": "none"}
        | {"router.choice_bias": "learned"},
        {},
        _INTERVAL,
        rope_base=5e5,
        only={
            "use_bias": (False,),
            "use_moe": (True,),
            "use_rmsnorm": (True,),
            "moe_use_aux_free": (True,),
            "moe_gate": ("topk", "topk_fused"),
            "compression_ratio": (1,),
            "hidden_dropout_prob": (0,),
        },
        without_effect=("moe_capacity", *_MTP),
    ),
}

WITHOUT_EFFECT = {model_type: t.without_effect for model_type, t in _TYPES.items()}
# Our settings and their types, with dotted names.
_KINDS = {**types_of(GroupedConfig), **{f"router.{name}": kind for name, kind in types_of(Choice).items()}}


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors for multi-token prediction; those of ERNIE 4.5 have names of their own."""
    mtp = {name: "multi-token prediction" for name in left if name.startswith("model.mtp_")}
    return find_next_token_layers(left, expected) | mtp


def keys(model_type: str) -> dict[str, str]:
    """Return our settings and their keys in a config.json of a model type."""
    t = _TYPES[model_type]
    found = {ours: names[0] for ours, names in t.keys.items()} | {flag.ours: key for key, flag in t.flags.items()}
    found |= {"head_dim": "head_dim", "window": "sliding_window", "rope_base": "rope_theta"} | YARN_KEYS
    return found | {"rotary_dims": "rotary_dim" if model_type == "minimax_m2" else "partial_rotary_factor"}


def config_from_hub(mapping: Mapping[str, Any]) -> GroupedConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config, model_type = ConfigJson(mapping), mapping["model_type"]
    t = _TYPES[model_type]
    settings: dict[str, Any] = {"model_type": model_type, **t.always}
    defaults = {"tied_embeddings": False, **t.defaults}
    for ours, names in t.keys.items():
        # Only ERNIE's shared experts may be absent.
        least = 0 if names[0] == "moe_num_shared_experts" else 1
        missing = {"default": defaults[ours]} if ours in defaults else {}
        # dots.llm1 is published with null for one group.
        null = model_type == "dots1" and names in _GROUPS.values()
        value = config.read_either(names, _KINDS[ours] | None if null else _KINDS[ours], least=least, **missing)
        settings[ours] = defaults[ours] if value is None else value
    for key, flag in t.flags.items():
        settings[flag.ours] = flag.true if config.read(key, bool, flag.default) else flag.false
    every, layers = t.layers.read(config, settings["layers"])
    settings |= {"moe_every": every, "mlp_layers": [*layers]}
    if all(i in settings["mlp_layers"] for i in range(every - 1, settings["layers"], every)):
        shown = " and ".join(f"{key}={show(mapping.get(key))[:80]}" for key in t.layers.keys)
        raise UserError(f"config.json: {shown} leave no layer of num_hidden_layers={settings['layers']} with experts")
    # No layer of these has an MLP; where a width is asked for, it is that of experts.
    settings.setdefault("mlp", settings["expert_mlp"])
    settings["head_dim"] = config.read("head_dim", int | None, t.head_dim) or settings["embed"] // settings["heads"]
    only, without_effect = dict(t.only), t.without_effect
    if model_type == "qwen3_moe":
        window = config.read("sliding_window", int | None, 4096)
        has_window = config.read("use_sliding_window", bool, False)
        settings["window"] = window if has_window else None
        # The number of first layers without a window, which only some versions of transformers read.
        only |= {"max_window_layers": (0,)} if has_window else {}
        without_effect += () if has_window else ("max_window_layers",)
    elif model_type == "dots1":
        settings["window"] = _read_window_by_layer(config, settings["layers"])
    elif model_type == "hy_v3":
        only["expert_hidden_dim"] = (settings["expert_mlp"],)  # the same size
    elif model_type == "minimax_m2":
        only["attn_type_list"] = ([1] * settings["layers"],)  # 0 is linear attention
        only["sliding_window"] = ()
    rope = _read_rope(config, settings, t)
    settings |= {"rope_base": rope.base, "yarn": rope.yarn}
    settings["rotary_dims"] = None if rope.share == 1 else int(settings["head_dim"] * rope.share)
    config.refuse_others(only, without_effect)
    router = {ours.removeprefix("router."): settings.pop(ours) for ours in [*settings] if ours.startswith("router.")}
    return convert(GroupedConfig, settings | {"router": router}, "model")


def _read_window_by_layer(config: ConfigJson, layers: int) -> int | None:
    """Return the window of dots.llm1, whose layers may differ in transformers."""
    window = config.read("sliding_window", int | None, 4096)
    first = config.read("max_window_layers", int | None, 62, least=0)
    found = config.read("layer_types", tuple[Literal["full_attention", "sliding_attention"], ...] | None, None)
    if found is None:
        full = layers if window is None else min(layers, first or 0)
        found = ("full_attention",) * full + ("sliding_attention",) * (layers - full)
    if len({*found}) > 1 or len(found) != layers:
        raise UserError(
            f"config.json: layer_types={show(list(found))[:80]} or max_window_layers={first}: this family supports "
            f"only one window for all {layers} layers; load a folder with sliding_window=null"
        )
    return window if found[0] == "sliding_attention" else None


def _read_rope(config: ConfigJson, settings: Mapping[str, Any], t: _Type) -> RopeSettings:
    """Return the rotary settings; MiniMax-M2 may have the rotated dimensions in place of their share."""
    head, share = settings["head_dim"], t.share
    dims = config.read("rotary_dim", int | None, None) if settings["model_type"] == "minimax_m2" else None
    rope = read_rope(
        config, settings["max_length"], ("default", "yarn"), t.rope_base, share if dims is None else dims / head
    )
    if not 0 < rope.share <= 1:
        raise UserError(f"config.json: partial_rotary_factor={rope.share}: expected a number above 0 and at most 1")
    if dims is not None and int(head * rope.share) != dims:
        raise UserError(
            f"config.json: rotary_dim={dims} and partial_rotary_factor={rope.share} are one setting with head_dim="
            f"{head}; delete the wrong one"
        )
    return rope


def config_to_hub(config: GroupedConfig) -> dict[str, Any]:
    """Return the keys that transformers reads.

    Raises `UserError` for a setting that a folder of the `model_type` cannot have.
    """
    c, t = config, _TYPES[config.model_type]
    mapping: dict[str, Any] = {}
    for ours, names in t.keys.items():
        value = _setting(c, ours)
        mapping[names[0]] = float(value) if _KINDS[ours] is float else value  # transformers refuses 1 for 1.0
    if "shared_experts" in t.keys and "moe_num_shared_experts" not in mapping and not c.shared_experts:
        raise UserError(f"model.shared_experts=0: {c.model_type} in transformers always has some; set at least 1")
    mapping |= {key: _setting(c, flag.ours) != flag.false for key, flag in t.flags.items()} | t.layers.write(c)
    mapping |= {
        "architectures": [f"{t.architecture}ForCausalLM"],
        "model_type": c.model_type,
        "head_dim": c.head_dim,
        "rope_parameters": write_rope(c.rope_base, c.yarn),
        "hidden_act": "silu",
    }
    if t.share is not None:
        dims = c.rotary_dims or c.head_dim
        share = dims / c.head_dim
        # transformers rounds the product down.
        mapping["rope_parameters"]["partial_rotary_factor"] = (
            share if int(c.head_dim * share) == dims else math.nextafter(share, 2)
        )
        mapping |= {"rotary_dim": dims} if c.model_type == "minimax_m2" else {}
    if c.model_type == "qwen3_moe":
        mapping |= {"use_sliding_window": c.window is not None, "sliding_window": c.window}
    elif c.model_type == "dots1":
        kind = "full_attention" if c.window is None else "sliding_attention"
        mapping |= {"sliding_window": c.window, "layer_types": [kind] * c.layers}
    elif c.model_type == "glm4_moe":
        mapping["num_nextn_predict_layers"] = 0
    _check_same(c, config_from_hub(mapping))
    return mapping


def _setting(config: GroupedConfig, name: str) -> Any:
    """Return a setting by its dotted name."""
    section, _, last = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, last)


# What a folder does not hold, and what is written in another form: by layers, and by a share.
_NOT_COMPARED = ("load_balance", "load_balance_over", "z_loss", "mlp", "moe_every", "mlp_layers", "rotary_dims")


def _check_same(config: GroupedConfig, read: GroupedConfig) -> None:
    """Raise `UserError` where the folder of a configuration would describe another model, `read`."""

    def comparable(c: GroupedConfig) -> dict[str, Any]:
        found = {name: value for name, value in vars(c).items() if name not in _NOT_COMPARED}
        router = vars(found.pop("router")) | {"bias_rate": None}
        router |= {"group_score": None} if c.router.groups == 1 else {}  # of one group nothing is chosen
        if c.yarn.factor == 1:
            found["yarn"] = Yarn()
        if "mlp" in kinds(c)[0]:
            found["mlp"] = c.mlp
        found |= {f"router.{name}": value for name, value in router.items()}
        return found | {"rotary_dims": c.rotary_dims or c.head_dim, "mlp_layers": kinds(c)[0]}

    wanted, found = comparable(config), comparable(read)
    for name, value in found.items():
        if wanted.get(name) != value:
            ours, theirs = (
                show(list(x) if isinstance(x, tuple) else x) for x in (_setting(config, name), _setting(read, name))
            )
            raise UserError(
                f"model.{name}={ours}: a {config.model_type} folder of it would be read as {theirs}; change "
                f"model.{name} or model.model_type"
            )
