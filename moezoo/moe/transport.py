"""Rows to the devices of a group, to each as many as a plan says: the one place that exchanges unevenly.

P devices; a table [P, P] has a row for each sender and a column for each receiver, and is the same on all of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.parallel.collectives import GATHERED_TOKENS, MeshAxes, vary, vary_like, varying_axes


class Transfer(NamedTuple):
    """Who sends what: `size` rows, from row `start` of the sender's array on, to row `land` of the receiver's on.

    What a device receives lies in the order of senders without gaps, what it sends in the order of receivers.
    """

    start: Int[Array, "senders receivers"]
    size: Int[Array, "senders receivers"]
    land: Int[Array, "senders receivers"]

    def back(self) -> "Transfer":
        """Every row to where it came from: also how the cotangents of received rows travel."""
        return Transfer(self.land.T, self.size.T, self.start.T)


def exchange(rows: Float[Array, "sent embed"], transfer: Transfer, room: int, axes: MeshAxes) -> Array:
    """The rows [room, embed] that this device receives over `axes`, zero where none lands.

    One `ragged_all_to_all` on a TPU or GPU. The CPU has no such collective: there everything is gathered and what is
    not for this device is left out, with the same result to the bit. Its gradient is the exchange back.
    """
    # What arrives differs by device, whatever JAX's own typing of the collective says; so must what goes into the rule.
    # Arguments vary alike: a custom gradient must return the types that it was given.
    everywhere = sorted(set(axes) | varying_axes(rows) | varying_axes(transfer.size))
    transfer = Transfer(*(vary(x, everywhere) for x in transfer))
    return checkpoint_name(_exchange(vary(rows, everywhere), transfer, room, axes), GATHERED_TOKENS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, transfer, room, axes):
    emulation = functools.partial(_emulate, room=room, axes=axes)
    real = functools.partial(_ragged_all_to_all, room=room, axes=axes)
    return lax.platform_dependent(rows, transfer, cpu=emulation, default=real)


def _exchange_forward(rows, transfer, room, axes):
    # The backward pass needs nothing of the rows but how many there were, which an empty array tells.
    return _exchange(rows, transfer, room, axes), (transfer, rows[:, :0])


def _exchange_backward(room, axes, residuals, cotangent):
    del room
    transfer, like = residuals
    return _exchange(cotangent, transfer.back(), like.shape[0], axes), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _ragged_all_to_all(rows: Array, transfer: Transfer, *, room: int, axes: MeshAxes) -> Array:
    me = lax.axis_index(axes)
    output = vary_like(jnp.zeros((room, *rows.shape[1:]), rows.dtype), rows)
    sent, received = transfer.size[me], transfer.size[:, me]
    return lax.ragged_all_to_all(rows, output, transfer.start[me], sent, transfer.land[me], received, axis_name=axes)


def _emulate(rows: Array, transfer: Transfer, *, room: int, axes: MeshAxes) -> Array:
    me = lax.axis_index(axes)
    everything = lax.all_gather(rows, axes)  # [P, sent, embed]
    slot = jnp.arange(room, dtype=jnp.int32)[:, None]
    first, size = transfer.land[None, :, me], transfer.size[None, :, me]
    lands = (slot >= first) & (slot < first + size)  # [room, P]
    index = (
        (jnp.arange(len(everything), dtype=jnp.int32) * rows.shape[0])[None]
        + transfer.start[None, :, me]
        + slot
        - first
    )
    index = jnp.where(lands, index, 0).sum(1)
    found = jnp.take(everything.reshape(-1, *rows.shape[1:]), index, axis=0, mode="clip")
    return jnp.where(lands.any(1, keepdims=True), found, 0)
