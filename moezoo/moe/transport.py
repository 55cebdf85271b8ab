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


def exchange(rows: Float[Array, "sent embed"], transfer: Transfer, room: int, axes: MeshAxes) -> Array:
    """Return the rows [room, embed] that this device receives over `axes`; unused rows are 0.

    TPU and GPU run one `ragged_all_to_all`. XLA's CPU has no such collective: there all rows are gathered and each
    device picks its own, with the same result to the bit. The gradient is the exchange by `transfer.back()`.
    """
    # The result differs by device, but JAX types it like the output buffer. The gradient rule must return the types of
    # its arguments, so all of them vary over the same axes.
    everywhere = sorted(set(axes) | varying_axes(rows) | varying_axes(transfer.size))
    transfer = Transfer(*(vary(x, everywhere) for x in transfer))
    return checkpoint_name(_exchange(vary(rows, everywhere), transfer, room, axes), GATHERED_TOKENS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, transfer, room, axes):
    emulation = functools.partial(_emulate, room=room, axes=axes)
    real = functools.partial(_ragged_all_to_all, room=room, axes=axes)
    return lax.platform_dependent(rows, transfer, cpu=emulation, default=real)


def _exchange_forward(rows, transfer, room, axes):
    # The backward pass needs only the number of rows, which an empty array carries.
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
