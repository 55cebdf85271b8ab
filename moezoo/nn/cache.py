"""What mixers keep of the past of texts, and the cache of generation, which carries it."""

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
    """A declared array [batch, ...]: the sizes of its dimensions after `batch`, by logical axis, in order.

    `slots` is the axis of tokens. The size of an axis is that of the mixer's arrays, whole or a device's part.
    """

    sizes: Mapping[str, int]


class State(eqx.Module):
    """What the layers of one kind keep of the past: a tree that only their mixer understands.

    Its leaves are `Kept` as a mixer declares it, arrays [batch, ...] of one layer after `fill`, and arrays
    [layer, batch, ...] of all layers in a `Cache`.

    Attributes:
        num_slots: The number of last tokens whose coordinates the mixer reads too. It sees no others. 0 for none.
    """

    num_slots: int = eqx.field(static=True)

    @abc.abstractmethod
    def fill(self, kept: PyTree) -> "State":
        """Return the declared state with what a layer kept of prompts (`MixerOutput.kept`)."""

    @abc.abstractmethod
    def advance(self, fresh: PyTree, column: Int[Array, ""]) -> "State":
        """Return the state after token `column`, of which the layers kept `fresh` (`MixerOutput.kept`, by layer)."""


class Slots(State):
    """What each token keeps, in a ring buffer: token t of a text is in slot t modulo `num_slots`.

    `kept` is a tree like `MixerOutput.kept`, whose arrays are [batch, tokens, ..., size]. Here they are [layer, batch,
    ..., slots, size]: a product with one query then reads the slots of each head as they lie in memory.
    """

    kept: PyTree

    @classmethod
    def declare(cls, num_slots: int, sizes: PyTree) -> "Slots":
        """Declare slots by the sizes of what a token keeps: a tree like `MixerOutput.kept` of dicts by logical axis.

        Raises `UserError` for no slot.
        """
        if num_slots < 1:
            raise UserError(f"Slots.declare: num_slots is {num_slots}, expected 1 or more")

        def one(sizes: Mapping[str, int]) -> Kept:
            *others, last = sizes.items()
            return Kept(dict((*others, ("slots", num_slots), last)))

        return cls(num_slots, jax.tree.map(one, sizes, is_leaf=lambda x: isinstance(x, dict)))

    def fill(self, kept: PyTree) -> "Slots":
        """Arrange arrays [batch, tokens, ..., size] of whole prompts."""
        return Slots(self.num_slots, jax.tree.map(lambda x: jnp.moveaxis(fit(x, self.num_slots), 1, -2), kept))

    def with_token(self, fresh: PyTree, past: "Past") -> PyTree:
        """Return the arrays [batch, slots, ..., size] of the layer of `past`, with a token's `fresh` in its slot.

        The state itself stays as it is: if every layer wrote into it, XLA would copy all of it for every layer.
        """
        slot = past.column % self.num_slots

        def one(kept: Array, token: Array) -> Array:
            mine = lax.dynamic_index_in_dim(kept, past.layer, keepdims=False)
            here = lax.broadcasted_iota(jnp.int32, (*(1,) * (mine.ndim - 2), mine.shape[-2], 1), mine.ndim - 2) == slot
            return jnp.moveaxis(jnp.where(here, jnp.moveaxis(token, 1, -2).astype(kept.dtype), mine), -2, 1)

        return jax.tree.map(one, self.kept, fresh)

    def advance(self, fresh: PyTree, column: Int[Array, ""]) -> "Slots":
        """Write token `column` into its slot."""
        one = lambda x, new: write(x, jnp.moveaxis(new, 2, -2), column, dim=x.ndim - 2)  # noqa: E731
        return Slots(self.num_slots, jax.tree.map(one, self.kept, fresh))


def fill_declared(mixer: Any, kept: PyTree, length: int) -> State:
    """Return the state that `mixer` declares for texts of `length` tokens, filled with what it kept of prompts.

    Raises:
        UserError: It declares no state, or one that what it kept does not have the shapes of.
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
    wanted, has = tuple(declared.sizes.values()), filled.shape[1:]
    named = " ".join(f"{axis}={size}" for axis, size in declared.sizes.items())
    return "" if has == wanted else f"its state declares {named}, and what it keeps has {has}"


class Past(NamedTuple):
    """The past as layer `layer` of `state` sees it, which reads token `column`.

    `keys` are the coordinates of the last tokens (`State.num_slots`), token `column` among them; None for none.
    """

    state: Any
    layer: Int[Array, ""]
    column: Int[Array, ""]
    keys: Any = None


class Cache(NamedTuple):
    """What a model keeps of the tokens before `column`. Layers share coordinates, for each number that some read.

    | field | meaning |
    |---|---|
    | `states[stack][kind]` | a `State` of arrays |
    | `coordinates[n]` | the coordinates of the last n tokens, in n slots as in `Slots`; segment 0 in empty ones |
    | `column` | index of the token that is read next, the same for all texts |
    """

    states: tuple[tuple[Any, ...], ...]
    coordinates: dict[int, Coordinates]
    column: Int[Array, ""]

    @classmethod
    def of_prompts(cls, states: tuple[tuple[Any, ...], ...], at: Coordinates) -> "Cache":
        """Return the cache of prompts whose tokens have coordinates `at` [batch, tokens]."""
        counts = {state.num_slots for stack in states for state in stack} - {0}
        return cls(states, {n: Coordinates(*(fit(p, n) for p in at)) for n in counts}, jnp.int32(at.position.shape[1]))

    def add_token(self, at: Coordinates) -> "Cache":
        """Return the cache with the coordinates [batch, 1] of token `column`, before layers read it."""
        one = lambda old: jax.tree.map(lambda x, new: write(x, new, self.column, dim=1), old, at)  # noqa: E731
        return self._replace(coordinates={n: one(old) for n, old in self.coordinates.items()})

    def past(self, stack: int, kind: int, layer: Int[Array, ""]) -> Past:
        """Return the past of one layer, which reads token `column`."""
        state = self.states[stack][kind]
        return Past(state, layer, self.column, self.coordinates.get(state.num_slots))

    def advance(self, fresh: tuple[tuple[PyTree, ...], ...]) -> "Cache":
        """Return the cache after token `column`; `fresh[stack][kind]` is what the layers kept of it."""
        states = tuple(
            tuple(state.advance(new, self.column) for state, new in zip(*kinds, strict=True))
            for kinds in zip(self.states, fresh, strict=True)
        )
        return self._replace(states=states, column=self.column + 1)


def fit(columns: Array, slots: int) -> Array:
    """Arrange an array [batch, columns, ...] of all columns of a text as a ring: column t in slot t modulo `slots`.

    With more columns than slots, the last ones stay. With fewer, zeros fill the rest.
    """
    count = columns.shape[1]
    if count <= slots:
        return jnp.pad(columns, [(0, slots - count if i == 1 else 0) for i in range(columns.ndim)])
    last = lax.slice_in_dim(columns, count - slots, count, axis=1)
    return jnp.roll(last, (count - slots) % slots, axis=1)


def write(ring: Array, token: Array, column: Int[Array, ""], *, dim: int) -> Array:
    """Write `token`, of size 1 along the dimension `dim` of slots, into the slot of token `column`."""
    return lax.dynamic_update_slice_in_dim(ring, token.astype(ring.dtype), column % ring.shape[dim], dim)
