"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): many small experts, and normalised queries and keys.

    x = embedding[tokens]                                 # [B, S, d]
    for each layer:
        x = x + attention(norm(x))                        # norms of queries and keys over all heads as one vector
        x = x + sum_k gate_k * expert_k(norm(x))          # the K best of E experts per token
    logits = norm(x) @ unembedding                        # [B, S, vocab]

B batch, S sequence, d `embed`, E `experts`, K `experts_per_token`. Gates are the softmax over all E experts, by default
not renormalised. Queries, keys and values may be clipped. The unembedding is a matrix of its own or, with
`tied_embeddings`, the embedding's transpose.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.models.hub import SILU, Hub, Key, ModelType, Part, common, head_dim, rope
from moezoo.models.names import USUAL
from moezoo.models.parts import block, grouped_attention, mixture
from moezoo.moe.router import Choice
from moezoo.nn.rotary import Rotary
from moezoo.typed import Positive


@dataclasses.dataclass(frozen=True)
class OlmoeConfig(GroupedAttentionConfig):
    """Settings of an OLMoE model. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `router` | how experts are chosen and gates computed |
    | `clip_qkv` | bound on the magnitude of the numbers in queries, keys and values; None for no bound |
    | `attention_bias` | whether the four projections of attention have biases |

    `moezoo.models.config` describes the others.
    """

    kv_heads: int = 4
    router: Choice = dataclasses.field(default_factory=lambda: Choice(gates="scores"))
    clip_qkv: Positive | None = None
    attention_bias: Literal["none", "all"] = "none"
    z_loss: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)


def make_block(kind: None, c: OlmoeConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 3)
    options: dict[str, Any] = {"norm_over": "projection", "biases": c.attention_bias, "clip": c.clip_qkv}
    attention = grouped_attention(c, dtype, first, rotary=Rotary(c.head_dim, c.rope_base), **options)
    return block(c, dtype, attention, mixture(c, dtype, others, c.router))


def _check(c: OlmoeConfig, mapping: Mapping[str, Any]) -> None:
    """Raise `UserError` for settings that transformers does not have."""
    router = c.router
    if c.heads * c.head_dim != c.embed:
        raise UserError(
            f"model.head_dim={c.head_dim} times model.heads={c.heads} is not model.embed={c.embed}; OLMoE in "
            "transformers needs them equal"
        )
    # With one group, `group_score` has no effect; `bias_rate` has none without a choice bias.
    if router != Choice(gates=router.gates, bias_rate=router.bias_rate, group_score=router.group_score):
        raise UserError(
            f"model.router has score={router.score}, groups={router.groups}, scale={router.scale}, "
            f"choice_bias={router.choice_bias}, least_sum={router.least_sum}, added_to_sum={router.added_to_sum}; "
            "olmoe in transformers has only softmax, 1, 1.0, none, 0 and 1e-20"
        )


_SETTINGS = common(4096) | {
    "expert_mlp": Key("intermediate_size"),
    "clip_qkv": Key("clip_qkv", None),
    "load_balance": Key("router_aux_loss_coef", 0.01),
    "kv_heads": Key("num_key_value_heads", None, null=lambda found: found["heads"]),
    # transformers reads both names, and its newer versions write the first.
    "experts": Part(
        lambda config, found: {"experts": config.read_either(("num_local_experts", "num_experts"), int)},
        lambda c: {"num_experts": c.experts},
        {"experts": "num_experts"},
    ),
    "head_dim": Part(lambda config, found: {"head_dim": head_dim(found)}, keys={"head_dim": "head_dim"}),
}
_FURTHER = {
    "router.gates": Key("norm_topk_prob", False, words=("scores", "renormalised")),
    "attention_bias": Key("attention_bias", False, words=("none", "all")),
    "rope": rope(),
    "hidden_act": SILU,
}
_ONLY = {"head_dim": lambda found: found["head_dim"]}
HUB = Hub(
    {"olmoe": "norms over all queries and all keys, softmax router; OLMoE"},
    {"olmoe": ModelType("Olmoe", _SETTINGS, _FURTHER, USUAL, _ONLY)},
    lambda config: "olmoe",
    _check,
)
