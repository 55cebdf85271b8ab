"""Read a part of an array onto the host of one process, from the devices of any process."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from moezoo.errors import UserError
from moezoo.parallel.collectives import MeshAxes, gather, psum


def is_here(array: Any) -> bool:
    """Return whether every process that uses `array` can read it without the others.

    The answer is the same on all of them: where it is False, reading takes collectives, in which all take part.
    """
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def fetch(array: Any, index: tuple[int, ...], process: int) -> np.ndarray | None:
    """Return `array[index]` on the host of `process`, and None in the others.

    No more than this part is moved. If the array lies on devices of several processes, all of them must make the same
    calls in the same order. The part becomes whole on every device for a moment: by one psum over all mesh axes that
    split indexed dimensions, and by one all-gather for each other dimension that is split.

    Args:
        array: An array of JAX or NumPy, or anything that is indexed like one.
        index: A number for each of the leading dimensions that are indexed.
        process: The number of the process.

    Raises:
        UserError: The array lies on devices of other processes, and on no mesh.
    """
    mine = process == jax.process_index()
    if not isinstance(array, jax.Array):
        return np.asarray(array[index]) if mine else None
    if is_here(array):
        return _read(array, index) if mine else None
    if not isinstance(array.sharding, NamedSharding):
        raise UserError(
            f"an array {array.shape} lies on devices of other processes and on no mesh; lay the model out with "
            "moezoo.place first"
        )
    part = _whole_part(array.sharding, array.ndim, len(index))(array, np.asarray(index, np.int32))
    part.block_until_ready()  # with collectives of the next part under way too, processes on CPUs can wait forever
    return np.asarray(part.addressable_data(0)).view(array.dtype) if mine else None


def _read(array: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Return `array[index]` from the devices of this process, which have all of it."""
    if array.is_fully_replicated:
        return _read_block(array.addressable_data(0), index)
    whole = np.empty(array.shape[len(index) :], array.dtype)
    for shard in array.addressable_shards:
        starts = [span.start or 0 for span in shard.index]
        # `index` has fewer dimensions than the array.
        own = tuple(number - start for number, start in zip(index, starts, strict=False))
        if shard.replica_id == 0 and all(0 <= i < size for i, size in zip(own, shard.data.shape, strict=False)):
            whole[shard.index[len(index) :]] = _read_block(shard.data, own)
    return whole


def _read_block(block: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Return `block[index]` of an array on one device."""
    (device,) = block.devices()
    # The memory of a CPU is the host's: NumPy reads it without a copy, and without a program per device and shape.
    return np.asarray(block)[index] if device.platform == "cpu" else np.asarray(block[index])


@functools.cache
def _whole_part(sharding: NamedSharding, ndim: int, indices: int) -> Any:
    """Return the program that makes one part whole on every device, as unsigned integers of the same bits."""
    names = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    split: list[MeshAxes] = [*names, *[()] * (ndim - len(names))]

    def part(block: Shaped[Array, "..."], at: Int[Array, " indices"]) -> Shaped[Array, "..."]:
        # Bits and not numbers: the sum of a negative zero and the zeros of other devices would be positive.
        bits = lax.bitcast_convert_type(block, jnp.dtype(f"uint{8 * block.dtype.itemsize}"))
        searched: MeshAxes = ()
        for i, axes in enumerate(split[:indices]):
            size = bits.shape[0]
            own = at[i] - lax.axis_index(axes) * size if axes else at[i]
            bits = lax.dynamic_index_in_dim(bits, jnp.clip(own, 0, size - 1), keepdims=False)
            if axes:
                bits = jnp.where((own >= 0) & (own < size), bits, jnp.zeros((), bits.dtype))
                searched += axes
        bits = psum(bits, searched)
        for dim, axes in reversed(list(enumerate(split[indices:]))):
            bits = gather(bits, axes, dim, tokens=())
        return bits

    return jax.jit(
        jax.shard_map(part, mesh=sharding.mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=PartitionSpec())
    )
