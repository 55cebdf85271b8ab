"""The MLP with a gated activation, by default SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.activation import SWIGLU, Activation
from moezoo.nn.base import FeedForward, FeedForwardOutput
from moezoo.nn.linear import normal, project
from moezoo.nn.positions import Context
from moezoo.parallel.axes import Weight
from moezoo.parallel.mesh_execution import MeshExecution


class MLP(FeedForward):
    """y = down(activation(gate x, up x))."""

    gate: Weight[Array, "embed -> mlp"]
    up: Weight[Array, "embed -> mlp"]
    down: Weight[Array, "mlp -> embed"]
    activation: Activation = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        activation: Activation = SWIGLU,
        out_std: float,
        dtype: jnp.dtype,
        key: Array,
    ):
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (embed, mlp), embed**-0.5, dtype)
        self.up = normal(keys[1], (embed, mlp), embed**-0.5, dtype)
        self.down = normal(keys[2], (mlp, embed), out_std * mlp**-0.5, dtype)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution
    ) -> FeedForwardOutput:
        """Apply the MLP to each token, padding included."""
        del context
        x = execution.inner_group("mlp").enter(x)
        return FeedForwardOutput(project(self.activation(project(x, self.gate), project(x, self.up)), self.down))
