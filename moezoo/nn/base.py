"""The contracts of the two parts of a block: attention and feed-forward."""

import abc
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Float, PyTree

from moezoo.nn.cache import Past
from moezoo.nn.positions import Context
from moezoo.nn.rotary import Rotary
from moezoo.parallel.collectives import InnerGroup
from moezoo.parallel.execution import Execution

# The logical axes of an array after [batch, tokens], in order, and their sizes on a device.
KeptSizes = dict[str, int]


class AttentionOutput(NamedTuple):
    """What attention returns.

    Attributes:
        y: The partial result of this device's heads. `whole` sums it over the devices that share heads.
        kept: What later tokens need of these tokens.
        bias: What is added to the sum, once; None for nothing.
    """

    y: Float[Array, "batch seq embed"]
    kept: PyTree
    bias: Float[Array, " embed"] | None = None

    def whole(self, group: InnerGroup) -> Float[Array, "batch seq embed"]:
        """Return the result of all heads: one psum over the `group` that shares them, then the bias."""
        y = group.leave(self.y)
        return y if self.bias is None else y + self.bias[None, None]


class SelfAttention(eqx.Module):
    """Causal attention within documents.

    Heads may be split over devices (`execution.inner_group("heads")`). An implementation casts activations with `enter`
    where they meet weights that are split by heads, and returns its partial result. The caller sums.

    Attributes:
        rotary: The rotary positions of queries and keys.
    """

    rotary: eqx.AbstractVar[Rotary]

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: Execution, past: Past | None = None
    ) -> AttentionOutput:
        """Return attention over these tokens, or with a `past` over the tokens in it and this one.

        Args:
            x: activations, the same on all devices that share heads; with a `past` of one token per row.
            context: places of queries and keys.
            execution: mesh, context parallelism and kernels.
            past: the layer's cache when generating.
        """

    @abc.abstractmethod
    def count_slots(self, length: int) -> int:
        """Return the number of cache slots for a text of `length` tokens: the most tokens that a query can see."""

    @abc.abstractmethod
    def kept_sizes(self, group: InnerGroup) -> PyTree:
        """Return what a device keeps of a token: a tree like `AttentionOutput.kept`, with a `KeptSizes` for each array.

        The module may hold shapes instead of arrays, and its arrays may be those of a stack.
        """


class FeedForwardOutput(NamedTuple):
    """The partial result `y`; for a mixture also its routing `sums`, and `routed`, the part of `y` from routed experts.

    The caller sums `y` over the devices that share the width of MLPs.
    """

    y: Float[Array, "batch seq embed"]
    sums: PyTree = None
    routed: Float[Array, "batch seq embed"] | None = None


class FeedForward(eqx.Module):
    """A function of each token alone: an MLP or a mixture of experts.

    Its width may be split over devices (`execution.inner_group("mlp")`). An implementation casts activations with
    `enter` where they meet weights that are split, and returns its partial result. The caller sums.
    """

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], execution: Execution
    ) -> FeedForwardOutput:
        """Return the partial result of this device's part of the width.

        `valid` is False at padding, where results are not used and nothing is counted.
        """
