"""The dense MLP: SwiGLU (Shazeer, 2020)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.linear import normal, project
from moezoo.parallel.axes import Weight


class MLP(eqx.Module):
    """down(silu(gate x) * up x)."""

    gate: Weight[Array, "embed -> mlp"]
    up: Weight[Array, "embed -> mlp"]
    down: Weight[Array, "mlp -> embed"]

    def __init__(self, embed: int, mlp: int, *, out_std: float, dtype: jnp.dtype, key: Array):
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (embed, mlp), embed**-0.5, dtype)
        self.up = normal(keys[1], (embed, mlp), embed**-0.5, dtype)
        self.down = normal(keys[2], (mlp, embed), out_std * mlp**-0.5, dtype)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Each token by itself."""
        return project(jax.nn.silu(project(x, self.gate)) * project(x, self.up), self.down)
