"""DeepSeek's configuration from and to the config.json of a Hugging Face folder."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from moezoo.convert import convert, show
from moezoo.errors import UserError
from moezoo.models.base import Names
from moezoo.models.config_json import COMMON_KEYS, YARN_KEYS, ConfigJson, read_rope, write_keys, write_rope
from moezoo.models.deepseek import JOINED_NAMES, LAYER_NAMES, DeepSeekConfig
from moezoo.models.deepseek import NAMES as NAMES
from moezoo.nn.rope import Pairs

# The type alone gives the score of the router: softmax for deepseek_v2 and mistral4, sigmoid for the others.
MODEL_TYPES = {
    "deepseek_v2": "softmax router; DeepSeek-V2 and V2-Lite",
    "deepseek_v3": "sigmoid router with a choice bias; DeepSeek-V3 and R1, Moonlight",
    "kimi_k2": "as deepseek_v3; Kimi K2",
    "glm4_moe_lite": "as deepseek_v3, but a list tells which layers have experts; GLM-4.7-Flash",
    "mistral4": "softmax router, groups as in deepseek_v3, and queries scaled by their position; Mistral Small 4",
    "deepseek_v32": "as deepseek_v3, for texts of at most index_topk tokens, without sparse attention; DeepSeek-V3.2",
    "glm_moe_dsa": "as deepseek_v32; GLM-5, 5.1 and 5.2",
}
# Our settings and their keys in config.json: those that are read and written as they are, and all.
_PLAIN = COMMON_KEYS | {"q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope_dim": "qk_nope_head_dim"}
_PLAIN |= {"rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
_PLAIN |= {"mlp": "intermediate_size", "expert_mlp": "moe_intermediate_size"}
KEYS = _PLAIN | {"dense_layers": "first_k_dense_replace", "experts": "n_routed_experts"}
KEYS |= {"shared_experts": "n_shared_experts", "rope_base": "rope_theta"}
KEYS |= {"router.groups": "n_group", "router.kept_groups": "topk_group", "router.scale": "routed_scaling_factor"}
KEYS |= YARN_KEYS
KEYS |= {"query_scale.beta": "llama_4_scaling_beta", "index_topk": "index_topk"}
_ONLY: dict[str, Any] = {"attention_bias": (False,), "moe_layer_freq": (1,)}
# Coefficients of routing losses, which transformers does not have; how experts were split; further layers, which are
# not loaded.
_UNREAD = ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")
# Which tokens the index of sparse attention selects, where there are more than `index_topk`.
_INDEX = ("index_head_dim", "index_n_heads", "indexer_types", "index_topk_pattern", "index_topk_freq")
_INDEX += ("index_skip_topk_offset", "indexer_rope_interleave")


class _Kind(NamedTuple):
    """What distinguishes a model type, and the numbers that missing keys stand for, as in transformers."""

    architecture: str
    groups: int = 1
    kept_groups: int = 1
    scale: float = 2.5
    dense_layers: int = 3
    max_length: int = 4096
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    # The keys that tell which layers have an MLP, the first one that is there.
    dense_keys: tuple[str, ...] = ("first_k_dense_replace",)
    index_pairs: Pairs | None = None  # None: no index


_WITH_HEAD_DIM = ("glm4_moe_lite", "mistral4")
_BOTH = ("mlp_layer_types", "first_k_dense_replace")
_V3 = _Kind("DeepseekV3", 8, 4)
_KINDS = {
    "deepseek_v2": _Kind("DeepseekV2", scale=1.0, dense_layers=0, max_length=2048, score="softmax"),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": _Kind("Glm4MoeLite", 1, 1, 1.8, 1, 202752, dense_keys=("mlp_layer_types",)),
    "mistral4": _Kind("Mistral4", 1, 1, 1.0, 0, 1048576, "softmax"),
    "deepseek_v32": _Kind("DeepseekV32", 8, 4, 2.5, 3, 163840, dense_keys=_BOTH, index_pairs="halves"),
    "glm_moe_dsa": _Kind("GlmMoeDsa", 1, 1, 2.5, 3, 202752, dense_keys=_BOTH, index_pairs="interleaved"),
}
# In two types `head_dim` must fit other sizes; in the others it is not read.
WITHOUT_EFFECT = {
    model_type: (*_UNREAD, *_INDEX * bool(kind.index_pairs), *("head_dim",) * (model_type not in _WITH_HEAD_DIM))
    for model_type, kind in _KINDS.items()
}


def keys(model_type: str) -> Mapping[str, str]:
    """Return our settings and their keys in config.json."""
    return KEYS | {"dense_layers": _KINDS[model_type].dense_keys[-1]}


def layer_names(config: DeepSeekConfig) -> Names:
    """Return the tensor names of a layer's arrays."""
    return JOINED_NAMES if _model_type(config) == "mistral4" else LAYER_NAMES


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


