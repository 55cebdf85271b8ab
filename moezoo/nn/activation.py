"""What stands between the two products into an MLP or an expert and the one out of it."""

import abc
import dataclasses

import jax
from jaxtyping import Array, Float


class Activation(abc.ABC):
    """A gated activation; a frozen dataclass, as it is part of a program's identity."""

    @abc.abstractmethod
    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Of both products of the same tokens, number by number; zero where both are zero."""


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) * up (Shazeer, 2020)."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """The product."""
        return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class GeGLU(Activation):
    """gelu(gate) * up with the exact Gaussian error function (Shazeer, 2020)."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """The product."""
        return jax.nn.gelu(gate, approximate=False) * up


SWIGLU = SwiGLU()

# By the name that a Hugging Face config.json has for it.
ACTIVATIONS: dict[str, Activation] = {"silu": SWIGLU, "swish": SWIGLU, "gelu": GeGLU()}
