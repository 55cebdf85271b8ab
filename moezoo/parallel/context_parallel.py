"""The contract of context parallelism; what keeps it is in `moezoo.nn.context_parallel`.

Where the sequence is split over devices, a query must meet keys and values of tokens on other devices. Attention hands
over its queries, what its tokens leave behind (`kept`, a tree whose arrays have a token dimension), and the function
`expand(weights, kept) -> keys, values`: what travels is `kept`, however many numbers keys and values have.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from moezoo.parallel.collectives import MeshAxes
from moezoo.parallel.kernels import KernelOrder
from moezoo.parallel.traffic import Moves


class Place(NamedTuple):
    """Where tokens are: each one's `position` in its document, and its `segment`, the document's number in its row.

    Segment 0 is padding.
    """

    position: Int[Array, "batch tokens"]
    segment: Int[Array, "batch tokens"]


class Places(NamedTuple):
    """The places of queries and of the keys that attention is given with them."""

    queries: Place
    keys: Place


class Scoring(NamedTuple):
    """How attention scores: `scale` of q . k, the `window` of tokens that a query sees, itself included, and `sinks`.

    `sinks` [kv_heads group]: a score that every query of a head has besides, of a value of zero. `order`: backends of
    the kernel.
    """

    scale: float | Float[Array, ""]
    window: int | None = None
    sinks: Float[Array, "kv_heads group"] | None = None
    order: KernelOrder = KernelOrder()


class SequenceGroup(NamedTuple):
    """The `size` devices along mesh `axes` that share sequences; `token_axes`: all mesh axes that split tokens."""

    axes: MeshAxes
    size: int
    token_axes: MeshAxes


# weights, kept [batch tokens ...] -> keys [batch tokens kv_heads head_dim], values [batch tokens kv_heads value_dim]
Expand = Callable[[PyTree, PyTree], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class ContextParallel(abc.ABC):
    """How queries meet the keys of other devices; on a group of one device they meet their own."""

    @abc.abstractmethod
    def places(self, queries: Place, group: SequenceGroup) -> Places:
        """The places that all layers give to `attend`: made once per forward pass."""

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "batch queries kv_heads group head_dim"],
        kept: PyTree,
        weights: PyTree,
        expand: Expand,
        places: Places,
        scoring: Scoring,
        group: SequenceGroup,
    ) -> Float[Array, "batch queries kv_heads group value_dim"]:
        """This device's queries over the whole sequence.

        `kept` are this device's; `weights` are all the parameters that `expand` uses, so that a rule for gradients can
        return theirs.
        """

    @abc.abstractmethod
    def place_exchanges(self, tokens: int, group: SequenceGroup) -> Moves:
        """The collectives of `places` for so many tokens per device."""

    @abc.abstractmethod
    def exchanges(self, numbers: tuple[int, ...], dtype: DTypeLike, group: SequenceGroup) -> Moves:
        """The collectives of `attend` where the arrays of `kept` have so many numbers per device."""