def config_from_hub(mapping: Mapping[str, Any]) -> DeepSeekConfig:
    """Return the configuration. Raises `UserError` for settings that the family does not have."""
    config, model_type = ConfigJson(mapping), mapping["model_type"]
    kind = _KINDS[model_type]
    defaults = {"init_std": 0.02, "q_lora": None, "max_length": kind.max_length}
    settings = config.read_all(DeepSeekConfig, _PLAIN, defaults)
    rope_dim, head_dim = settings["rope_dim"], settings["nope_dim"] + settings["rope_dim"]
    only: dict[str, Any] = {"qk_head_dim": (head_dim,)}
    # Each head has keys and values of its own, made of the latent.
    only |= {"num_key_value_heads": (settings["heads"],)}
    if model_type == "mistral4":
        beta = _read_beta(config)
        known = ("llama_4_scaling_beta", "max_position_embeddings")
        share = rope_dim / head_dim
        rope = read_rope(config, settings["max_length"], ("yarn",), share=share, others=known)
        if rope.share != share:
            raise UserError(
                f"config.json: partial_rotary_factor={rope.share}: expected {share}, which is "
                f"qk_rope_head_dim={rope_dim} of {head_dim}; delete the key"
            )
        settings["query_scale"] = {"beta": beta, "length": rope.yarn["length"]}
        rope = rope._replace(yarn=rope.yarn if rope.yarn["factor"] != 1 else {})
        only |= {"scoring_func": ("softmax",), "head_dim": (head_dim,)}
    else:
        rope = read_rope(config, settings["max_length"], ("default", "yarn"))
    if model_type == "glm4_moe_lite":
        only |= {"head_dim": (rope_dim,)}  # another name of qk_rope_head_dim
    if kind.index_pairs:
        settings |= {"index_topk": config.read("index_topk", int, 2048), "index_pairs": kind.index_pairs}
        only |= {"layer_types": (["indexed_attention"] * settings["layers"],), "rope_interleave": (True,)}
    if model_type == "deepseek_v2":
        groups, kept = (config.read(key, int | None, None) for key in ("n_group", "topk_group"))
        if config.read("topk_method", Literal["greedy", "group_limited_greedy"], "greedy") == "greedy":
            groups = kept = 1
        normalised, interleaved = False, True
        config.read("rope_interleave", bool, True)  # without effect, as in transformers
        only |= {"scoring_func": ("softmax",), "norm_topk_prob": (False,)}
    else:
        groups, kept = config.read("n_group", int, kind.groups), config.read("topk_group", int, kind.kept_groups)
        normalised = config.read("norm_topk_prob", bool, True)
        interleaved = bool(kind.index_pairs) or config.read("rope_interleave", bool, True)
    if kind.score == "sigmoid":
        only |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    dense = _read_dense(config, settings["layers"], kind)
    settings |= {
        "dense_layers": dense,
        "experts": config.read_either(("n_routed_experts", "num_local_experts", "num_experts"), int),
        "shared_experts": config.read("n_shared_experts", int | None, 0, least=0) or 0,
        "router": {
            "score": kind.score,
            "groups": groups,
            "kept_groups": kept,
            "group_score": "max" if model_type == "deepseek_v2" else "sum_of_top2",
            "gates": "renormalised" if normalised else "scores",
            "scale": config.read("routed_scaling_factor", float, kind.scale),
            "choice_bias": "learned" if kind.score == "sigmoid" else "none",
        },
        "rope_base": rope.base,
        "rope_pairs": "interleaved" if interleaved else "halves",
        "yarn": rope.yarn,
    }
    only |= {"first_k_dense_replace": (dense,)}  # where the list was read
    config.refuse_others(_ONLY | only, WITHOUT_EFFECT[model_type])
    found = convert(DeepSeekConfig, settings, "model")
    if model_type == "mistral4" and _model_type(found) != model_type:  # which has other names of tensors
        raise UserError(
            "config.json: llama_4_scaling_beta=0, n_group=1 and norm_topk_prob=false are not built together"
        )
    return found


