"""DeepSeek's configuration from and to the config.json of a Hugging Face folder, and its tensor names."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from moezoo.errors import UserError
from moezoo.models.config_json import YARN_KEYS, ConfigJson, extension_keys, read_rope, rope_keys
from moezoo.models.deepseek import DeepSeekConfig
from moezoo.models.hub import SILU, Found, Hub, Key, ModelType, Part, Settings, common, fixed, required, rope
from moezoo.models.names import LATENT_ATTENTION, MLP, MOE, Rows, layers, rows
from moezoo.nn.rotary import Pairs, Yarn
from moezoo.typed import show

# The type alone gives the score of the router: softmax for deepseek_v2 and mistral4, sigmoid for the others.
_ABOUT = {
    "deepseek_v2": "softmax router; DeepSeek-V2 and V2-Lite",
    "deepseek_v3": "sigmoid router with a choice bias; DeepSeek-V3 and R1, Moonlight",
    "kimi_k2": "as deepseek_v3; Kimi K2",
    "glm4_moe_lite": "as deepseek_v3, but a list tells which layers have experts; GLM-4.7-Flash",
    "mistral4": "softmax router, groups as in deepseek_v3, and queries scaled by their position; Mistral Small 4",
    "deepseek_v32": "as deepseek_v3, for texts of at most index_topk tokens, without sparse attention; DeepSeek-V3.2",
    "glm_moe_dsa": "as deepseek_v32; GLM-5, 5.1 and 5.2",
}
_ROWS = layers(LATENT_ATTENTION)
# Mistral 4 has one tensor for all experts of a layer.
_JOINED = rows(f"{MOE}experts.", f"{MLP}experts.", "gate+up=gate_up_proj down=down_proj", "of_experts")
_JOINED = (*(row for row in _ROWS if "{expert}" not in row.name), *_JOINED)
FIRST, LIST = "first_k_dense_replace", "mlp_layer_types"


def dense(default: int, *keys: str) -> Part:
    """Return how many first layers have an MLP: the first of `keys` that is there says it, or else `default`."""

    def read(config: ConfigJson, found: Found) -> Found:
        """Raise `UserError` where later layers have one too."""
        types, layers = None, found["layers"]
        if LIST in keys:
            types = config.read(LIST, tuple[Literal["dense", "sparse"], ...] | None, None)
        if types is None:
            return {"dense_layers": config.read(FIRST, int, default, least=0) if FIRST in keys else default}
        first, shown = types.count("dense"), f"{LIST}={show(list(types))[:80]}"
        if types != ("dense",) * first + ("sparse",) * (layers - first):
            raise UserError(
                f"config.json: {shown}: expected num_hidden_layers={layers} entries, all dense before all sparse; "
                "moezoo builds no other order"
            )
        if (beside := config.read(FIRST, int | None, None, least=0)) not in (None, first):
            raise UserError(f"config.json: {FIRST}={beside} contradicts {shown}; delete the wrong one")
        return {"dense_layers": first}

    return Part(read, lambda c: {FIRST: c.dense_layers}, {"dense_layers": keys[-1]})


def _router(score: str, group_score: str, choice_bias: str) -> Settings:
    """Return what the model type alone says of the router, and the keys without which vLLM and SGLang have another."""
    found = {"router.score": score, "router.group_score": group_score, "router.choice_bias": choice_bias}
    keys = {"scoring_func": score} | ({"topk_method": "noaux_tc"} if choice_bias == "learned" else {})
    return {"router": fixed(found, **keys)}


def _read_method(config: ConfigJson, found: Found) -> Found:
    """Return the groups of DeepSeek-V2, one unless its method needs several, and which dimensions turn together."""
    config.read("rope_interleave", bool, True)  # without effect, as in transformers
    one = config.read("topk_method", Literal["greedy", "group_limited_greedy"], "greedy") == "greedy"
    return {"rope_pairs": "interleaved"} | ({"router.groups": 1, "router.kept_groups": 1} if one else {})


_V2: Settings = {
    **_router("softmax", "max", "none"),
    "router.groups": Key("n_group", None, null=None),
    "router.kept_groups": Key("topk_group", None, null=None),
    "router.gates": fixed({"router.gates": "scores"}, norm_topk_prob=False),
    "rope_pairs": fixed(rope_interleave=True),
    "loss": fixed({"load_balance": 0.003}),  # of both released models, by their paper
    "method": Part(
        _read_method, lambda c: {"topk_method": "group_limited_greedy" if c.router.groups > 1 else "greedy"}
    ),
}


def _sparse(pairs: Pairs) -> Settings:
    """Return what types with sparse attention have besides; the `pairs` of its index differ by type."""

    def read(config: ConfigJson, found: Found) -> Found:
        """Return what the index has. Raises `UserError` where a layer is of another type."""
        config.read_layer_types(("indexed_attention",), found["layers"])
        return {"index_topk": config.read("index_topk", int, 2048), "index_pairs": pairs}

    index = Part(read, lambda c: {"index_topk": c.index_topk}, {"index_topk": "index_topk"})
    return {"rope_pairs": fixed({"rope_pairs": "interleaved"}, rope_interleave=True), "index": index}


def _read_query_scale(config: ConfigJson, found: Found) -> Found:
    """Return the rotary settings of Mistral 4, and the factor on queries, which transformers needs; 0 is none."""
    beta = config.rope_table().read("llama_4_scaling_beta", float)
    known = ("llama_4_scaling_beta", "max_position_embeddings")
    rope_dim, dim = found["rope_dim"], found["nope_dim"] + found["rope_dim"]
    base, yarn, share = read_rope(config, found["max_length"], ("yarn",), share=rope_dim / dim, others=known)
    if share != rope_dim / dim:
        raise UserError(
            f"config.json: partial_rotary_factor={share}: expected {rope_dim / dim}, which is "
            f"qk_rope_head_dim={rope_dim} of {dim}; delete the key"
        )
    # It would be written as a DeepSeek-V2, which has other names of tensors.
    interleaved = config.read("rope_interleave", bool, True)
    if interleaved and not beta and found["router.groups"] == 1 and found["router.gates"] == "scores":
        raise UserError(
            "config.json: llama_4_scaling_beta=0, n_group=1 and norm_topk_prob=false are not built together"
        )
    query_scale = {"beta": beta, "length": yarn["length"]}
    return {"rope_base": base, "yarn": {} if Yarn(**yarn).is_plain else yarn, "query_scale": query_scale}


def _write_query_scale(c: DeepSeekConfig) -> Mapping[str, Any]:
    """Return the rotary settings of Mistral 4: always YaRN, whose factor may be 1, as no others rotate part of a head.

    Raises `UserError` for two lengths of texts in training, as one key has both.
    """
    lengths = [c.yarn.length] * (not c.yarn.is_plain) + [c.query_scale.length] * (c.query_scale.beta != 0)
    if len(set(lengths)) > 1:
        raise UserError(
            f"model.yarn.length={c.yarn.length} and model.query_scale.length={c.query_scale.length}: Mistral 4 in "
            "transformers has one length; make them equal"
        )
    yarn = extension_keys(c, "yarn")
    if lengths:
        yarn["original_max_position_embeddings"] = lengths[0]
    share = c.rope_dim / (c.nope_dim + c.rope_dim)
    rope = {"rope_type": "yarn", "rope_theta": c.rope_base, "partial_rotary_factor": share, **yarn}
    return rope_keys(rope | {"llama_4_scaling_beta": c.query_scale.beta})


_SCALE_KEYS = {"rope_base": "rope_theta", "query_scale.beta": "llama_4_scaling_beta", **YARN_KEYS}
_MISTRAL_4: Settings = {
    **_router("softmax", "sum_of_top2", "none"),
    "rope": Part(_read_query_scale, _write_query_scale, _SCALE_KEYS),
}
# Keys with one value.
ONLY: Mapping[str, Any] = {
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32",),
    "qk_head_dim": lambda found: found["nope_dim"] + found["rope_dim"],
    # Each head has keys and values of its own, made of the latent.
    "num_key_value_heads": lambda found: found["heads"],
    FIRST: lambda found: found["dense_layers"],  # where the list was read
}
_SIGMOID = ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_SOFTMAX = ONLY | {"scoring_func": ("softmax",)}
_INDEXED = _SIGMOID | {"rope_interleave": (True,)}
# Coefficients of routing losses, which transformers does not have; how experts were split; further layers, which are
# not loaded. In two types `head_dim` must fit other sizes; in the others it is not read.
_UNREAD = "aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers"
_USUAL = f"{_UNREAD} head_dim"
# Which tokens the index of sparse attention selects, where there are more than `index_topk`; the last key is that of
# multi-token prediction.
_INDEX = f"{_USUAL} index_head_dim index_n_heads indexer_types index_topk_pattern index_topk_freq"
_INDEX += " index_skip_topk_offset indexer_rope_interleave index_share_for_mtp_iteration"


def _type(
    architecture: str,
    dense: Part,
    max_length: int = 4096,
    groups: tuple[int, int] = (1, 1),
    scale: float = 2.5,
    others: Settings | None = None,
    rows: Rows = _ROWS,
    only: Mapping[str, Any] = _SIGMOID,
    without_effect: str = _USUAL,
) -> ModelType:
    """Return a model type with the numbers that missing keys stand for, as in transformers.

    `others`: settings that it has in other keys than DeepSeek-V3, or that DeepSeek-V3 has not.
    """
    settings = {
        **common(max_length),
        "q_lora": Key("q_lora_rank", None),
        **required("kv_lora=kv_lora_rank nope_dim=qk_nope_head_dim rope_dim=qk_rope_head_dim value_dim=v_head_dim"),
        **required("mlp=intermediate_size expert_mlp=moe_intermediate_size"),
        "dense": dense,
        "experts": Key("n_routed_experts num_local_experts num_experts"),
        "shared_experts": Key("n_shared_experts", 0, null=0, least=0),
    }
    further = {
        **_router("sigmoid", "sum_of_top2", "learned"),
        "kv_heads": Part(write=lambda c: {"num_key_value_heads": c.heads}),
        "router.groups": Key("n_group", groups[0]),
        "router.kept_groups": Key("topk_group", groups[1]),
        "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
        "router.scale": Key("routed_scaling_factor", scale),
        "rope": rope("yarn"),
        "rope_pairs": Key("rope_interleave", True, words=("halves", "interleaved")),
        "hidden_act": SILU,
        "fixed": fixed(attention_bias=False, moe_layer_freq=1, num_nextn_predict_layers=0),
    }
    return ModelType(architecture, settings, further | (others or {}), rows, only, without_effect)


_V3 = _type("DeepseekV3", dense(3, FIRST), groups=(8, 4))
_BOTH = dense(3, LIST, FIRST)
_V2_ONLY = _SOFTMAX | {"norm_topk_prob": (False,)}
_LITE_ONLY = _SIGMOID | {"head_dim": lambda found: found["rope_dim"]}  # another name of qk_rope_head_dim
_MISTRAL_ONLY = _SOFTMAX | {"head_dim": ONLY["qk_head_dim"]}
_TYPES = {
    "deepseek_v2": _type("DeepseekV2", dense(0, FIRST), 2048, scale=1.0, others=_V2, only=_V2_ONLY),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": _type("Glm4MoeLite", dense(1, LIST), 202752, scale=1.8, only=_LITE_ONLY, without_effect=_UNREAD),
    "mistral4": _type("Mistral4", dense(0, FIRST), 1048576, (1, 1), 1.0, _MISTRAL_4, _JOINED, _MISTRAL_ONLY, _UNREAD),
    "deepseek_v32": _type(
        "DeepseekV32", _BOTH, 163840, (8, 4), others=_sparse("halves"), only=_INDEXED, without_effect=_INDEX
    ),
    "glm_moe_dsa": _type(
        "GlmMoeDsa", _BOTH, 202752, others=_sparse("interleaved"), only=_INDEXED, without_effect=_INDEX
    ),
}


def _type_of(c: DeepSeekConfig) -> str:
    """Return the model type of transformers that computes the same; of several, the oldest."""
    r, plain = c.router, not (c.query_scale.beta or c.index_topk)
    by_top2 = r.groups == 1 or r.group_score == "sum_of_top2"
    if r.score == "sigmoid" and r.choice_bias == "learned" and by_top2:
        if plain:
            return "deepseek_v3"
        if not c.query_scale.beta and c.rope_pairs == "interleaved":
            return "glm_moe_dsa" if c.index_pairs == "interleaved" else "deepseek_v32"
    elif r.score == "softmax" and r.choice_bias == "none" and not c.index_topk:
        by_max = r.groups == 1 or r.group_score == "max"
        if plain and by_max and r.gates == "scores" and c.rope_pairs == "interleaved":
            return "deepseek_v2"
        if by_top2:
            return "mistral4"
    raise UserError(
        f"no model type of transformers has these together: model.router.score={r.score}, "
        f"model.router.choice_bias={r.choice_bias}, model.router.groups={r.groups}, "
        f"model.router.group_score={r.group_score}, model.router.gates={r.gates}, model.rope_pairs={c.rope_pairs}, "
        f"model.query_scale.beta={c.query_scale.beta}, model.index_topk={show(c.index_topk)}; "
        f"choose those of one of {', '.join(_TYPES)}"
    )


def _check(c: DeepSeekConfig, mapping: Mapping[str, Any]) -> None:
    for setting, only in (("least_sum", 0), ("added_to_sum", 1e-20)):
        value = getattr(c.router, setting)
        if value != only:
            raise UserError(f"model.router.{setting}={value}: DeepSeek's routers in transformers have only {only}")


# Tensors that only layers for multi-token prediction have (DeepSeek-V3, section 2.2).
_NEXT_TOKEN = ("eh_proj", "enorm", "hnorm", "shared_head")


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of the extra layers for multi-token prediction, and those of sparse attention's index."""
    layer_of = {name: m[1] for name in left | expected if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    known = {layer_of[name] for name in expected if name in layer_of}
    further = {layer_of[name] for name in left if name in layer_of and name.split(".")[3] in _NEXT_TOKEN} - known
    index = {name for name in left if ".self_attn.indexer." in name and layer_of.get(name) in known}
    return dict.fromkeys(index, "sparse attention's index") | {
        name: "multi-token prediction" for name in left if layer_of.get(name) in further
    }


# Kimi K2 and GLM-4.7-Flash become `deepseek_v3`, which has the same parameters and computes the same. A folder of
# sparse attention has no tensors of the index, so transformers gives it a random one, which has no effect on texts of
# up to `index_topk` tokens.
HUB = Hub(_ABOUT, _TYPES, _type_of, _check, find_unused)
