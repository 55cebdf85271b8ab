"""The contract of what stands between the two products into an MLP or an expert and the one out of it."""

import abc

from jaxtyping import Array, Float


class Activation(abc.ABC):
    """A gated activation; each is a frozen dataclass in its own file, as it is part of a program's identity."""

    @abc.abstractmethod
    def __call__(self, gate: Float[Array, "*dims mlp"], up: Float[Array, "*dims mlp"]) -> Float[Array, "*dims mlp"]:
        """Of both products of the same tokens, number by number; zero where both are zero, as in rows of no token."""
