"""Kimi Linear's configuration from and to the config.json of a Hugging Face folder, and its tensor names.

Two spellings of config.json are read, that of the released folders and that of transformers 5.24, also together. The
first is written: both read it.

| setting | released | transformers 5.24 |
|---|---|---|
| which layers attend | `linear_attn_config.full_attn_layers`, numbers from 1 | `layer_types` |
| sizes of the delta rule | `head_dim`, `num_heads`, `short_conv_kernel_size` beside it | `linear_head_dim`, ... |
| which layers have an MLP | `first_k_dense_replace` | `mlp_layer_types` |

An MLP is written under the released name `mlp`, which transformers reads too. transformers itself writes it under
`block_sparse_moe` (`moezoo.hub.other_names`).
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from moezoo.errors import UserError
from moezoo.models import deepseek_hub
from moezoo.models.config_json import OLDER_ROPE, ConfigJson
from moezoo.models.hub import SILU, Found, Hub, Key, ModelType, Part, check_only, common, fixed, required
from moezoo.models.kimi_linear import KimiLinearConfig, every_fourth, kinds
from moezoo.models.names import ATTENTION, LATENT_ATTENTION, MLP, MOE, SPARSE, SPARSE_EXPERTS, SWIGLU, layers, rows
from moezoo.typed import show

_DELTA = (
    *rows(
        "attention.",
        ATTENTION,
        """
        key=k_proj.weight value=v_proj.weight strength=b_proj.weight norm.scale=o_norm.weight decay.bias=dt_bias
        decay.down=f_a_proj.weight decay.up=f_b_proj.weight gate.down=g_a_proj.weight gate.up=g_b_proj.weight
        """,
    ),
    *rows("attention.", ATTENTION, "decay.rate=A_log", "inner"),
    *rows(
        "attention.convolutions",
        ATTENTION,
        "[0].weight=q_conv1d.weight [1].weight=k_conv1d.weight [2].weight=v_conv1d.weight",
        "filters",
    ),
)
_ROWS = layers(
    # Queries and results have the same names in both kinds of layers.
    (*LATENT_ATTENTION, *_DELTA),
    (
        *rows(MOE, MLP, SWIGLU),
        *rows(f"{MOE}router.", f"{SPARSE}gate.", "weight=weight choice_bias=e_score_correction_bias"),
        *SPARSE_EXPERTS,
        *rows(f"{MOE}shared.", f"{SPARSE}shared_experts.", SWIGLU),
    ),
)
_TABLE, _FULL, _DELTAS = "linear_attn_config", "full_attn_layers", "kda_layers"
_SIZES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_ATTENDS, _RECURS = "full_attention", "linear_attention"


def _read_mixers(config: ConfigJson, found: Found) -> Found:
    """Return which layers attend, and the sizes of the others.

    Raises `UserError` where no key says it, two contradict, or a layer is in none or both of two lists.
    """
    count, table = found["layers"], config.table(_TABLE) or ConfigJson({}, f"{_TABLE}.")
    types = config.read_layer_types((_ATTENDS, _RECURS), count)
    attends = None if types is None else tuple(i for i, kind in enumerate(types) if kind == _ATTENDS)
    full, deltas = (table.read(key, tuple[int, ...] | None, None, least=0) for key in (_FULL, _DELTAS))
    if (full is None) != (deltas is None):
        raise UserError(
            f"config.json: {_TABLE} has {_DELTAS if full is None else _FULL} alone; write both, also if empty"
        )
    if full is not None or attends is None:
        full, deltas = full or (), deltas or ()
        listed = (*full, *deltas)
        times, there = Counter(listed), range(1, count + 1)
        wrong = next((i for i in itertools.chain(listed, there) if times[i] != 1 or i not in there), None)
        if wrong is not None:
            raise UserError(
                f"config.json: {_TABLE}.{_FULL} and {_DELTAS} name layer {wrong} {times[wrong]} times: expected each "
                f"layer from 1 to num_hidden_layers={count} once, and no other"
            )
        from_one = tuple(i - 1 for i in sorted(full))
        if attends not in (None, from_one):
            raise UserError(
                f"config.json: {_TABLE}.{_FULL}={show(list(full))[:80]}, from 1, contradicts layer_types; delete the "
                "wrong one"
            )
        attends = from_one
    heads, dim, taps = (_read_size(config, table, *keys) for keys in _SIZES.items())
    table.refuse_others()
    delta = {"key_heads": heads, "value_heads": heads, "key_dim": dim, "value_dim": dim, "taps": taps}
    return {"attention_layers": None if attends == every_fourth(count) else attends, "delta": delta}


def _read_size(config: ConfigJson, table: ConfigJson, inside: str, outside: str) -> int:
    """Return a size that may be in the table, outside, or in both. Raises `UserError` where two differ, or none is."""
    given = {table.read(inside, int | None, None), config.read(outside, int | None, None)} - {None}
    if len(given) != 1:
        what = "are one setting; delete the wrong one" if given else "are missing; write one of them"
        raise UserError(f"config.json: {_TABLE}.{inside} and {outside} {what}")
    return given.pop()


def _write_mixers(c: KimiLinearConfig) -> Mapping[str, Any]:
    mixers = [mixer for run in kinds(c) for mixer, _ in run]
    full, deltas = ([i for i, mixer in enumerate(mixers, 1) if mixer == kind] for kind in ("attention", "delta"))
    sizes = zip(_SIZES, (c.delta.value_heads, c.delta.value_dim, c.delta.taps), strict=True)
    return {_TABLE: {_FULL: full, _DELTAS: deltas, **dict(sizes)}}


def _read_groups(config: ConfigJson, found: Found) -> Found:
    """Return nothing. Raises `UserError` where other programs would not choose groups, and transformers does."""
    if not config.read("use_grouped_topk", bool, True) and found["router.groups"] > 1:
        raise UserError(
            f"config.json: use_grouped_topk=false with num_expert_group={found['router.groups']}: transformers chooses "
            "groups, others do not; set num_expert_group=1, or use_grouped_topk=true"
        )
    return {}


_FIXED = {"router.score": "sigmoid", "router.group_score": "sum_of_top2", "router.choice_bias": "learned"}
_KIMI_LINEAR = ModelType(
    "KimiLinear",
    {
        **common(1048576),
        "tied_embeddings": fixed(tie_word_embeddings=False),
        "experts_per_token": Key("num_experts_per_token num_experts_per_tok"),
        "max_length": Key("model_max_length max_position_embeddings", 1048576),
        "mixers": Part(
            _read_mixers,
            _write_mixers,
            {
                "attention_layers": f"{_TABLE}.{_FULL}",
                "delta.value_heads": f"{_TABLE}.num_heads",
                "delta.value_dim": f"{_TABLE}.head_dim",
                "delta.taps": f"{_TABLE}.short_conv_kernel_size",
            },
            forms=("attention_layers",),
        ),
        "q_lora": Key("q_lora_rank", None),
        **required("kv_lora=kv_lora_rank nope_dim=qk_nope_head_dim rope_dim=qk_rope_head_dim value_dim=v_head_dim"),
        **required("mlp=intermediate_size expert_mlp=moe_intermediate_size"),
        "dense": deepseek_hub.dense(1, deepseek_hub.LIST, deepseek_hub.FIRST),
        "experts": Key("num_experts num_local_experts"),
        "shared_experts": Key("num_shared_experts n_shared_experts", 1, null=0, least=0),
    },
    {
        "kv_heads": Part(write=lambda c: {"num_key_value_heads": c.heads}),
        "router.groups": Key("num_expert_group n_group", 1),
        "router.kept_groups": Key("topk_group", 1),
        "grouped": Part(_read_groups, lambda c: {"use_grouped_topk": True}),
        "router.gates": Key("moe_renormalize norm_topk_prob", True, words=("scores", "renormalised")),
        "router.scale": Key("routed_scaling_factor", 2.446),
        "router": fixed(_FIXED, moe_router_activation_func="sigmoid"),
        "hidden_act": SILU,
        "fixed": fixed(mla_use_nope=True, moe_layer_freq=1, num_nextn_predict_layers=0),
    },
    _ROWS,
    {
        **deepseek_hub.ONLY,
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "tie_word_embeddings": (False,),
    },
    # Nothing is rotated. The other keys are those of further layers, which are not loaded, and a size that nothing has.
    "rope_parameters num_nextn_predict_layers head_dim " + " ".join(OLDER_ROPE),
)


def _check(c: KimiLinearConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` for what no folder has."""
    only = {"tied_embeddings": False, **_FIXED, "router.least_sum": 0.0, "router.added_to_sum": 1e-20}
    only |= {} if c.router.groups > 1 else {"router.group_score": c.router.group_score}
    only |= {"delta.key_heads": c.delta.value_heads, "delta.key_dim": c.delta.value_dim}
    check_only(c, "Kimi Linear", only)


HUB = Hub(
    {"kimi_linear": "delta rule with a decay per channel, latent attention without rotation; Kimi Linear 48B-A3B"},
    {"kimi_linear": _KIMI_LINEAR},
    lambda config: "kimi_linear",
    _check,
    deepseek_hub.find_unused,
)
