"""Nemotron-H's configuration from and to the config.json of a Hugging Face folder, and its tensor names.

The part of each layer has three spellings, which may stand together: `hybrid_override_pattern`, `layers_block_type`
with the names of transformers 5.24, and the same with older names. The first two are written.

transformers 5.24 clamps steps to `time_step_min` where it reads a text, and to nothing where it reads one token more.
moezoo does what the released models do: it clamps to `time_step_limit`, both times, and `time_step_min` is a bound of
initial steps. So that transformers has the same logits, that key is written as the lower limit, or almost 0.
"""

import math
from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError
from moezoo.models.config_json import OLDER_ROPE, ConfigJson
from moezoo.models.hub import Found, Hub, Key, ModelType, Part, fixed, required
from moezoo.models.names import MOE, rows
from moezoo.models.nemotron_h import ATTENTION, EXPERTS, MAMBA, MLP, NemotronHConfig, kinds
from moezoo.typed import show

_LAYER = "backbone.layers.{layer}."
_MIXER = f"{_LAYER}mixer."
_CONVOLUTIONS = [f"convolutions[{i}]" for i in (2, 1, 0)]
_TWO = "up=up_proj.weight down=down_proj.weight"
_ROWS = (
    *rows(
        "",
        "",
        """
        embedding.weight=backbone.embeddings.weight unembedding.norm.scale=backbone.norm_f.weight
        unembedding.weight=lm_head.weight
        """,
    ),
    *rows("", _LAYER, "attention_norm.scale=norm.weight feed_forward_norm.scale=norm.weight"),
    *rows(
        "attention.",
        _MIXER,
        "query=q_proj.weight key=k_proj.weight value=v_proj.weight out=o_proj.weight",
        beside="key",
    ),
    *rows(
        "attention.",
        _MIXER,
        "gate+value+write+read+step=in_proj.weight norm.scale=norm.weight "
        + "+".join(f"{one}.bias" for one in _CONVOLUTIONS)
        + "=conv1d.bias",
        "flat",
        beside="rate",
    ),
    *rows("attention.", _MIXER, "+".join(f"{one}.weight" for one in _CONVOLUTIONS) + "=conv1d.weight", "filters"),
    *rows("attention.", _MIXER, "step_bias=dt_bias rate=A_log skip=D out=out_proj.weight", beside="rate"),
    *rows(MOE, _MIXER, _TWO),
    *rows(f"{MOE}router.", f"{_MIXER}gate.", "weight=weight choice_bias=e_score_correction_bias"),
    *rows(f"{MOE}experts.", f"{_MIXER}experts.{{expert}}.", _TWO),
    *rows(f"{MOE}shared.", f"{_MIXER}shared_experts.", _TWO),
    *rows(f"{MOE}latent.", _MIXER, "down=fc1_latent_proj.weight up=fc2_latent_proj.weight"),
)
_PATTERN, _TYPES, _COUNT = "hybrid_override_pattern", "layers_block_type", "num_hidden_layers"
_LETTERS = {"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": MLP, "moe": EXPERTS}
_OLDER = {"mamba": MAMBA, "attention": ATTENTION}
_LIMIT, _LEAST = "time_step_limit", "time_step_min"
_TINY = 1e-12


def _read_layers(config: ConfigJson, found: Found) -> Found:
    """Return the part of each layer.

    Raises `UserError` for an unknown part, for two spellings that differ, and for a model without experts.
    """
    text, letters = config.read(_PATTERN, str | None, None), _LETTERS | _OLDER
    types = config.read_either((_TYPES, "layer_types"), tuple[str, ...] | None, None)
    if unknown := [kind for kind in types or () if kind not in letters]:
        raise UserError(f"config.json: {_TYPES} names {show(unknown[0])[:80]}: expected {' or '.join(letters)}")
    listed = "".join(letters[kind] for kind in types or ())
    pattern = text or listed or "ME*-"
    if listed and pattern != listed:
        raise UserError(f"config.json: {_PATTERN}={show(pattern)[:80]} contradicts {_TYPES}; delete the wrong one")
    if (count := config.read(_COUNT, int | None, None)) not in (None, len(pattern)):
        raise UserError(
            f"config.json: {_COUNT}={count}, but {_PATTERN if text else _TYPES} names {len(pattern)} layers; one of "
            "them is wrong"
        )
    if EXPERTS not in pattern:
        raise UserError(
            f"config.json: {_PATTERN}={show(pattern)[:80]} has no layer with experts (E), and moezoo has only mixtures "
            "of experts; load another model"
        )
    return {"layers": len(pattern), "pattern": pattern}


def _write_layers(c: NemotronHConfig) -> Mapping[str, Any]:
    (pattern,), names = kinds(c), {letter: name for name, letter in _LETTERS.items()}
    return {_PATTERN: "".join(pattern), _TYPES: [names[letter] for letter in pattern], _COUNT: c.layers}


