"""What a model keeps of the tokens that it has read, so that generation reads each token once.

A mixer decides what its layers keep: attention a key and a value per token, in `Slots`; a recurrent mixer a state of
one size. The loop over layers, the `Cache` and generation only carry it.

| when | call | result |
|---|---|---|
| before anything is read | `Mixer.state(length)` | a `State` whose leaves are sizes (`Kept`) |
| a layer has read the prompts | `fill_declared`, which calls `State.fill` | a `State` of arrays |
| before layers read the next token | `Cache.add_token` | the cache with that token's coordinates |
| a layer reads the token | `Cache.past` | a `Past`: the state, and which layer and token it is |
| all layers have read it | `Cache.advance`, which calls `State.advance` | the cache with what they kept of it |

The texts of a batch are arrays [batch, columns]. A *column* is the place of a token in such an array, from 0: all texts
are at the same one. A token's position in its document (`Coordinates`) is another number, since padding has columns.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from moezoo.errors import UserError
from moezoo.parallel.context_parallel import Coordinates


@dataclasses.dataclass(frozen=True)
class Kept:
    """Stands for an array [batch, ...] that a mixer will keep: the sizes of the dimensions after `batch`, in order.

    They are named by logical axes; `slots` is the axis of tokens. The size of `kv_heads` and of other axes that devices
    split is that in the mixer's arrays: of the whole weight, or of this device's part. `dtype` is that of the array;
    None: that of activations.
    """

    sizes: Mapping[str, int]
    dtype: str | None = None


class State(eqx.Module):
    """What the layers of one kind keep of the tokens that they have read: a tree that only their mixer understands.

    | where | leaves |
    |---|---|
    | as a mixer declares it | `Kept` |
    | after `fill` | arrays [batch, ...] of one layer |
    | in a `Cache` | arrays [layer, batch, ...] of all layers of this kind |

    Attributes:
        num_slots: The mixer reads the last `num_slots` tokens, and gets their coordinates as `Past.keys`. 0: it reads
            no single tokens and gets no coordinates, as a recurrent mixer.
    """

    num_slots: int = eqx.field(static=True)

    @abc.abstractmethod
    def fill(self, kept: PyTree) -> "State":
        """Return a state of arrays: what a layer kept of prompts (`MixerOutput.kept`). Called on the declared state."""

    @abc.abstractmethod
    def advance(self, fresh: PyTree, column: Int[Array, ""]) -> "State":
        """Return the state after the token in `column`.

        Args:
            fresh: What the layers kept of it: `MixerOutput.kept`, whose arrays have a leading dimension of layers.
            column: The token's column.
        """


class Slots(State):
    """What a layer keeps of each token, in a ring buffer: column t is in slot t modulo `num_slots`.

    `kept` is a tree like `MixerOutput.kept`. The arrays there are [batch, tokens, ..., size]. Here they are [layer,
    batch, ..., slots, size]: a product with one query then reads the slots of each head as they lie in memory.
    """

    kept: PyTree

    @classmethod
    def declare(cls, num_slots: int, sizes: PyTree) -> "Slots":
        """Declare `num_slots` slots.

        Args:
            num_slots: The number of tokens that fit.
            sizes: What is kept of one token: a tree like `MixerOutput.kept`, with a dict from logical axis to size in
                place of each array.

        Raises:
            UserError: `num_slots` is less than 1.
        """
        if num_slots < 1:
            raise UserError(f"Slots.declare: num_slots is {num_slots}, expected 1 or more")

        def with_slots(sizes: Mapping[str, int]) -> Kept:
            *others, last = sizes.items()
            return Kept(dict((*others, ("slots", num_slots), last)))

        return cls(num_slots, jax.tree.map(with_slots, sizes, is_leaf=lambda x: isinstance(x, dict)))

    def fill(self, kept: PyTree) -> "Slots":
        """Arrange what was kept of prompts, arrays [batch, columns, ..., size], in slots."""
        return Slots(self.num_slots, jax.tree.map(lambda x: jnp.moveaxis(as_ring(x, self.num_slots), 1, -2), kept))

    def with_token(self, fresh: PyTree, past: "Past") -> PyTree:
        """Return what the layer of `past` kept of all tokens, and of the token that it reads now: `fresh`, in its slot.

        The arrays are [batch, slots, ..., size]. The state itself stays as it is: if every layer wrote into it, XLA
        would copy all of it for every layer.
        """
        slot = past.column % self.num_slots

        def layer_with(kept: Array, token: Array) -> Array:
            mine = lax.dynamic_index_in_dim(kept, past.layer, keepdims=False)
            here = lax.broadcasted_iota(jnp.int32, (*(1,) * (mine.ndim - 2), mine.shape[-2], 1), mine.ndim - 2) == slot
            return jnp.moveaxis(jnp.where(here, jnp.moveaxis(token, 1, -2).astype(kept.dtype), mine), -2, 1)

        return jax.tree.map(layer_with, self.kept, fresh)

    def advance(self, fresh: PyTree, column: Int[Array, ""]) -> "Slots":
        """Write what all layers kept of the token in `column` into its slot."""
        put = lambda x, new: write_slot(x, jnp.moveaxis(new, 2, -2), column, dim=x.ndim - 2)  # noqa: E731
        return Slots(self.num_slots, jax.tree.map(put, self.kept, fresh))


def fill_declared(mixer: Any, kept: PyTree, length: int) -> State:
    """Return the state that `mixer` declares for texts of `length` tokens, filled with `kept`, of one layer's prompts.

    Raises:
        UserError: The mixer declares no state, or `kept` has other shapes or dtypes than it declares.
    """
    who, declared = f"mixer {type(mixer).__name__}", mixer.state(length)
    if not isinstance(declared, State):
        raise UserError(f"{who}: state returns a {type(declared).__name__}, expected a State of moezoo.nn.cache")
    is_kept = lambda x: isinstance(x, Kept)  # noqa: E731
    try:
        filled = declared.fill(kept)
        pairs = jax.tree.leaves(jax.tree.map(_differing, declared, filled, is_leaf=is_kept))
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise UserError(f"{who}: what it keeps is not the tree that its state declares ({reason})") from None
    if differing := [text for text in pairs if text]:
        raise UserError(f"{who}: {differing[0]}; declare what the layer keeps")
    return filled


def _differing(declared: Kept, filled: Array) -> str:
    """Return how the shape or dtype of an array differs from what is declared; empty if it does not."""
    wanted, has = tuple(declared.sizes.values()), filled.shape[1:]
    named = " ".join(f"{axis}={size}" for axis, size in declared.sizes.items())
    if has != wanted:
        return f"its state declares {named}, and what it keeps has {has}"
    dtype = declared.dtype or filled.dtype.name
    return "" if dtype == filled.dtype.name else f"its state declares {dtype}, and what it keeps is {filled.dtype.name}"


class Past(NamedTuple):
    """What a layer gets of the past while it reads one token.

    Attributes:
        state: What all layers of its kind kept of earlier tokens.
        layer: The layer's number in `state`.
        column: The column of the token that it reads.
        keys: The coordinates of the last `state.num_slots` tokens, this one among them, by slot; None for 0 slots.
    """

    state: Any
    layer: Int[Array, ""]
    column: Int[Array, ""]
    keys: Any = None


class Cache(NamedTuple):
    """What a model keeps of the tokens before `column`.

    Coordinates are the same for all layers, so layers with equally many slots share them.

    | field | meaning |
    |---|---|
    | `states[stack][kind]` | what the layers of one kind in one stack keep: a `State` of arrays [layer, batch, ...] |
    | `coordinates[n]` | the coordinates of the last n tokens, in n slots as in `Slots`; segment 0 in empty slots |
    | `column` | the column of the token that is read next |
    """

    states: tuple[tuple[Any, ...], ...]
    coordinates: dict[int, Coordinates]
    column: Int[Array, ""]

    @classmethod
    def of_prompts(cls, states: tuple[tuple[Any, ...], ...], at: Coordinates) -> "Cache":
        """Return the cache of prompts whose tokens have coordinates `at` [batch, tokens]."""
        counts = {state.num_slots for stack in states for state in stack} - {0}
        coordinates = {n: Coordinates(*(as_ring(x, n) for x in at)) for n in counts}
        return cls(states, coordinates, jnp.int32(at.position.shape[1]))

    def add_token(self, at: Coordinates) -> "Cache":
        """Return the cache with the coordinates [batch, 1] of the token in `column`, before layers read it."""
        put = lambda old: jax.tree.map(lambda x, new: write_slot(x, new, self.column, dim=1), old, at)  # noqa: E731
        return self._replace(coordinates={n: put(old) for n, old in self.coordinates.items()})

    def past(self, stack: int, kind: int, layer: Int[Array, ""]) -> Past:
        """Return what layer `layer` of one kind in one stack gets while it reads the token in `column`."""
        state = self.states[stack][kind]
        return Past(state, layer, self.column, self.coordinates.get(state.num_slots))

    def advance(self, fresh: tuple[tuple[PyTree, ...], ...]) -> "Cache":
        """Return the cache after the token in `column`; `fresh[stack][kind]` is what the layers kept of it."""
        states = tuple(
            tuple(state.advance(new, self.column) for state, new in zip(*kinds, strict=True))
            for kinds in zip(self.states, fresh, strict=True)
        )
        return self._replace(states=states, column=self.column + 1)


def as_ring(columns: Array, slots: int) -> Array:
    """Arrange an array [batch, columns, ...] as a ring buffer [batch, slots, ...]: column t in slot t modulo `slots`.

    With more columns than slots, the last ones stay. With fewer, zeros fill the rest.
    """
    count = columns.shape[1]
    if count <= slots:
        return jnp.pad(columns, [(0, slots - count if i == 1 else 0) for i in range(columns.ndim)])
    last = lax.slice_in_dim(columns, count - slots, count, axis=1)
    return jnp.roll(last, (count - slots) % slots, axis=1)


def write_slot(ring: Array, token: Array, column: Int[Array, ""], *, dim: int) -> Array:
    """Return `ring` with `token` in the slot of `column`. Slots are dimension `dim`, of size 1 in `token`."""
    return lax.dynamic_update_slice_in_dim(ring, token.astype(ring.dtype), column % ring.shape[dim], dim)
