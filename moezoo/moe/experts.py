"""The experts of a layer: MLPs of one width, each applied to its own rows."""

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
    """E gated MLPs, y = down(activation(gate x, up x)), as three arrays with a leading expert dimension.

    The default activation is SwiGLU (Shazeer, 2020, arXiv:2002.05202).
    """

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
        """Apply to each row its expert.

        Args:
            rows: [R, d], sorted by expert.
            group_sizes: int32, the number of rows of each expert. Rows after their sum are unused; their result is 0.
            implementation: backends of the grouped products, in the order in which they are tried; None: the default.
        """
        inner = gated(rows, self.gate, self.up, group_sizes, activation=self.activation, implementation=implementation)
        return grouped_matmul(inner, self.down, group_sizes, implementation=implementation)
