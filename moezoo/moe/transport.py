"""The exchange of uneven numbers of rows between the devices of a group. No other file does this.

P is the number of devices. A table [P, P] has a row per sender and a column per receiver, the same on all devices.
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
    """The plan of an exchange: for each pair of devices, `size` rows from row `start` of the sender's array are written
    from row `land` of the receiver's array on.

    A device stores rows to send by receiver, and received rows by sender without gaps.
    """

    start: Int[Array, "senders receivers"]
    size: Int[Array, "senders receivers"]
    land: Int[Array, "senders receivers"]

    def back(self) -> "Transfer":
        """Return the plan that moves every row back. Cotangents of received rows travel by it."""
        return Transfer(self.land.T, self.size.T, self.start.T)


def exchange(rows: Float[Array, "sent embed"], transfer: Transfer, room: int, most: int, axes: MeshAxes) -> Array:
    """Return the rows [room, embed] that this device receives over `axes`; unused rows are 0.

    TPU and GPU run one `ragged_all_to_all`. XLA's CPU has no such collective: there every device sends `most` rows to
    every other by an `all_to_all`, with the same result to the bit. The gradient is the exchange by `transfer.back()`.

    Args:
        rows: The rows to send.
        transfer: The plan of the exchange.
        room: The number of rows of the result.
        most: At least the largest of `transfer.size`.
        axes: The mesh axes of the group.
    """
    # The result differs by device, but JAX types it like the output buffer. The gradient rule must return the types of
    # its arguments, so all of them vary over the same axes.
    everywhere = sorted(set(axes) | varying_axes(rows) | varying_axes(transfer.size))
    transfer = Transfer(*(vary(x, everywhere) for x in transfer))
    return checkpoint_name(_exchange(vary(rows, everywhere), transfer, room, most, axes), GATHERED_TOKENS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _exchange(rows, transfer, room, most, axes):
    emulation = functools.partial(_emulate, room=room, most=most, axes=axes)
    real = functools.partial(_ragged_all_to_all, room=room, axes=axes)
    return lax.platform_dependent(rows, transfer, cpu=emulation, default=real)


def _exchange_forward(rows, transfer, room, most, axes):
    # The backward pass needs only the number of rows, which an empty array carries.
    return _exchange(rows, transfer, room, most, axes), (transfer, rows[:, :0])


def _exchange_backward(room, most, axes, residuals, cotangent):
    del room
    transfer, like = residuals
    return _exchange(cotangent, transfer.back(), like.shape[0], most, axes), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _ragged_all_to_all(rows: Array, transfer: Transfer, *, room: int, axes: MeshAxes) -> Array:
    me = lax.axis_index(axes)
    output = vary_like(jnp.zeros((room, *rows.shape[1:]), rows.dtype), rows)
    sent, received = transfer.size[me], transfer.size[:, me]
    return lax.ragged_all_to_all(rows, output, transfer.start[me], sent, transfer.land[me], received, axis_name=axes)


def _emulate(rows: Array, transfer: Transfer, *, room: int, most: int, axes: MeshAxes) -> Array:
    me = lax.axis_index(axes)
    # Rows beyond the size of a piece travel too, but no device picks them.
    pieces = transfer.start[me][:, None] + jnp.arange(most, dtype=jnp.int32)[None]  # [P, most]
    sent = jnp.take(rows, pieces.reshape(-1), axis=0, mode="clip")
    received = lax.all_to_all(sent, axes, 0, 0, tiled=True)
    slot = jnp.arange(room, dtype=jnp.int32)[:, None]
    first, size = transfer.land[None, :, me], transfer.size[None, :, me]
    lands = (slot >= first) & (slot < first + size)  # [room, P]
    index = (jnp.arange(len(pieces), dtype=jnp.int32) * most)[None] + slot - first
    index = jnp.where(lands, index, 0).sum(1)
    return jnp.where(lands.any(1, keepdims=True), jnp.take(received, index, axis=0, mode="clip"), 0)