def _read_beta(config: ConfigJson) -> float:
    """Return the strength of the factor on queries. transformers needs it, and 0 is none."""
    tables = [config.table(key) for key in ("rope_scaling", "rope_parameters")]
    return (tables[0] or tables[1] or ConfigJson({}, "rope_parameters.")).read("llama_4_scaling_beta", float)


def _read_dense(config: ConfigJson, layers: int, kind: _Kind) -> int:
    """Return the number of first layers that have an MLP. Raises `UserError` where later ones have one too."""
    types = None
    if "mlp_layer_types" in kind.dense_keys:
        types = config.read("mlp_layer_types", tuple[Literal["dense", "sparse"], ...] | None, None)
    if types is None:
        if "first_k_dense_replace" not in kind.dense_keys:
            return kind.dense_layers
        return config.read("first_k_dense_replace", int, kind.dense_layers, least=0)
    dense = types.count("dense")
    if types != ("dense",) * dense + ("sparse",) * (layers - dense):
        raise UserError(
            f"config.json: mlp_layer_types={show(list(types))[:80]}: expected num_hidden_layers={layers} entries, all "
            "dense before all sparse; moezoo builds no other order"
        )
    return dense


def config_to_hub(config: DeepSeekConfig) -> dict[str, Any]:
    """Return the keys that transformers reads. Raises `UserError` for settings that no model type there has together.

    Kimi K2 and GLM-4.7-Flash become `deepseek_v3`, which has the same parameters and computes the same.

    A folder of sparse attention has no tensors of the index, so transformers gives it a random one. It has no effect on
    texts of up to `index_topk` tokens.
    """
    c, r = config, config.router
    model_type = _model_type(c)
    kind = _KINDS[model_type]
    if r.least_sum:
        raise UserError(f"model.router.least_sum={r.least_sum}: DeepSeek's routers in transformers have only 0")
    plain = ("dense_layers", "experts", "shared_experts")
    mapping = write_keys(c, _PLAIN | {ours: KEYS[ours] for ours in plain}) | {
        "architectures": [f"{kind.architecture}ForCausalLM"],
        "model_type": model_type,
        "num_key_value_heads": c.heads,
        "n_group": r.groups,
        "topk_group": r.kept_groups,
        "norm_topk_prob": r.gates == "renormalised",
        "routed_scaling_factor": r.scale,
        "rope_parameters": write_rope(c.rope_base, c.yarn),
        "rope_interleave": c.rope_pairs == "interleaved",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
    if model_type == "deepseek_v2":
        mapping["topk_method"] = "group_limited_greedy" if r.groups > 1 else "greedy"
    if kind.index_pairs:
        mapping["index_topk"] = c.index_topk
    if model_type == "mistral4":
        mapping["rope_parameters"] = _write_query_scale(c)
    return mapping


def _model_type(c: DeepSeekConfig) -> str:
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
        f"choose those of one of {', '.join(_KINDS)}"
    )


def _write_query_scale(c: DeepSeekConfig) -> dict[str, Any]:
    """Return the rotary settings of Mistral 4: always YaRN, whose factor may be 1, as no others rotate part of a head.

    Raises `UserError` for two lengths of texts in training, as one key has both.
    """
    lengths = [
        *([c.yarn.length] if c.yarn.factor != 1 else []),
        *([c.query_scale.length] if c.query_scale.beta else []),
    ]
    if len(set(lengths)) > 1:
        raise UserError(
            f"model.yarn.length={c.yarn.length} and model.query_scale.length={c.query_scale.length}: Mistral 4 in "
            "transformers has one length; make them equal"
        )
    yarn = {key: getattr(c.yarn, ours.removeprefix("yarn.")) for ours, key in YARN_KEYS.items()}
    if lengths:
        yarn["original_max_position_embeddings"] = lengths[0]
    share = c.rope_dim / (c.nope_dim + c.rope_dim)
    rope = {"rope_type": "yarn", "rope_theta": c.rope_base, "partial_rotary_factor": share, **yarn}
    return rope | {"llama_4_scaling_beta": c.query_scale.beta}
