"""Llama 4 (Meta, 2025), the text part: Scout and Maverick. Gates scale what experts read, and attention has stretches.

`moezoo.models.llama4_hub` maps it to Hugging Face folders.

    x = embedding[tokens]                                         # [B, S, d]
    for each layer:
        x = x + attention(norm(x))
        x = x + shared(norm(x)) + sum_k expert_k(gate_k * norm(x))  # gate_k = sigmoid(router(norm(x)))_k
        x = x + mlp(norm(x))                                      # instead, in layers without experts
    logits = norm(x) @ unembedding                                # [B, S, vocab]

B batch, S sequence, d `embed`. Gates are not renormalised, and released models have K = 1. The shared MLP is as wide as
an expert.

| layers | keys | queries and keys | queries |
|---|---|---|---|
| most | of the query's stretch of `stretch` positions | rotated, then normalised without a scale | |
| every fourth | all | as projected | times a factor that grows with the position |
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig, Window, check_experts, check_layers, with_experts
from moezoo.models.parts import block, grouped_attention, mixture, mlp
from moezoo.moe.router import Choice
from moezoo.nn.rotary import CountScale, Llama3, Rotary
from moezoo.parallel.context_parallel import Stretches
from moezoo.typed import Size

_CHOICE = Choice("sigmoid", gates="scores")


class Kind(NamedTuple):
    """What a layer is made of."""

    rotates: bool
    sees: Literal["stretch", "all"]
    feed_forward: Literal["mlp", "moe"]


@dataclasses.dataclass(frozen=True)
class Llama4Config(GroupedAttentionConfig):
    """Settings of a Llama 4. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `stretch` | the positions of a stretch; a query sees keys of its own one. None: all layers see all |
    | `plain_layers` | the layers, from 0, without rotation; None: every fourth |
    | `full_layers` | the layers whose queries see all tokens; None: `plain_layers` |
    | `norm_turned` | whether rotated queries and keys are normalised, each head by its root mean square |
    | `query_scale` | the factor on queries of `plain_layers`; a `beta` of 0 is none |
    | `attention_bias` | whether the projections of attention have biases |
    | `moe_every`, `mlp_layers` | layer i has experts if `moe_every` divides i + 1 and `mlp_layers` does not name i |
    | `mlp` | width of the MLP in layers without experts |
    | `llama3` | the extension to longer texts; a factor of 1 is none |

    `moezoo.models.config` describes the others.
    """

    stretch: Window | None = 64
    plain_layers: tuple[int, ...] | None = None
    full_layers: tuple[int, ...] | None = None
    norm_turned: bool = True
    query_scale: CountScale = dataclasses.field(default_factory=lambda: CountScale(length=64))
    attention_bias: Literal["none", "all"] = "none"
    moe_every: Size = 1
    mlp_layers: tuple[int, ...] = ()
    mlp: Size = 256
    experts_per_token: int = 1
    rope_base: float = 5e5
    llama3: Llama3 = dataclasses.field(default_factory=Llama3)
    max_length: int = 32768
    load_balance: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        for name in ("plain_layers", "full_layers", "mlp_layers"):
            check_layers(self, name)
        check_experts(self, self.moe_every, self.mlp_layers)

    @property
    def sees_all(self) -> bool:
        """Whether the queries of some layer see all tokens up to themselves."""
        return any(kind.sees == "all" for kind in kinds(self)[0])


def kinds(c: Llama4Config) -> list[list[Kind]]:
    """The parts of each layer."""
    plain = range(3, c.layers, 4) if c.plain_layers is None else frozenset(c.plain_layers)
    full = plain if c.full_layers is None else frozenset(c.full_layers)
    experts = with_experts(c.layers, c.moe_every, c.mlp_layers)
    return [
        [
            Kind(
                i not in plain,
                "all" if c.stretch is None or i in full else "stretch",
                "moe" if i in experts else "mlp",
            )
            for i in range(c.layers)
        ]
    ]


def make_block(kind: Kind, c: Llama4Config, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    first, *others = jax.random.split(key, 4)
    options: dict[str, Any] = {"biases": c.attention_bias}
    if kind.rotates:
        rotary = Rotary(c.head_dim, c.rope_base, c.llama3, "interleaved")
        options |= {"rotary": rotary, "norm_turned": c.norm_turned}
    else:
        options |= {"rotary": None, "query_scale": c.query_scale}
    if kind.sees == "stretch" and c.stretch is not None:
        options["window"] = Stretches(c.stretch)
    attention = grouped_attention(c, dtype, first, **options)
    if kind.feed_forward == "mlp":
        return block(c, dtype, attention, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, attention, mixture(c, dtype, others, _CHOICE, shared=c.expert_mlp, gates_on="inputs"))
