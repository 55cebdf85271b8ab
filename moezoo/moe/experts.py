"""The experts of a layer: MLPs of one width, each applied to its own rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.grouped_matmul import routed_mlp
from moezoo.nn.activation import Activation
from moezoo.nn.linear import normal
from moezoo.nn.swiglu import SWIGLU
from moezoo.parallel.axes import Weight
from moezoo.parallel.dispatch import Plan
from moezoo.parallel.kernels import Keep, KernelOrder


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
            plan: the rows that each expert runs on.
            implementation: backends of the grouped products, in the order in which they are tried; None: the default.
            keep: as for `routed_mlp`.
        """
        return routed_mlp(
            tokens,
            gates,
            plan,
            self.gate,
            self.up,
            self.down,
            activation=self.activation,
            implementation=implementation,
            keep=keep,
        )
