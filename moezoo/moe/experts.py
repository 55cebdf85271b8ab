"""The experts of a layer: MLPs of one width, each applied to its own rows."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moezoo.kernels.grouped_matmul import routed_mlp
from moezoo.nn.linear import normal, project
from moezoo.nn.mlp import SWIGLU, Activation
from moezoo.parallel.axes import Bias, Weight
from moezoo.parallel.collectives import EXPERT_BIAS, InnerGroup
from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import Keep, KernelOrder


class Experts(eqx.Module):
    """E gated MLPs, y = down(activation(gate x, up x)), as three arrays with a leading expert dimension.

    The default activation is SwiGLU (Shazeer, 2020, arXiv:2002.05202). With biases, one is added to each of the three
    products. Where the activation is not gated, y = down(activation(up x, up x)), and there are no biases.
    """

    gate: Weight[Array, "expert, expert_embed -> expert_mlp"] | None
    up: Weight[Array, "expert, expert_embed -> expert_mlp"]
    down: Weight[Array, "expert, expert_mlp -> expert_embed"]
    gate_bias: Bias[Array, "expert, expert_mlp"] | None
    up_bias: Bias[Array, "expert, expert_mlp"] | None
    down_bias: Bias[Array, "expert, expert_mlp -> expert_embed"] | None
    activation: Activation = eqx.field(static=True)

    def __init__(
        self,
        num_experts: int,
        embed: int,
        mlp: int,
        *,
        activation: Activation = SWIGLU,
        biases: Literal["none", "all"] = "none",
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 3)
        shape, std = (num_experts, embed, mlp), embed**-0.5
        self.gate = normal(keys[0], shape, std, dtype) if activation.is_gated else None
        self.up = normal(keys[1], shape, std, dtype)
        self.down = normal(keys[2], (num_experts, mlp, embed), out_std * mlp**-0.5, dtype)
        self.gate_bias = self.up_bias = self.down_bias = None
        if biases == "all":
            self.gate_bias = jnp.zeros((num_experts, mlp), dtype)
            self.up_bias = jnp.zeros((num_experts, mlp), dtype)
            self.down_bias = jnp.zeros((num_experts, embed), dtype)
        self.activation = activation

    @property
    def width(self) -> int:
        """The width of what they read and return. The module may be that of a stack, and hold shapes."""
        return self.up.shape[-2]

    def partial(self, group: InnerGroup) -> "Experts":
        """Return the experts whose results, summed over the `group` that shares their width, have each bias once.

        The last bias is added after the sum over the width, so only the first device of the group keeps it. Biases get
        a name: where `remat` keeps products, it keeps these too. They are small, and gradients of gates need the last.
        """
        if self.down_bias is None:
            return self
        down = self.down_bias
        if group.axes:
            down = jnp.where(group.index == 0, down, jnp.zeros((), down.dtype))
        biases = [checkpoint_name(bias, EXPERT_BIAS) for bias in (self.gate_bias, self.up_bias, down)]
        return eqx.tree_at(lambda experts: [experts.gate_bias, experts.up_bias, experts.down_bias], self, biases)

    def __call__(
        self,
        tokens: Float[Array, "tokens embed"],
        gates: Float[Array, "tokens k"],
        plan: Plan,
        *,
        implementation: str | KernelOrder | None,
        keep: Keep = "products",
    ) -> Float[Array, "tokens embed"]:
        """Return, for each token, the sum of its experts' results times their gates.

        Args:
            tokens: [N, d].
            gates: float32 [N, K], the factor of the result of each assignment.
            plan: The rows that each expert runs on.
            implementation: The backends of grouped products in the order in which they are tried; None: the default.
            keep: As for `routed_mlp`.
        """
        y = routed_mlp(
            tokens,
            gates,
            plan,
            self.gate,
            self.up,
            self.down,
            activation=self.activation,
            gate_bias=self.gate_bias,
            up_bias=self.up_bias,
            implementation=implementation,
            keep=keep,
        )
        return y if self.down_bias is None else y + _weighted(self.down_bias, gates, plan)


def _weighted(
    bias: Float[Array, "groups embed"], gates: Float[Array, "tokens k"], plan: Plan
) -> Float[Array, "tokens embed"]:
    """Return, for each token, the sum of the biases of its experts times its gates, over assignments that have a row.

    It is one product over the experts here, [N, E] x [E, d], in place of a sum over rows.
    """
    ends, row = jnp.cumsum(plan.group_sizes)[None, None], plan.row[:, :, None]
    starts = ends - plan.group_sizes[None, None]
    holds = (starts <= row) & (row < ends)  # [N, K, E]; no group holds a dropped assignment
    weights = jnp.where(holds, gates[:, :, None], 0).sum(1)
    return project(weights.astype(bias.dtype), bias)
