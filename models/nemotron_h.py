"""Nemotron-H and Nemotron 3 (NVIDIA, 2025 and 2026): state space duality, few layers of attention, experts apart.

`moezoo.models.nemotron_h_hub` maps it to Hugging Face folders.

    x = embedding[tokens]                                              # [B, S, d]
    for each layer:                                                    # of one part each, by its letter in `pattern`
        x = x + mamba(norm(x))                                         # M
        x = x + attention(norm(x))                                     # *
        x = x + mlp(norm(x))                                           # -
        x = x + shared(norm(x)) + sum_k gate_k * expert_k(norm(x))     # E
    logits = norm(x) @ unembedding                                     # [B, S, vocab]

B batch, S sequence, d `embed`. The mixer `mamba` (`moezoo.nn.state_space`) is Mamba-2. Attention rotates nothing: the
other layers know the order. MLPs and experts are down(max(up x, 0)^2), without a gate. A token chooses experts as in
DeepSeek-V3 (2024, arXiv:2412.19437, section 2.1.2). With `expert_latent` they are in a latent of this width:
up(sum_k gate_k * expert_k(down norm(x))), while router and shared MLP read the whole width.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import KeyValueHeadsConfig
from moezoo.models.parts import block_of_one, grouped_attention, mixture, mlp, out_std
from moezoo.moe.router import Choice
from moezoo.nn.mlp import SQUARED_RELU
from moezoo.nn.state_space import StateSpaceMixer, StateSpaceSizes
from moezoo.typed import Size, show

_ROUTER = Choice("sigmoid", group_score="sum_of_top2", scale=2.5, choice_bias="learned")
# The letters of layers.
MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"


@dataclasses.dataclass(frozen=True)
class NemotronHConfig(KeyValueHeadsConfig):
    """Settings of a Nemotron-H model with experts. The defaults are the laptop size.

    | field | meaning |
    |---|---|
    | `pattern` | the part of each layer: M for Mamba-2, * attention, - an MLP, E experts; repeated over all layers |
    | `mamba` | the sizes of the mixers by state space duality |
    | `mlp` | width of the MLPs |
    | `shared_mlp` | width of the shared MLP |
    | `expert_latent` | width of the latent that experts are in; None for the whole width |
    | `router` | how experts are chosen and gates computed |

    `moezoo.models.config` describes the others.
    """

    pattern: str = "ME*E"
    mamba: StateSpaceSizes = dataclasses.field(default_factory=StateSpaceSizes)
    mlp: Size = 512
    shared_mlp: Size = 256
    expert_latent: Size | None = None
    router: Choice = _ROUTER
    load_balance: float = 0.0001
    load_balance_over: Literal["batch", "sequence"] = "sequence"

    def __post_init__(self):
        super().__post_init__()
        self.router.check(self.experts, self.experts_per_token)
        if unknown := [letter for letter in self.pattern if letter not in (MAMBA, ATTENTION, MLP, EXPERTS)]:
            raise UserError(
                f"model.pattern names {show(unknown[0])}: expected M for Mamba-2, * for attention, - for an MLP, or E "
                "for experts"
            )
        if EXPERTS not in kinds(self)[0]:
            raise UserError(
                f"model.pattern={show(self.pattern)} leaves no layer of model.layers={self.layers} with experts, and "
                "moezoo has only mixtures of experts; write an E among the letters of these layers"
            )

    @property
    def least_parameters(self) -> int:
        """As in other families, by experts of two matrices in their latent."""
        experts = 2 * self.experts * self.expert_mlp * (self.expert_latent or self.embed)
        return self.embed * (self.vocab + self.layers) + experts


def kinds(c: NemotronHConfig) -> list[list[str]]:
    """The letter of each layer."""
    return [[c.pattern[i % len(c.pattern)] for i in range(c.layers)]]


def make_block(kind: str, c: NemotronHConfig, dtype: jnp.dtype, key: Array) -> Block:
    """Return one layer."""
    if kind == MAMBA:
        part = StateSpaceMixer(c.embed, c.mamba, epsilon=c.norm_eps, out_std=out_std(c), dtype=dtype, key=key)
    elif kind == ATTENTION:
        part = grouped_attention(c, dtype, key, rotary=None)
    elif kind == MLP:
        part = mlp(c, dtype, key, c.mlp, activation=SQUARED_RELU)
    else:
        keys = [*jax.random.split(key, 4)]
        latent = {"activation": SQUARED_RELU, "latent": c.expert_latent}
        part = mixture(c, dtype, keys, c.router, shared=c.shared_mlp, **latent)
    return block_of_one(c, dtype, part)
