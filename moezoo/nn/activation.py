"""Gated activations: the function between the products of an MLP or an expert."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Activation(abc.ABC):
    """A gated activation. Each one is a frozen dataclass, because it is part of a program's identity."""

    @abc.abstractmethod
    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation, number by number. It must be 0 where both products are 0, as in unused rows."""


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) * up (Shazeer, 2020, arXiv:2002.05202)."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return silu(gate) * up."""
        return jax.nn.silu(gate) * up


SWIGLU = SwiGLU()


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU(Activation):
    """gate * sigmoid(alpha gate) * (up + 1), of products that are clamped first: that of gpt-oss (arXiv:2508.10925).

    Args:
        alpha: The slope inside the sigmoid.
        limit: The largest gate, and the largest magnitude of up.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation."""
        limit = jnp.asarray(self.limit, up.dtype)
        gate, up = jnp.minimum(gate, self.limit), jax.lax.clamp(-limit, up, limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