def _read_steps(config: ConfigJson, found: Found) -> Found:
    """Return the range of steps. An infinity is Python's, or a table as transformers writes it."""
    config.get(_LEAST)
    given = {key: config.get(key) for key in (_LIMIT, "mamba_dt_limit")}
    limits = [limit for limit in given.values() if limit is not None] or [[0.0, math.inf]]
    try:
        pairs = {tuple(math.inf if x == {"__float__": "Infinity"} else float(x) for x in limit) for limit in limits}
        ((least, most),) = pairs
    except (TypeError, ValueError):
        raise UserError(f"config.json: {_LIMIT}={show(limits[0])[:80]}: expected one list of two numbers") from None
    # A limit beyond float32 is none.
    return {"mamba.least_step": least, "mamba.most_step": None if most > 3e38 else most}


def _write_steps(c: NemotronHConfig) -> Mapping[str, Any]:
    least = c.mamba.least_step
    limit = {_LIMIT: [least, {"__float__": "Infinity"}]} if least else {}
    return {**limit, _LEAST: least or _TINY}


_FIXED = {"router.score": "sigmoid", "router.group_score": "sum_of_top2", "router.choice_bias": "learned"}
_NEMOTRON_H = ModelType(
    "NemotronH",
    {
        "pattern": Part(_read_layers, _write_layers, {"layers": _COUNT, "pattern": _PATTERN}, forms=("pattern",)),
        **required("vocab=vocab_size embed=hidden_size"),
        "heads": Key("num_attention_heads", 32),
        "kv_heads": Key("num_key_value_heads", 8, null=lambda found: found["heads"]),
        "head_dim": Key("head_dim", 128),
        "mamba.heads": Key("mamba_num_heads", 128),
        "mamba.head_dim": Key("mamba_head_dim", 64),
        "mamba.groups": Key("n_groups mamba_n_groups", 8),
        "mamba.state_dim": Key("ssm_state_size", 128),
        "mamba.taps": Key("conv_kernel mamba_d_conv", 4),
        "mamba.bias": Key("use_conv_bias mamba_conv_bias", True, words=("none", "convolution")),
        "steps": Part(_read_steps, _write_steps, {"mamba.least_step": _LIMIT, "mamba.most_step": _LIMIT}),
        "mlp": Key("intermediate_size", 21504),
        "experts": Key("n_routed_experts num_local_experts", 8),
        "experts_per_token": Key("num_experts_per_tok", 2),
        "expert_mlp": Key("moe_intermediate_size", 7688),
        "shared_mlp": Key("moe_shared_expert_intermediate_size", 7688),
        "expert_latent": Key("moe_latent_size", None),
        "router.groups": Key("n_group", 1),
        "router.kept_groups": Key("topk_group", 1),
        "router.gates": Key("norm_topk_prob", True, words=("scores", "renormalised")),
        "router.scale": Key("routed_scaling_factor", 1.0),
        "router": fixed(_FIXED, n_shared_experts=1),
        "max_length": Key("max_position_embeddings", 4096),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.02),
        "tied_embeddings": fixed({"tied_embeddings": False}, tie_word_embeddings=False),
        "z_loss": fixed({"z_loss": 0.0}),  # transformers has none
    },
    {"fixed": fixed(mlp_hidden_act="relu2", mamba_hidden_act="silu", use_bias=False, num_nextn_predict_layers=0)},
    _ROWS,
    {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "attention_bias": (False,),
        "n_shared_experts": (1,),
        "hidden_dropout": (0,),
        "residual_in_fp32": (False,),
        "tie_word_embeddings": (False,),
    },
    # Of kernels and of initial values, positions, which nothing has, and further layers, which are not loaded.
    """
    chunk_size mamba_chunk_size expand mamba_expand use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap
    num_logits_to_keep time_step_max mamba_dt_max time_step_floor mamba_dt_init_floor mamba_dt_min time_step_rank
    rescale_prenorm_residual norm_eps rope_parameters num_nextn_predict_layers mtp_layers_block_type
    mtp_hybrid_override_pattern
    """
    + " ".join(OLDER_ROPE),
)


def find_unused(left: set[str], expected: set[str]) -> dict[str, str]:
    """Return the tensors of layers for multi-token prediction."""
    del expected
    return {name: "multi-token prediction" for name in left if name.startswith("mtp.")}


def _check(c: NemotronHConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` for what no folder has."""
    r = c.router
    for setting, value, only in (
        ("tied_embeddings", c.tied_embeddings, False),
        ("router.score", r.score, "sigmoid"),
        ("router.choice_bias", r.choice_bias, "learned"),
        ("router.group_score", r.group_score if r.groups > 1 else "sum_of_top2", "sum_of_top2"),
        ("router.least_sum", r.least_sum, 0.0),
        ("mamba.most_step", c.mamba.most_step, None),
    ):
        if value != only:
            raise UserError(f"model.{setting}={show(value)}: Nemotron-H in transformers has only {show(only)}")


HUB = Hub(
    {"nemotron_h": "Mamba-2, attention without rotation, experts without gates, a part per layer; Nemotron 3"},
    {"nemotron_h": _NEMOTRON_H},
    lambda config: "nemotron_h",
    _check,
    find_unused,
)
