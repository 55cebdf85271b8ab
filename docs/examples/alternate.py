# In moezoo: models/alternate.py
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moezoo.errors import UserError
from moezoo.models.block import Block
from moezoo.models.config import GroupedAttentionConfig
from moezoo.models.family import Family
from moezoo.models.hub import SILU, Hub, Key, ModelType, common, required, rope
from moezoo.models.names import USUAL
from moezoo.models.parts import block, grouped_attention, mixture, mlp
from moezoo.moe.router import Choice
from moezoo.nn.rotary import Rotary
from moezoo.typed import Size


@dataclasses.dataclass(frozen=True)
class AlternateConfig(GroupedAttentionConfig):
    """Sizes; defaults are the laptop size. `mlp`: width of the MLPs. Raises `UserError` for sizes that contradict."""

    mlp: Size = 256
    z_loss: float = 0.001

    def __post_init__(self):
        super().__post_init__()
        if self.layers < 2:
            raise UserError(f"model.layers={self.layers} leaves no layer with experts; choose at least 2")


def kinds(c: AlternateConfig) -> list[list[str]]:
    """One run, in which every second layer has experts."""
    return [["moe" if layer % 2 else "mlp" for layer in range(c.layers)]]


def make_block(kind: str, c: AlternateConfig, dtype: jnp.dtype, key: Array) -> Block:
    """One layer."""
    first, *others = jax.random.split(key, 3)
    attention = grouped_attention(c, dtype, first, rotary=Rotary(c.head_dim, c.rope_base))
    if kind == "mlp":
        return block(c, dtype, attention, mlp(c, dtype, others[0], c.mlp))
    return block(c, dtype, attention, mixture(c, dtype, others, Choice()))


# Our settings and their keys in config.json, where they have none in every family.
_SETTINGS = common(max_length=4096) | {
    **required("kv_heads=num_key_value_heads head_dim=head_dim experts=num_experts"),
    **required("mlp=intermediate_size expert_mlp=moe_intermediate_size"),
    "load_balance": Key("router_aux_loss_coef", 0.01),  # a missing key is 0.01
}
_FURTHER = {"rope": rope(), "hidden_act": SILU}  # written after the model type
HUB = Hub(
    {"alternate": "softmax router; an MLP in every other layer"},
    {"alternate": ModelType("Alternate", _SETTINGS, _FURTHER, USUAL)},
    lambda config: "alternate",
)
Alternate = Family("alternate", AlternateConfig, kinds, make_block, HUB)
