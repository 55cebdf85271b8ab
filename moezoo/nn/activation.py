"""The contract of a gated activation: the function between the products of an MLP or an expert."""

import abc

from jaxtyping import Array, Float


class Activation(abc.ABC):
    """A gated activation. Each one is a frozen dataclass, because it is part of a program's identity."""

    @abc.abstractmethod
    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Return the activation, number by number. It must be 0 where both products are 0, as in unused rows."""
