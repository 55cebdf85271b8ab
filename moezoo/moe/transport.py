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

from moezoo.kernels.permute import sum_rows
from moezoo.parallel.collectives import GATHERED_TOKENS, MeshAxes, vary, vary_like, varying_axes


class Transfer(NamedTuple):
    """The plan of an exchange: for each pair of devices, `size` rows from row `start` of the sender's array are written
    from row `land` of the receiver's array on.
    """

    start: Int[Array, "senders receivers"]
    size: Int[Array, "senders receivers"]
    land: Int[Array, "senders receivers"]

    def back(self) -> "Transfer":
        """Return the plan that moves every row back."""
        return Transfer(self.land.T, self.size.T, self.start.T)


class Route(NamedTuple):
    """What a device sends of an array [N, d], and where.

    Attributes:
        source: The row of the array that each sent row holds; N for none. Rows are ordered by receiver.
        row: The sent rows that hold each row of the array; their number for none.
        transfer: The plan of the exchange.
    """

    source: Int[Array, " sent"]
    row: Int[Array, "n k"]
    transfer: Transfer


def send(x: Float[Array, "n embed"], route: Route, room: int, most: int, axes: MeshAxes) -> Float[Array, "room embed"]:
    """Return the rows [room, d] that this device receives over `axes`; unused rows are 0. `collect` is the transpose.

    TPU and GPU run one `ragged_all_to_all`. XLA's CPU has no such collective: there every device sends `most` rows to
    every other by an `all_to_all`, with the same result to the bit.

    Args:
        x: The array whose rows are sent.
        route: What is sent, and where.
        room: The number of rows of the result. With P x `most` of them, device i's rows must land from i x `most` on.
        most: At least the largest of `route.transfer.size`.
        axes: The mesh axes of the group.
    """
    x, route = _alike(x, route, axes)
    return checkpoint_name(_send(room, most, axes, x, route), GATHERED_TOKENS)


def collect(rows: Float[Array, "room embed"], route: Route, most: int, axes: MeshAxes) -> Float[Array, "n embed"]:
    """Return received rows, and sum those of each row of the array that was sent, in the order of `route.row`.

    Arguments as for `send`, whose transpose this is.
    """
    rows, route = _alike(rows, route, axes)
    return checkpoint_name(_collect(most, axes, rows, route), GATHERED_TOKENS)


def _alike(x: Array, route: Route, axes: MeshAxes) -> tuple[Array, Route]:
    """Cast both to vary over the same axes, as a gradient has the type of its argument."""
    everywhere = sorted(frozenset(axes).union(*(varying_axes(leaf) for leaf in jax.tree.leaves((x, route)))))
    return jax.tree.map(lambda leaf: vary(leaf, everywhere), (x, route))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _send(room, most, axes, x, route):
    emulation = functools.partial(_emulate_send, room, most, axes)
    return lax.platform_dependent(x, route, cpu=emulation, default=functools.partial(_really_send, room, axes))


def _send_forward(room, most, axes, x, route):
    return _send(room, most, axes, x, route), route


def _send_backward(room, most, axes, route, cotangent):
    del room
    return _collect(most, axes, cotangent, route), None


_send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _collect(most, axes, rows, route):
    emulation = functools.partial(_emulate_collect, most, axes)
    return lax.platform_dependent(rows, route, cpu=emulation, default=functools.partial(_really_collect, axes))


def _collect_forward(most, axes, rows, route):
    # The backward pass needs only the number of rows, which an empty array carries.
    return _collect(most, axes, rows, route), (route, rows[:, :0])


def _collect_backward(most, axes, residuals, cotangent):
    route, like = residuals
    return _send(like.shape[0], most, axes, cotangent, route), None


_collect.defvjp(_collect_forward, _collect_backward)


def _really_send(room: int, axes: MeshAxes, x: Array, route: Route) -> Array:
    return _ragged_all_to_all(jnp.take(x, route.source, axis=0, mode="clip"), route.transfer, room, axes)


def _really_collect(axes: MeshAxes, rows: Array, route: Route) -> Array:
    back = _ragged_all_to_all(rows, route.transfer.back(), route.source.shape[0], axes)
    return sum_rows(back, route.row, None)


def _ragged_all_to_all(rows: Array, transfer: Transfer, room: int, axes: MeshAxes) -> Array:
    me = lax.axis_index(axes)
    # The result differs by device, but JAX types it like the output buffer.
    output = vary_like(jnp.zeros((room, *rows.shape[1:]), rows.dtype), rows)
    sent, received = transfer.size[me], transfer.size[:, me]
    return lax.ragged_all_to_all(rows, output, transfer.start[me], sent, transfer.land[me], received, axis_name=axes)


# The emulation cuts what a device sends and receives into one piece of `most` rows per device.


def _emulate_send(room: int, most: int, axes: MeshAxes, x: Array, route: Route) -> Array:
    me = lax.axis_index(axes)
    start, size, land = route.transfer
    index = jnp.arange(most, dtype=jnp.int32)[None]
    source = jnp.take(route.source, start[me][:, None] + index, mode="clip")  # [P, most]
    source = jnp.where(index < size[me][:, None], source, x.shape[0])
    pieces = jnp.take(x, source.reshape(-1), axis=0, mode="fill", fill_value=0)
    received = lax.all_to_all(pieces, axes, 0, 0, tiled=True)
    if len(received) == room:
        return received
    return jnp.take(received, _place(land[:, me], size[:, me], room, most), axis=0, mode="fill", fill_value=0)


def _emulate_collect(most: int, axes: MeshAxes, rows: Array, route: Route) -> Array:
    me = lax.axis_index(axes)
    start, size, land = route.transfer.back()
    if len(rows) != len(size) * most:
        # Rows beyond the size of a piece travel too, but no device picks them.
        index = start[me][:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        rows = jnp.take(rows, index.reshape(-1), axis=0, mode="clip")
    received = lax.all_to_all(rows, axes, 0, 0, tiled=True)
    place = _place(land[:, me], size[:, me], route.source.shape[0], most)
    return sum_rows(received, jnp.take(place, route.row, mode="fill", fill_value=len(received)), None)


def _place(first: Int[Array, " p"], size: Int[Array, " p"], count: int, most: int) -> Int[Array, " count"]:
    """Return the index of each of `count` rows in the pieces, P x `most` for none; piece i begins at `first[i]`."""
    row = jnp.arange(count, dtype=jnp.int32)[:, None] - first[None]  # [count, P]
    inside = (row >= 0) & (row < size[None])
    place = jnp.where(inside, jnp.arange(len(first), dtype=jnp.int32)[None] * most + row, 0).sum(1)
    return jnp.where(inside.any(1), place, len(first) * most)
