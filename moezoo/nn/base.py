"""The contracts of the two parts of a block: attention and feed-forward."""

import abc
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Float, PyTree

from moezoo.nn.cache import Past
from moezoo.nn.positions import Context
from moezoo.nn.rotary import Rotary
from moezoo.parallel.execution import Execution


class AttentionOutput(NamedTuple):
    """The result `y`; `kept`, what later tokens need of these tokens."""

    y: Float[Array, "batch seq embed"]
    kept: PyTree


class SelfAttention(eqx.Module):
    """Causal attention within documents."""

    rotary: eqx.AbstractVar[Rotary]

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> AttentionOutput:
        """Return attention over these tokens, or with a `past` over the tokens in it and this one.

        Args:
            x: activations; with a `past` of one token per row.
            context: places of queries and keys.
            execution: mesh, context parallelism and kernels.
            past: the layer's cache when generating.
        """

    @abc.abstractmethod
    def count_slots(self, length: int) -> int:
        """Return the number of cache slots for a text of `length` tokens: the most tokens that a query can see."""


class FeedForwardOutput(NamedTuple):
    """The result `y`; for a mixture also its routing `sums`, and `routed`, the part of `y` from routed experts."""

    y: Float[Array, "batch seq embed"]
    sums: PyTree = None
    routed: Float[Array, "batch seq embed"] | None = None


class FeedForward(eqx.Module):
    """A function of each token alone: an MLP or a mixture of experts."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], execution: Execution
    ) -> FeedForwardOutput:
        """Return the result. `valid` is False at padding, where results are not used and nothing is counted."""
