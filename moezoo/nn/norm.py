"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.parallel.axes import Scale


class RMSNorm(eqx.Module):
    """x / sqrt(mean(x**2) + epsilon) * scale over the last dimension, computed in float32, returned in x's dtype."""

    scale: Scale[Array, "norm"]
    epsilon: float = eqx.field(static=True)

    def __init__(self, size: int, epsilon: float, *, dtype: jnp.dtype):
        self.scale = jnp.ones((size,), dtype)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*dims embed"]) -> Float[Array, "*dims embed"]:
        """Return the normalised vectors."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        # Released models multiply by the scale after the cast, in the dtype of x.
        return (wide * inverse).astype(x.dtype) * self.scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
