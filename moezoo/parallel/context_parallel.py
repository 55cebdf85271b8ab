"""The contract of context parallelism: how queries meet keys of tokens on other devices.

Where the sequence is split over devices, attention passes `SplitOperands` to `ContextParallel.attend`: its queries,
what its own tokens keep for later queries, and a function that makes keys and values of that. Devices exchange what
tokens keep, which may be much smaller than the keys and values. Implementations are in `moezoo.nn.context_parallel`.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from moezoo.parallel.collectives import MeshAxes, gather
from moezoo.parallel.kernels import KernelOrder
from moezoo.parallel.sequence_order import SequenceOrder


class Coordinates(NamedTuple):
    """The coordinates of tokens.

    Attributes:
        position: Each token's position in its document, from 0, up to 2^30; int32.
        segment: The number of the token's document in its row, from 1; int32. Segment 0 is padding.
    """

    position: Int[Array, "batch tokens"]
    segment: Int[Array, "batch tokens"]


class Interval(NamedTuple):
    """The keys that each query sees, from number `first` up to and without `after`, in keys sorted by coordinates.

    Equal numbers stand for none. int32 [batch, queries].
    """

    first: Int[Array, "batch queries"]
    after: Int[Array, "batch queries"]


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Positions are cut into stretches of `length`, and a query sees keys of its own one (Llama 4; Meta, 2025).

    Positions count from the start of each document, so stretches do too.
    """

    length: int


# How far back a query sees: so many positions, its own included; to the start of its stretch; None: to the start of its
# document.
Reach = int | Stretches | None


def first_seen(position: Int[Array, "*dims"], window: Reach) -> Int[Array, "*dims"]:
    """Return the first position that a query at each `position` sees; with None a number below all positions."""
    if window is None:
        return jnp.full_like(position, -jnp.iinfo(jnp.int32).max)
    return position - (position % window.length if isinstance(window, Stretches) else window - 1)


def most_seen(window: Reach) -> int | None:
    """Return the largest number of positions that a query sees; None for no limit."""
    return window.length if isinstance(window, Stretches) else window


def mean_seen(window: Reach, length: int) -> float:
    """Return the mean number of keys that queries of a document of `length` tokens see."""
    most = min(length, most_seen(window) or length)
    if not isinstance(window, Stretches):
        return most - most * (most - 1) / 2 / length
    whole, rest = divmod(length, most)
    return (whole * most * (most + 1) + rest * (rest + 1)) / 2 / length


class BothCoordinates(NamedTuple):
    """The coordinates of the queries and of the keys of one call of attention."""

    queries: Coordinates
    keys: Coordinates


# Where the tokens of a sequence lie on devices, if they are sorted by segment, then position: the numbers of equal
# chunks of the sorted sequence, in the order of devices, equally many on each. None if they may lie in any order.
Chunks = tuple[int, ...] | None


def in_order(x: Array, chunks: tuple[int, ...]) -> Array:
    """Return an array [batch, tokens, ...] whose tokens lie as `chunks` says with its tokens sorted."""
    if chunks == tuple(sorted(chunks)):
        return x
    parts = jnp.split(x, len(chunks), axis=1)
    return jnp.concatenate([parts[chunks.index(number)] for number in range(len(chunks))], axis=1)


class Scoring(NamedTuple):
    """How attention scores a query against a key.

    Attributes:
        scale: The factor of the product q . k.
        window: How far back a query sees.
        sinks: One extra score per query head, [kv_heads, group], for a value of zero.
        order: The backends of the attention kernel to try, and what the program is compiled for.
    """

    scale: float | Float[Array, ""]
    window: Reach = None
    sinks: Float[Array, "kv_heads group"] | None = None
    order: KernelOrder = KernelOrder()


class SequenceGroup(NamedTuple):
    """The devices that share sequences.

    Attributes:
        axes: The mesh axes that split the sequence; empty for one device.
        size: The number of devices along `axes`.
        token_axes: All mesh axes that split tokens: those that split the batch, then `axes`.
        order: The order in which the tokens of a sequence lie on the devices.
    """

    axes: MeshAxes
    size: int
    token_axes: MeshAxes
    order: SequenceOrder = "contiguous"


# weights, kept [batch tokens ...] -> keys [batch tokens kv_heads head_dim], values [batch tokens kv_heads value_dim]
Expand = Callable[[PyTree, PyTree], tuple[Array, Array]]


class SplitOperands(NamedTuple):
    """The operands of attention on a split sequence.

    Attributes:
        q: The queries of this device's tokens, in the dtype that the layer computes in.
        kept: What this device's tokens keep for later queries: a tree of arrays [batch, tokens, ...], such as keys and
            values, or the latents of latent attention. Devices exchange these.
        weights: Every parameter that `expand` uses, already gathered. They are an operand so that an implementation
            with its own gradient can return theirs.
        expand: A function that makes keys and values of `weights` and a `kept` of any number of tokens.
        coordinates: The result of `ContextParallel.coordinates`.
        scoring: The scale, window, sinks and backends.
        seen: The keys that each query sees, of those of the whole sequence in sorted order; None if `chunks` is None.
        chunks: Where tokens lie on the devices.
    """

    q: Float[Array, "batch queries kv_heads group head_dim"]
    kept: PyTree
    weights: PyTree
    expand: Expand
    coordinates: BothCoordinates
    scoring: Scoring
    seen: Interval | None = None
    chunks: Chunks = None


@dataclasses.dataclass(frozen=True)
class ContextParallel(abc.ABC):
    """How queries meet the keys of other devices. On a group of one device, queries meet their own keys.

    An implementation is a frozen dataclass; its fields are its options. Its methods run inside
    `jax.shard_map(check_vma=True)`, or without a mesh. Arrays of tokens vary over `group.token_axes`, and so do the
    results.
    """

    def coordinates(self, queries: Coordinates, group: SequenceGroup) -> BothCoordinates:
        """Return the coordinates that every layer passes to `attend`. Called once per forward pass.

        By default the positions and segments of the whole sequence are all-gathered, two integers per token.

        Args:
            queries: The coordinates of this device's tokens, [batch, tokens].
            group: The devices that share sequences.
        """
        keys = Coordinates(*(gather(x, group.axes, 1, tokens=group.token_axes) for x in queries))
        return BothCoordinates(queries, keys)

    @abc.abstractmethod
    def attend(
        self, operands: SplitOperands, group: SequenceGroup
    ) -> Float[Array, "batch queries kv_heads group value_dim"]:
        """Attend from this device's queries to the keys of the whole sequence.

        Args:
            operands: The queries, and what keys and values are made of.
            group: The devices that share sequences.

        Returns:
            The attended values, in the dtype of the values.
        """
