"""What layers keep of the tokens so far, so that the next one does not compute them again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree


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


def fit(columns: Array, slots: int, *, dim: int) -> Array:
    """What was kept of all columns of a text, as a cache of so many slots: column t in slot t modulo their number.

    Of more columns than slots the last ones stay; of fewer, zeros fill the rest.
    """
    count = columns.shape[dim]
    if count <= slots:
        return jnp.pad(columns, [(0, slots - count if i == dim else 0) for i in range(columns.ndim)])
    last = lax.slice_in_dim(columns, count - slots, count, axis=dim)
    return jnp.roll(last, (count - slots) % slots, axis=dim)
