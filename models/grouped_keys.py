"""Keys of config.json that types with grouped-query attention share: which layers have experts, heads, and windows.

What differs most is where the types keep which layers have an MLP instead of experts. Our settings are
`moe_every` and `mlp_layers`, and theirs:

| key in config.json | types |
|---|---|
| `decoder_sparse_step`, `mlp_only_layers` | Qwen3-MoE, Qwen2-MoE |
| `mlp_layer_types` | Hunyuan 3 |
| `moe_layer_interval` and two more | ERNIE 4.5 |
| `first_k_dense_replace` | GLM, Sarvam, dots.llm1 |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from moezoo.errors import UserError
from moezoo.models.config_json import YARN_KEYS, ConfigJson, read_rope, rope_keys, rotary_share, write_rope
from moezoo.models.grouped import GroupedConfig, kinds
from moezoo.models.hub import SILU, Found, Key, Part, Settings, head_dim
from moezoo.typed import show

# Our settings `moe_every` and `mlp_layers`: every how many layers one has experts, and which of these have an MLP.
Split = tuple[int, Sequence[int]]


def _which_have_experts(
    keys: str, read: Callable[[ConfigJson, int], Split], write: Callable[[GroupedConfig], Mapping[str, Any]]
) -> Settings:
    """Return the settings that state which layers have experts.

    Args:
        keys: Their keys in config.json, with spaces in between, for messages.
        read: A function of config.json and the number of layers.
        write: A function of the configuration that returns these keys.
    """

    def read_checked(config: ConfigJson, found: Found) -> Found:
        """Return what `read` does. Raises `UserError` where no layer has experts."""
        layers = found["layers"]
        every, without = read(config, layers)
        if all(i in without for i in range(every - 1, layers, every)):
            shown = " and ".join(f"{key}={show(config.get(key))[:80]}" for key in keys.split())
            raise UserError(f"config.json: {shown} leave no layer of num_hidden_layers={layers} with experts")
        return {"moe_every": every, "mlp_layers": [*without]}

    return {"with_experts": Part(read_checked, write)}


def _read_mlp_only_layers(config: ConfigJson, layers: int) -> Split:
    listed = config.read("mlp_only_layers", tuple[int, ...] | None, None) or ()
    return config.read("decoder_sparse_step", int, 1), [i for i in listed if 0 <= i < layers]


def _read_layer_types(config: ConfigJson, layers: int) -> Split:
    types = config.read("mlp_layer_types", tuple[Literal["dense", "sparse"], ...] | None, None)
    types = ("dense", *["sparse"] * (layers - 1)) if types is None else types
    if len(types) != layers:
        raise UserError(f"config.json: mlp_layer_types names {len(types)} layers, but num_hidden_layers={layers}")
    without = [i for i, kind in enumerate(types) if kind == "dense"]
    # Another spelling, which vLLM and SGLang read, and transformers does not.
    first = config.read("first_k_dense_replace", int | None, None, least=0)
    if first is not None and [*range(min(first, layers + 1))] != without:
        raise UserError(f"config.json: first_k_dense_replace={first} contradicts mlp_layer_types; delete the wrong one")
    return 1, without


def _write_layer_types(config: GroupedConfig) -> dict[str, Any]:
    types = ["sparse" if kind == "moe" else "dense" for kind in kinds(config)[0]]
    first = types.index("sparse")
    return {"mlp_layer_types": types} | ({} if "dense" in types[first:] else {"first_k_dense_replace": first})


def _read_interval(config: ConfigJson, layers: int) -> Split:
    every = config.read("moe_layer_interval", int, 1)
    start = config.read("moe_layer_start_index", int, 1, least=0)
    end = config.read("moe_layer_end_index", int, -1, least=-1)
    inside = range(start, (layers if end == -1 else end + 1))
    return every, [i for i in range(every - 1, layers, every) if i not in inside]


def _write_interval(config: GroupedConfig) -> dict[str, Any]:
    with_experts = [i for i, kind in enumerate(kinds(config)[0]) if kind == "moe"]
    ends = {"moe_layer_start_index": with_experts[0], "moe_layer_end_index": with_experts[-1]}
    return {"moe_layer_interval": config.moe_every, **ends}


BY_LIST = _which_have_experts(
    "decoder_sparse_step mlp_only_layers",
    _read_mlp_only_layers,
    lambda c: {"decoder_sparse_step": c.moe_every, "mlp_only_layers": list(c.mlp_layers)},
)
BY_TYPE = _which_have_experts("mlp_layer_types", _read_layer_types, _write_layer_types)
BY_INTERVAL = _which_have_experts(
    "moe_layer_interval moe_layer_start_index moe_layer_end_index", _read_interval, _write_interval
)


def first_have_mlps(default: int) -> Settings:
    """Return the settings of types whose first layers have an MLP; `default` of them where the key is missing."""
    key = "first_k_dense_replace"
    return _which_have_experts(
        key,
        lambda config, layers: (1, range(min(layers, config.read(key, int, default, least=0)))),
        lambda c: {key: (*kinds(c)[0], "moe").index("moe")},
    )


def heads_and_rope(
    base: float = 1e4,
    size: int | None = None,
    share: float | None = None,
    key: str = "partial_rotary_factor",
    others: Iterable[str] = (),
) -> Settings:
    """Return the settings of heads and of rotary positions.

    Args:
        base: The base of frequencies where no key has it.
        size: The size of a head where no key has it; None: `embed` / heads.
        share: The rotated share of a head where no key has it; None: heads are rotated whole, and no share is written.
        key: The key of the rotated part: of its share, or `rotary_dim` of its dimensions, as in MiniMax-M2.
        others: Keys of the table of rotary settings that change nothing.
    """

    def read(config: ConfigJson, found: Found) -> Found:
        head = found["head_dim"]
        dims = config.read(key, int | None, None) if key == "rotary_dim" else None
        given = share if dims is None else dims / head
        rope_base, yarn, part = read_rope(config, found["max_length"], ("default", "yarn"), base, given, others)
        if not 0 < part <= 1:
            raise UserError(f"config.json: partial_rotary_factor={part}: expected a number above 0 and at most 1")
        rotated = int(head * part)
        if dims not in (None, rotated):
            raise UserError(
                f"config.json: rotary_dim={dims} and partial_rotary_factor={part} are one setting with "
                f"head_dim={head}; delete the wrong one"
            )
        return {"rope_base": rope_base, "yarn": yarn, "rotary_dims": None if part == 1 else rotated}

    def write(c: GroupedConfig) -> Mapping[str, Any]:
        rope, dims = write_rope(c, "yarn"), c.rotary_dims or c.head_dim
        if share is not None:
            rope["partial_rotary_factor"] = rotary_share(dims, c.head_dim)
        return rope_keys(rope)

    rope = Part(read, write, {"rope_base": "rope_theta", "rotary_dims": key, **YARN_KEYS})
    return {"head_dim": Key("head_dim", size, null=head_dim), "rope": rope, "hidden_act": SILU}


def _read_window(config: ConfigJson, found: Found) -> Found:
    """Read the window of Qwen3-MoE, which all layers have, or none."""
    window = config.read("sliding_window", int | None, 4096)
    if config.read("use_sliding_window", bool, False):
        return {"window": window}
    config.get("max_window_layers")  # the first layers without a window, which only some versions of transformers read
    return {"window": None}


def _read_window_by_layer(config: ConfigJson, found: Found, full: int = 62) -> Found:
    """Read the window of dots.llm1, whose layers may differ in transformers, and must not here.

    The first `full` layers have no window where no key states their number.
    """
    window = config.read("sliding_window", int | None, 4096)
    layers, first = found["layers"], config.read("max_window_layers", int | None, full, least=0)
    types = config.read_layer_types(("full_attention", "sliding_attention"), layers)
    if types is None:
        full = layers if window is None else min(layers, first or 0)
        types = ("full_attention",) * full + ("sliding_attention",) * (layers - full)
    return _one_window(window, types, first)


def _one_window(window: int | None, types: Sequence[str], first: int | None) -> Found:
    """Return the window of all layers, or none. Raises `UserError` where some of these `types` have it."""
    if len({*types}) > 1:
        raise UserError(
            f"config.json: layer_types={show(list(types))[:80]} or max_window_layers={first}: this family supports "
            f"only one window for all {len(types)} layers; load a folder with sliding_window=null"
        )
    return {"window": window if types[0] == "sliding_attention" else None}


def _read_window_of_qwen2(config: ConfigJson, found: Found) -> Found:
    """Read the window of Qwen2-MoE, which every other layer has where no key lists them."""
    used, layers = config.read("use_sliding_window", bool, False), range(found["layers"])
    # transformers 5 writes 0 where there is none.
    window = config.read("sliding_window", int if used else int | None, 4096, least=int(used))
    first = config.read("max_window_layers", int, 28, least=0)
    types = config.read_layer_types(("full_attention", "sliding_attention"), len(layers))
    if types is None:
        types = ["sliding_attention" if used and i < first and i % 2 == 0 else "full_attention" for i in layers]
    if not used and "sliding_attention" in types:
        raise UserError(
            "config.json: layer_types names sliding_attention, and use_sliding_window=false; correct the wrong one"
        )
    return _one_window(window, types, first)


def read_window_of_qwen3(config: ConfigJson, found: Found) -> Found:
    """Read the window of the dense Qwen3."""
    for key in ("sliding_window", "max_window_layers", "layer_types"):
        config.get(key)
    used = config.read("use_sliding_window", bool, False)
    return _read_window_by_layer(config, found, 28) if used else {"window": None}


def _write_window_by_layer(c: GroupedConfig) -> Mapping[str, Any]:
    kind = "full_attention" if c.window is None else "sliding_attention"
    return {"sliding_window": c.window, "layer_types": [kind] * c.layers}


WINDOW = Part(
    _read_window,
    lambda c: {"use_sliding_window": c.window is not None, "sliding_window": c.window},
    {"window": "sliding_window"},
)
WINDOW_OF_QWEN2 = Part(
    _read_window_of_qwen2,
    lambda c: {"use_sliding_window": c.window is not None, **_write_window_by_layer(c)},
    {"window": "sliding_window"},
)
WINDOW_BY_LAYER = Part(_read_window_by_layer, _write_window_by_layer, {"window": "sliding_window"})
