"""Models with grouped-query attention from and to the config.json of a Hugging Face folder, and their tensor names.

`_TYPES` has a row per `model_type`: the settings of `GroupedConfig` with their keys in config.json, those of heads and
rotary positions, the names of tensors, and keys that may only have one value or that nothing reads (`ModelType`). The
functions before it make groups of settings that several types share; more are in `moezoo.models.grouped_keys`.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from moezoo.errors import UserError
from moezoo.models import deepseek_hub
from moezoo.models.config_json import (
    FOR_IMAGES,
    REQUIRED,
)
from moezoo.models.grouped import GroupedConfig, kinds
from moezoo.models.grouped_keys import (
    BY_INTERVAL,
    BY_LIST,
    BY_TYPE,
    WINDOW,
    WINDOW_BY_LAYER,
    WINDOW_OF_QWEN2,
    first_have_mlps,
    heads_and_rope,
    read_window_of_qwen3,
)
from moezoo.models.hub import (
    Hub,
    Key,
    ModelType,
    Part,
    Settings,
    common,
    common_dense,
    fixed,
    required,
)
from moezoo.models.names import (
    ATTENTION,
    BLOCK_SPARSE,
    DENSE,
    GATED_SHARED,
    LAYER,
    MLP,
    MOE,
    SWIGLU,
    USUAL,
    change,
    layers,
    rows,
)
from moezoo.nn.rotary import Yarn
from moezoo.typed import show

_ABOUT = {
    "qwen3_moe": "norms of each query and key, softmax router; Qwen3-MoE",
    "qwen3_vl_moe_text": "as qwen3_moe; the text part of Qwen3-VL, which folders have inside a `qwen3_vl_moe`",
    "qwen3_omni_moe_text": "as qwen3_moe; the text part of Qwen3-Omni's thinker, inside a `qwen3_omni_moe`",
    "qwen2_moe": "biases of queries, keys and values, softmax router, a shared MLP with a gate; Qwen1.5-MoE, Qwen2-MoE",
    "glm4_moe": "part of each head is rotated, sigmoid router with a choice bias, shared experts; GLM-4.5, 4.6 and 4.7",
    "sarvam_moe": "as glm4_moe with whole heads rotated, queries, keys and values in one tensor; Sarvam-30B",
    "minimax_m2": "as glm4_moe without shared experts, norms over all queries and over all keys; MiniMax-M2",
    "hy_v3": "norms of each query and key, sigmoid router with a choice bias, shared experts; Hunyuan 3",
    "dots1": "as hy_v3, with a router that first chooses groups of experts; dots.llm1",
    "solar_open": "as glm4_moe without norms of queries and keys; whole heads are rotated; Solar Open",
    "ernie4_5_moe": "interleaved rotation, softmax router with a choice bias, shared experts; ERNIE 4.5",
}
_SIZES = required("kv_heads=num_key_value_heads mlp=intermediate_size expert_mlp=moe_intermediate_size")
_LOSS: Settings = {"load_balance": Key("router_aux_loss_coef", 0.001)}
# Of types in which no layer has an MLP: where a width is asked for, it is that of experts.
_MLP_OF_EXPERTS = Part(lambda config, found: {"mlp": found["expert_mlp"]})
_GATES: Settings = {"router.gates": Key("norm_topk_prob", False, words=("scores", "renormalised"))}
_BIAS: Settings = {"attention_bias": Key("attention_bias", False, words=("none", "all"))}
_SIGMOID = {"router.score": "sigmoid", "router.choice_bias": "learned", "router.group_score": "sum_of_top2"}
# transformers does not read these keys. Some programs that serve models choose other experts without them.
_SIGMOID_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Of models with shared experts, biases and norms that Qwen3-MoE has not, or always has.
_WITHOUT_OTHERS: Mapping[str, Any] = {"shared_expert_intermediate_size": (0,), "qkv_bias": (False,)}
_WITHOUT_OTHERS |= {"use_qk_norm": (True,), "max_window_layers": (0,)}
_MTP = "num_nextn_predict_layers num_mtp_layers"  # further layers, which are not loaded


def _like_deepseek_v3(max_length: int, shared: Any = REQUIRED, null: Any = REQUIRED) -> Settings:
    """Return the settings of types that have the keys of DeepSeek-V3.

    Args:
        max_length: The tokens per text where no key has them.
        shared: The number of shared experts where no key has it; by default a key must.
        null: The number of groups that null stands for; by default null is refused.
    """
    return {
        **common(max_length),
        **_SIZES,
        "router.groups": Key("n_group", 1, null=null),
        "router.kept_groups": Key("topk_group", 1, null=null),
        "router.scale": Key("routed_scaling_factor", 1.0),
        "experts": Key("n_routed_experts num_local_experts"),
        "shared_experts": Key("n_shared_experts", shared),
        "fixed": fixed(_SIGMOID, **_SIGMOID_KEYS),
    }


_SARVAM_ATTENTION = f"{LAYER}attention."
_SARVAM = change(
    USUAL,
    *rows("", "model.", "embedding.weight=word_embeddings.weight"),
    *rows("attention.", _SARVAM_ATTENTION, "query+key+value=query_key_value.weight", "flat"),
    *rows(
        "attention.",
        _SARVAM_ATTENTION,
        "out=dense.weight query_norm.scale=query_layernorm.weight key_norm.scale=key_layernorm.weight",
    ),
    *rows(f"{MOE}router.", f"{MLP}gate.", "choice_bias=expert_bias"),
)
# Queries, keys and values have no tensors of their own.
_SARVAM = tuple(row for row in _SARVAM if row.name not in {f"{ATTENTION}{x}_proj.weight" for x in "qkv"})
# Settings without a key are those of Qwen3-MoE, which are the defaults, or `fixed`.
_TYPES = {
    "qwen3_moe": ModelType(
        "Qwen3Moe",
        # transformers reads both names of the experts, and its newer versions write the first.
        common(32768) | _SIZES | _LOSS | {"experts": Key("num_experts num_local_experts")} | _GATES | _BIAS | BY_LIST,
        heads_and_rope() | {"window": WINDOW},
        USUAL,
        _WITHOUT_OTHERS,
    ),
    # Positions of texts are equal in all parts of `mrope_section`, so rotation is the usual one.
    "qwen3_vl_moe_text": ModelType(
        "Qwen3Moe",
        common(128000, norm_eps=1e-6)
        | {
            "model_type": fixed({"model_type": "qwen3_moe"}),
            "kv_heads": Key("num_key_value_heads", 16, null=lambda found: found["heads"]),
            "mlp": Key("intermediate_size", 5632),
            "expert_mlp": Key("moe_intermediate_size", 1408),
            "experts": Key("num_experts num_local_experts", 60),
        }
        | _LOSS
        | _BIAS
        | BY_LIST,
        heads_and_rope(5e5, others=FOR_IMAGES),
        USUAL,
        {"norm_topk_prob": (True,), "use_sliding_window": (False,), "sliding_window": ()},
        "max_window_layers",
    ),
    "qwen3_omni_moe_text": ModelType(
        "Qwen3Moe",
        common(32768, norm_eps=1e-6)
        | {
            "model_type": fixed({"model_type": "qwen3_moe"}),
            "kv_heads": Key("num_key_value_heads", 4),
            "mlp": Key("intermediate_size", 18944),
            "expert_mlp": Key("moe_intermediate_size", 768),
            "experts": Key("num_experts", 128),
            "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
        }
        | _LOSS
        | _BIAS
        | BY_LIST,
        heads_and_rope(1e6, others=FOR_IMAGES),
        USUAL,
        _WITHOUT_OTHERS | {"use_sliding_window": (False,), "sliding_window": ()},
    ),
    "qwen2_moe": ModelType(
        "Qwen2Moe",
        common(32768, norm_eps=1e-6)
        | {
            "kv_heads": Key("num_key_value_heads", 16),
            "mlp": Key("intermediate_size", 5632),
            "expert_mlp": Key("moe_intermediate_size", 1408),
            "shared_mlp": Key("shared_expert_intermediate_size", 5632),
            "experts": Key("num_experts", 60),
            "attention_bias": Key("qkv_bias", True, words=("none", "inputs")),
            "fixed": fixed({"norm_over": "nothing"}),
        }
        | _LOSS
        | _GATES
        | BY_LIST,
        heads_and_rope() | {"window": WINDOW_OF_QWEN2},
        layers(feed_forward=GATED_SHARED),
    ),
    "glm4_moe": ModelType(
        "Glm4Moe",
        _like_deepseek_v3(131072, shared=1)
        | {
            "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
            "norm_over": Key("use_qk_norm", False, words=("nothing", "head")),
            "attention_bias": Key("attention_bias", False, words=("none", "inputs")),
            "loss": fixed({"load_balance": 0.0001, "load_balance_over": "sequence"}),  # of all released, by their paper
        }
        | first_have_mlps(1),
        heads_and_rope(share=0.5) | {"mtp": fixed(num_nextn_predict_layers=0)},
        USUAL,
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        _MTP,
    ),
    "solar_open": ModelType(
        "SolarOpen",
        {ours: entry for ours, entry in _like_deepseek_v3(131072, shared=1).items() if ours != "mlp"}
        | {
            "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
            "attention_bias": Key("attention_bias", False, words=("none", "inputs")),
            "norms": fixed({"norm_over": "nothing"}),
            "mlp": _MLP_OF_EXPERTS,
        },
        heads_and_rope(1e6, 128),
        USUAL,
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "use_qk_norm": (False,)}
        | {"first_k_dense_replace": (0,)},
        "intermediate_size " + _MTP,  # of layers with an MLP
    ),
    "sarvam_moe": ModelType(
        "SarvamMoE",
        _like_deepseek_v3(131072)
        | common(131072, 0.006, 1e-6)
        | {
            "kv_heads": Key("num_key_value_heads", 4),
            "mlp": Key("intermediate_size", 8192),
            "expert_mlp": Key("moe_intermediate_size", 1024),
            "experts": Key("num_experts n_routed_experts num_local_experts", 128),
            "experts_per_token": Key("num_experts_per_tok", 6),
            "shared_experts": Key("num_shared_experts n_shared_experts", 1),
            "router.scale": Key("routed_scaling_factor", 2.5),
            "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
            "norm_over": Key("use_qk_norm", True, words=("nothing", "head")),
            "loss": fixed({"load_balance": 0.0}),
        }
        | first_have_mlps(1),
        heads_and_rope(8e6, 64, 1.0),
        _SARVAM,
        {"scoring_func": ("sigmoid",), "score_function": ("sigmoid",), "topk_method": ("noaux_tc",)}
        | {"use_qkv_bias": (False,), "attention_bias": (False,)},  # joined biases have no layout here
        _MTP,
    ),
    "minimax_m2": ModelType(
        "MiniMaxM2",
        common(196608)
        | {"kv_heads": Key("num_key_value_heads"), "expert_mlp": Key("intermediate_size")}
        | _LOSS
        | {
            "experts": Key("num_local_experts num_experts"),
            "fixed": fixed(_SIGMOID | {"norm_over": "projection"}, scoring_func="sigmoid", use_routing_bias=True),
            "norms": fixed(use_qk_norm=True, qk_norm_type="per_layer"),
            "mlp": _MLP_OF_EXPERTS,
        },
        heads_and_rope(5e6, 128, 1.0, "rotary_dim")
        | {"rotary_dim": Part(write=lambda c: {"rotary_dim": c.rotary_dims or c.head_dim})},
        BLOCK_SPARSE,
        {"router_jitter_noise": (0,), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",)}
        | {"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "shared_intermediate_size": (0,)}
        | {"layernorm_full_attention_beta": (1,), "layernorm_mlp_beta": (1,), "sliding_window": ()}
        | {"attn_type_list": lambda found: [1] * found["layers"]},  # 0 is linear attention
        # Of layers that no MiniMax-M2 has: for multi-token prediction, with an MLP, with linear attention.
        "use_mtp num_mtp_modules mtp_transformer_layers mlp_intermediate_size shared_moe_mode "
        "layernorm_linear_attention_beta",
    ),
    "hy_v3": ModelType(
        "HYV3",
        common(131072, 0.006)
        | _SIZES
        | {
            "experts": Key("num_experts num_local_experts"),
            "shared_experts": Key("num_shared_experts", 1),
            "router.scale": Key("router_scaling_factor", 2.826),
            "fixed": fixed(_SIGMOID, qk_norm=True, route_norm=True),
            "expert_hidden_dim": Part(write=lambda c: {"expert_hidden_dim": c.expert_mlp}),
        }
        | _BIAS
        | BY_TYPE,
        heads_and_rope(11_158_840.0, 128),
        change(
            USUAL,
            *rows(f"{MOE}router.", MLP, "weight=router.gate.weight choice_bias=expert_bias"),
            *rows(f"{MOE}shared.", f"{MLP}shared_mlp.", SWIGLU),
        ),
        {"moe_router_enable_expert_bias": (True,), "moe_router_use_sigmoid": (True,), "qk_norm": (True,)}
        | {"route_norm": (True,), "expert_hidden_dim": lambda found: found["expert_mlp"]},  # the same size
        # Rounding, kernels, a token.
        "enable_moe_fp32_combine enable_lm_head_fp32 enable_attention_fp32_softmax use_grouped_mm eod_token_id " + _MTP,
    ),
    "dots1": ModelType(
        "Dots1",
        _like_deepseek_v3(2048, null=1) | _GATES | _BIAS | first_have_mlps(0),  # published with null for one group
        heads_and_rope() | {"window": WINDOW_BY_LAYER},
        USUAL,
        {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        "use_sliding_window aux_loss_alpha seq_aux ep_size",  # transformers reads none
    ),
    "ernie4_5_moe": ModelType(
        "Ernie4_5_Moe",
        common(131072, tied=True)
        | _SIZES
        | _LOSS
        | {
            "experts": Key("moe_num_experts num_experts"),
            "experts_per_token": Key("moe_k num_experts_per_tok"),
            "shared_experts": Key("moe_num_shared_experts", 2, least=0),
            "router.least_sum": Key("moe_norm_min", 1e-12),
            "fixed": fixed({"norm_over": "nothing", "rope_pairs": "interleaved", "router.choice_bias": "learned"}),
        }
        | BY_INTERVAL,
        heads_and_rope(5e5),
        change(USUAL, *rows(f"{MOE}router.", f"{MLP}moe_statics.", "choice_bias=e_score_correction_bias", "row")),
        {"use_bias": (False,), "use_moe": (True,), "use_rmsnorm": (True,), "moe_use_aux_free": (True,)}
        | {"moe_gate": ("topk", "topk_fused"), "compression_ratio": (1,), "hidden_dropout_prob": (0,)},
        "moe_capacity " + _MTP,
    ),
}


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of `left` that no model reads, and what each is for.

    They are those that `deepseek_hub` knows, and those for multi-token prediction of ERNIE 4.5, by names of its own.
    """
    mtp = {name: "multi-token prediction" for name in left if name.startswith("model.mtp_")}
    return deepseek_hub.find_unused(left, expected) | mtp


