"""SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

import dataclasses

import jax
from jaxtyping import Array, Float

from moezoo.nn.activation import Activation


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) * up."""

    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return silu(gate) * up."""
        return jax.nn.silu(gate) * up


SWIGLU = SwiGLU()
