"""The clamped SwiGLU of gpt-oss (OpenAI, 2025, arXiv:2508.10925)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.nn.activation import Activation


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU(Activation):
    """gate * sigmoid(alpha gate) * (up + 1), of products that are clamped first.

    Args:
        alpha: the slope inside the sigmoid.
        limit: the largest gate, and the largest magnitude of up.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation."""
        limit = jnp.asarray(self.limit, up.dtype)
        gate, up = jnp.minimum(gate, self.limit), jax.lax.clamp(-limit, up, limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
