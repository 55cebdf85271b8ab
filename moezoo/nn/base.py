"""The contracts of the two parts of a block: the mixer, which is attention, and the feed-forward part."""

import abc
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.nn.cache import Kept, Past, State
from moezoo.nn.positions import Context
from moezoo.parallel.collectives import InnerGroup
from moezoo.parallel.kernels import KernelName
from moezoo.parallel.mesh_execution import MeshExecution


class MixerOutput(NamedTuple):
    """What a mixer returns.

    Attributes:
        y: The partial result of this device's heads. `leave` sums it over the devices that share heads.
        kept: What later tokens need of these tokens, for `State.fill` and `State.advance`.
        bias: What is added to the sum, once; None for nothing.
    """

    y: Float[Array, "batch seq embed"]
    kept: PyTree
    bias: Float[Array, " embed"] | None = None

    def leave(self, group: InnerGroup) -> Float[Array, "batch seq embed"]:
        """Return the result of all heads: one psum over the `group` that shares them, then the bias."""
        y = group.leave(self.y)
        return y if self.bias is None else y + self.bias[None, None]


class TokenFlops(NamedTuple):
    """What a mixer computes for one token in a forward pass besides products with weights and attention, in FLOPs.

    Attributes:
        convolution: What filters do.
        recurrence: What reading one token into a state and answering it takes. A program that reads many tokens at once
            computes more.
    """

    convolution: int = 0
    recurrence: int = 0


class Mixer(eqx.Module):
    """The part of a block in which a token reads earlier tokens of its document, such as causal attention.

    Heads may be split over devices (`execution.inner_group("heads")`). An implementation casts activations with `enter`
    where they meet weights that are split by heads, and returns its partial result. The caller sums.

    A mixer owns what it keeps of the past: the loop over layers, the cache and generation only carry its `state`.

    Attributes:
        splits_sequences: Whether it runs where devices share sequences (`execution.sequence_group`). There it gets this
            device's tokens, and exchanges what the others need of them. By default it is refused there.
        kernel: The kernel that it calls, of which the summary names the backend.
    """

    splits_sequences: ClassVar[bool] = False
    kernel: ClassVar[KernelName] = "attention"

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Mix these tokens, or with a `past` the tokens in it and this one.

        Args:
            x: The activations, the same on all devices that share heads; with a `past` of one token per row.
            context: The coordinates of these tokens and of the keys, and what `prepare` returned, if it was called.
            execution: The mesh, context parallelism and kernels.
            past: The layer's past when generating; its state is that of this mixer.
        """

    @abc.abstractmethod
    def prepare(self, context: Context) -> PyTree:
        """Return what depends on coordinates only. It is computed once per forward pass for all layers of one kind.

        The arrays of the module are those of all these layers, and not gathered.
        """

    @abc.abstractmethod
    def state(self, length: int) -> State:
        """Declare what is kept of the past of texts of `length` tokens: a state whose leaves are `Kept`.

        The module may hold shapes instead of arrays, and its arrays may be those of a stack.
        """

    @property
    def head_sizes(self) -> tuple[int, int]:
        """The numbers of a head's query and of its value, where queries meet keys; zeros where none do.

        The module is as for `state`.
        """
        return 0, 0

    def mean_seen(self, length: int) -> float:
        """Return the mean number of keys that queries of a document of `length` tokens see, if queries meet keys."""
        return (length + 1) / 2

    def shared_sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Return what each token makes for the others of its document: name -> sizes of its dimensions by logical axis.

        On a split sequence this is what devices exchange. The module is as for `state`.
        """
        return {}

    def least_chunk(self) -> int:
        """Return the fewest tokens of a chunk of a split sequence."""
        return 1

    def chunk_sizes(self) -> Mapping[str, Kept]:
        """Return what each chunk of tokens makes for the later ones of its text where devices share sequences, by name.

        As `shared_sizes`, but one array for all tokens of a chunk, whatever their number.
        """
        return {}

    def memory_seen(self) -> Mapping[str, float]:
        """Return platform -> how many times the predicted memory a compiled step had in use, where it was over 1.2.

        The module is as for `state`.
        """
        return {}

    def token_flops(self) -> TokenFlops:
        """Return the FLOPs of a token in a layer, over all heads of the module, which is as for `state`."""
        return TokenFlops()


class NothingKept(State):
    """The state of a layer that reads no other tokens."""

    def fill(self, kept: None) -> "NothingKept":
        """Return it."""
        del kept
        return self

    def advance(self, fresh: None, column: Int[Array, ""]) -> "NothingKept":
        """Return it."""
        del fresh, column
        return self


class NoMixer(Mixer):
    """Stands for the mixer of a block that is a feed-forward part alone. It adds nothing and keeps nothing."""

    splits_sequences: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution, past: Past | None = None
    ) -> MixerOutput:
        """Return zeros."""
        del context, execution, past
        return MixerOutput(jnp.zeros_like(x), None)

    def prepare(self, context: Context) -> PyTree:
        """Return None."""
        del context

    def state(self, length: int) -> NothingKept:
        """Declare nothing."""
        del length
        return NothingKept(0)


class FeedForwardOutput(NamedTuple):
    """What a feed-forward part returns.

    Attributes:
        y: The partial result of this device's part of the width; where the part `is_whole`, the result.
        sums: The routing sums of a mixture.
        routed: What the routed experts of a mixture return for each token, before a norm or a projection.
    """

    y: Float[Array, "batch seq embed"]
    sums: PyTree = None
    routed: Float[Array, "batch seq expert_embed"] | None = None


class FeedForward(eqx.Module):
    """A function of each token alone: an MLP or a mixture of experts.

    Its width may be split over devices (`execution.inner_group("mlp")`). An implementation casts activations with
    `enter` where they meet weights that are split, and returns its partial result. The caller sums.
    """

    @property
    def is_whole(self) -> bool:
        """Whether results are summed already, as a norm after them needs."""
        return False

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution
    ) -> FeedForwardOutput:
        """Return the partial result of this device's part of the width.

        At padding (`context.queries.segment` 0) results are not used and nothing is counted.
        """