# What a folder does not hold, and what is written in another form: by layers, and by a share.
_NOT_COMPARED = ("load_balance", "load_balance_over", "z_loss", "mlp", "moe_every", "mlp_layers", "rotary_dims")
_NOT_COMPARED += ("attention_every", "attention_layers")


def check_same(
    hub: Hub, kinds: Callable[[Any], Sequence[Sequence[Hashable]]], config: Any, mapping: Mapping[str, Any]
) -> None:
    """Raise `UserError` where `mapping`, which was made of a configuration, describes another model.

    Args:
        hub: The family's mapping.
        kinds: The kinds of layers of a configuration; those without experts are or contain "mlp".
        config: A configuration with a router and an MLP, as `GroupedConfig` has them.
        mapping: A config.json.
    """

    def comparable(c: Any) -> dict[str, Any]:
        found = {name: value for name, value in vars(c).items() if name not in _NOT_COMPARED}
        router = vars(found.pop("router")) | {"bias_rate": None}
        router |= {"group_score": None} if c.router.groups == 1 else {}  # of one group nothing is chosen
        if c.yarn.is_plain:
            found["yarn"] = Yarn()
        layers: Any = kinds(c)[0]
        if any("mlp" in kind for kind in layers):
            found["mlp"] = c.mlp
        found |= {f"router.{name}": value for name, value in router.items()}
        return found | {"rotary_dims": c.rotary_dims or c.head_dim, "mlp_layers": layers}

    read = hub.read(type(config), mapping)
    wanted, found = comparable(config), comparable(read)
    for name, value in found.items():
        if wanted.get(name) != value:
            get = operator.attrgetter(name)
            ours, theirs = (show(list(x) if isinstance(x, tuple) else x) for x in (get(config), get(read)))
            raise UserError(
                f"model.{name}={ours}: a {config.model_type} folder of it would be read as {theirs}; change "
                f"model.{name} or model.model_type"
            )


def _check(config: GroupedConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` where the folder of a configuration would describe another model."""
    for name in ("shared_experts", "shared_mlp"):
        shared = _TYPES[config.model_type].settings.get(name)
        if isinstance(shared, Key) and shared.least > getattr(config, name):
            raise UserError(f"model.{name}=0: {config.model_type} in transformers always has some; set at least 1")
    check_same(HUB, kinds, config, mapping)


HUB = Hub(_ABOUT, _TYPES, lambda config: config.model_type, _check, find_unused)
DENSE_HUB = Hub(
    {"qwen3": "Qwen3 without experts"},
    {
        "qwen3": ModelType(
            "Qwen3",
            {"model_type": fixed({"model_type": "qwen3_moe"})}
            | common_dense(32768, kv_heads=32)
            | {"mlp": _MLP_OF_EXPERTS}
            | _BIAS,
            heads_and_rope(size=128) | {"window": Part(read_window_of_qwen3, keys={"window": "sliding_window"})},
            DENSE,
        )
    },
    lambda config: "qwen3",
)
