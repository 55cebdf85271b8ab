"""What layers keep of the tokens so far, so that the next one does not compute them again.

A cache is a ring buffer: what is kept of token t of a text is in slot t modulo the number of slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from moezoo.parallel.context_parallel import Place


class Past(NamedTuple):
    """One layer's part of what a run of alike layers keeps.

    `kept` is all of it, arrays [layer, batch, slots, ...], so that a token is written in place, into `slot`.
    """

    kept: PyTree
    layer: Int[Array, ""]
    slot: Int[Array, ""]

    def append(self, fresh: PyTree) -> tuple[PyTree, "Past"]:
        """This layer's part [batch, slots, ...] with a token's `fresh` [batch, 1, ...] in its slot, and all of it."""

        def write(kept: Array, one: Array) -> Array:
            start = (self.layer, 0, self.slot, *(0,) * (one.ndim - 2))
            return lax.dynamic_update_slice(kept, one[None].astype(kept.dtype), start)

        kept = jax.tree.map(write, self.kept, fresh)
        mine = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, self.layer, keepdims=False), kept)
        return mine, self._replace(kept=kept)


class Cache(NamedTuple):
    """What the blocks of a model keep of tokens 0 to `column`.

    - `kept[stack][kind]`: arrays [layer, batch, slots, ...];
    - `keys[slots]`: whose each slot is, for each number of slots; an empty one belongs to segment 0, as padding does;
    - `column`: the token that is read next, the same for all texts.
    """

    kept: tuple[tuple[PyTree, ...], ...]
    keys: dict[int, Place]
    column: Int[Array, ""]

    def add_key(self, at: Place) -> "Cache":
        """With the positions [batch, 1] of token `column`."""

        def write(slots: int, keys: Place) -> Place:
            slot = (0, self.column % slots)
            return Place(*(lax.dynamic_update_slice(p, new, slot) for p, new in zip(keys, at, strict=True)))

        return self._replace(keys={slots: write(slots, keys) for slots, keys in self.keys.items()})

    def past(self, stack: int, kind: int, kept: PyTree, layer: Int[Array, ""]) -> tuple[Past, Place]:
        """For layer number `layer` of that kind, whose stack keeps `kept` so far: its past, and whose its slots are."""
        slots = jax.tree.leaves(self.kept[stack][kind])[0].shape[2]
        return Past(kept, layer, self.column % slots), self.keys[slots]


def fit(columns: Array, slots: int, *, dim: int) -> Array:
    """What was kept of all columns of a text, as a cache of so many slots: column t in slot t modulo their number.

    Of more columns than slots the last ones stay; of fewer, zeros fill the rest.
    """
    count = columns.shape[dim]
    if count <= slots:
        return jnp.pad(columns, [(0, slots - count if i == dim else 0) for i in range(columns.ndim)])
    last = lax.slice_in_dim(columns, count - slots, count, axis=dim)
    return jnp.roll(last, (count - slots) % slots, axis=dim)
