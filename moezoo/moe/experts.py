"""The experts: MLPs of one width, each on its own rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.kernels.grouped_matmul import gated, grouped_matmul
from moezoo.nn.activation import Activation
from moezoo.nn.linear import normal
from moezoo.nn.swiglu import SWIGLU
from moezoo.parallel.axes import Weight
from moezoo.parallel.kernels import KernelOrder


class Experts(eqx.Module):
    """E MLPs: down(activation(gate x, up x))."""

    gate: Weight[Array, "expert, expert_embed -> expert_mlp"]
    up: Weight[Array, "expert, expert_embed -> expert_mlp"]
    down: Weight[Array, "expert, expert_mlp -> expert_embed"]
    activation: Activation = eqx.field(static=True)

    def __init__(
        self,
        num_experts: int,
        embed: int,
        mlp: int,
        *,
        activation: Activation = SWIGLU,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (num_experts, embed, mlp), embed**-0.5, dtype)
        self.up = normal(keys[1], (num_experts, embed, mlp), embed**-0.5, dtype)
        self.down = normal(keys[2], (num_experts, mlp, embed), out_std * mlp**-0.5, dtype)
        self.activation = activation

    def __call__(
        self,
        rows: Float[Array, "rows embed"],
        group_sizes: Int[Array, " experts"],
        implementation: str | KernelOrder | None,
    ) -> Float[Array, "rows embed"]:
        """Each row through its expert; rows after the sum of `group_sizes` come out zero."""
        inner = gated(rows, self.gate, self.up, group_sizes, activation=self.activation, implementation=implementation)
        return grouped_matmul(inner, self.down, group_sizes, implementation=implementation)
