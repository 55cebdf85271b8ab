"""The cache of generation: what layers keep of earlier tokens.

The cache is a ring buffer: token t of a text goes to slot t modulo the number of slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from moezoo.parallel.context_parallel import Place


class Past(NamedTuple):
    """The cache as one layer sees it: what index `layer` of arrays [layer, batch, slots, ...] holds.

    The next token belongs in slot `slot`.
    """

    kept: PyTree
    layer: Int[Array, ""]
    slot: Int[Array, ""]

    def with_token(self, fresh: PyTree) -> PyTree:
        """Return the layer's arrays [batch, slots, ...] with a token's `fresh` [batch, 1, ...] in its slot.

        The cache itself stays as it is: if every layer wrote into it, XLA would copy all of it for every layer.
        """

        def one(kept: Array, token: Array) -> Array:
            mine = lax.dynamic_index_in_dim(kept, self.layer, keepdims=False)
            here = lax.broadcasted_iota(jnp.int32, (1, kept.shape[2], *(1,) * (kept.ndim - 3)), 1) == self.slot
            return jnp.where(here, token.astype(kept.dtype), mine)

        return jax.tree.map(one, self.kept, fresh)


class Cache(NamedTuple):
    """What the blocks of a model keep of the tokens before `column`.

    | field | meaning |
    |---|---|
    | `kept[stack][kind]` | arrays [layer, batch, slots, ...] |
    | `keys[slots]` | for each number of slots, the place of the token in each slot; segment 0 in empty slots |
    | `column` | index of the token that is read next, the same for all texts |
    """

    kept: tuple[tuple[PyTree, ...], ...]
    keys: dict[int, Place]
    column: Int[Array, ""]

    def add_key(self, at: Place) -> "Cache":
        """Return the cache with the place [batch, 1] of token `column`."""

        def write(slots: int, keys: Place) -> Place:
            slot = (0, self.column % slots)
            return Place(*(lax.dynamic_update_slice(p, new, slot) for p, new in zip(keys, at, strict=True)))

        return self._replace(keys={slots: write(slots, keys) for slots, keys in self.keys.items()})

    def past(self, stack: int, kind: int, layer: Int[Array, ""]) -> tuple[Past, Place]:
        """Return the past of one layer and the places of its slots."""
        kept = self.kept[stack][kind]
        slots = jax.tree.leaves(kept)[0].shape[2]
        return Past(kept, layer, self.column % slots), self.keys[slots]

    def append(self, fresh: tuple[tuple[PyTree, ...], ...]) -> "Cache":
        """Return the cache with token `column` in it; `fresh[stack][kind]` has arrays [layer, batch, 1, ...]."""

        def write(kept: Array, token: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(kept, token.astype(kept.dtype), self.column % kept.shape[2], 2)

        return self._replace(kept=jax.tree.map(write, self.kept, fresh), column=self.column + 1)


def fit(columns: Array, slots: int, *, dim: int) -> Array:
    """Arrange what was kept of all columns of a text as a cache: column t in slot t modulo `slots`.

    With more columns than slots, the last ones stay. With fewer, zeros fill the rest.
    """
    count = columns.shape[dim]
    if count <= slots:
        return jnp.pad(columns, [(0, slots - count if i == dim else 0) for i in range(columns.ndim)])
    last = lax.slice_in_dim(columns, count - slots, count, axis=dim)
    return jnp.roll(last, (count - slots) % slots, axis=dim)
