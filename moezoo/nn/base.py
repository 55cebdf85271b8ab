"""The two parts of a block as contracts: attention, and a feed-forward part."""

import abc
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Float, PyTree

from moezoo.nn.cache import Past
from moezoo.nn.positions import Context
from moezoo.parallel.execution import Execution


class AttentionOutput(NamedTuple):
    """Attention's result; and what later tokens need of these, or all that is kept where there is a past."""

    y: Float[Array, "batch seq embed"]
    kept: PyTree


class SelfAttention(eqx.Module):
    """Causal attention within documents."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> AttentionOutput:
        """Attend; with a `past`, also to the tokens that it holds."""

    @abc.abstractmethod
    def count_slots(self, length: int) -> int:
        """How many tokens of a text of `length` tokens later ones may look back on: the slots of its cache."""


class FeedForwardOutput(NamedTuple):
    """The result `y`; a mixture's routing sums and the part of `y` that its routed experts gave, None for an MLP."""

    y: Float[Array, "batch seq embed"]
    sums: PyTree = None
    routed: Float[Array, "batch seq embed"] | None = None


class FeedForward(eqx.Module):
    """What each token goes through by itself: an MLP or a mixture of experts."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], execution: Execution
    ) -> FeedForwardOutput:
        """Tokens through it; where not `valid`, at padding, results do not matter and nothing is counted."""
