"""Arrays of a model while their numbers are read: which boxes of them this process holds, and where these are written.

Numbers are written where they stay, so that few MB are in memory besides the arrays.
"""

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from moezoo.hub.regions import Box

_ALIGNED = 64  # JAX takes over an array in host memory that begins at a multiple of so many bytes, without a copy.


class Target(Protocol):
    """The numbers of one box of an array, for all devices of this process that hold it."""

    def write(self, values: np.ndarray, at: tuple[int, ...]) -> bool:
        """Write `values`, which have the last dimensions of the box, at these indices; return whether they fit.

        Values that are finite and too large for the dtype do not fit. Threads may write different parts at once.
        """
        ...


class Boxes(NamedTuple):
    """An array: its shape, and the boxes of it that devices of this process hold, each once, with their numbers."""

    shape: tuple[int, ...]
    boxes: Mapping[Box, Target]


class OnHost:
    """Numbers in the host's memory, which CPU devices take over. No program may donate it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: Sequence[Any] = ()):
        raw = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNED, np.uint8)
        start = -raw.ctypes.data % _ALIGNED
        self.numbers = raw[start : len(raw) - _ALIGNED + start].view(dtype).reshape(shape)
        self._devices = devices

    def write(self, values: np.ndarray, at: tuple[int, ...]) -> bool:
        """Write into the memory."""
        inner = len(at) - values.ndim
        where = (*at[:inner], *(slice(i, i + n) for i, n in zip(at[inner:], values.shape, strict=True)))
        target = self.numbers[where]
        if self._devices and not values.flags.c_contiguous and values.dtype != np.float64:  # JAX has no float64
            values = np.asarray(jax.device_put(values, self._devices[0]))  # XLA transposes faster than NumPy
        target[...] = values
        return np.can_cast(values.dtype, target.dtype) or are_finite(target)

    def finish(self) -> list[jax.Array]:
        """Give the memory to the devices, which share it: nothing writes to it any more."""
        return [jax.device_put(self.numbers, device) for device in self._devices]


class _OnDevices:
    """Numbers on other devices: each piece is sent, and put into an array by a program that donates it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: Sequence[Any]):
        self._dtype, self._lock = dtype, threading.Lock()
        empty = functools.partial(jnp.empty, shape, dtype)
        self._arrays = [jax.jit(empty, out_shardings=SingleDeviceSharding(device))() for device in devices]

    def write(self, values: np.ndarray, at: tuple[int, ...]) -> bool:
        """Send the piece and wait for it, so that few are in memory."""
        piece = np.ascontiguousarray(values.astype(self._dtype, copy=False))
        whole = piece.reshape((1,) * (len(at) - piece.ndim) + piece.shape)
        with self._lock:
            for i, array in enumerate(self._arrays):
                self._arrays[i] = _put(array, jax.device_put(whole, array.sharding), [np.int32(n) for n in at])
            jax.block_until_ready(self._arrays)
        return np.can_cast(values.dtype, piece.dtype) or are_finite(piece)

    def finish(self) -> list[jax.Array]:
        """Return the array of each device."""
        return self._arrays


@functools.partial(jax.jit, donate_argnums=0)
def _put(array: jax.Array, piece: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    return lax.dynamic_update_slice(array, piece, at)


class Arriving:
    """An array of the model, from its shape and layout to its numbers."""

    def __init__(self, shape: jax.ShapeDtypeStruct, sharding: Sharding):
        self._shape, self._sharding, self._targets = shape, sharding, dict[Box, OnHost | _OnDevices]()
        self._devices: dict[Box, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
            cut = zip(index or (), shape.shape, strict=True)
            self._devices.setdefault(tuple(part.indices(size)[:2] for part, size in cut), []).append(device)

    @property
    def is_on_host(self) -> bool:
        """Whether its devices are CPUs."""
        return all(device.platform == "cpu" for device in self._sharding.device_set)

    @property
    def size_per_device(self) -> int:
        """The bytes that a device holds."""
        return math.prod(self._sharding.shard_shape(self._shape.shape)) * self._shape.dtype.itemsize

    @property
    def size(self) -> int:
        """The bytes that CPU devices of this process hold together; those that hold the same box share its memory."""
        return self.size_per_device * len(self._devices)

    @property
    def to_draw(self) -> jax.ShapeDtypeStruct:
        """Its shape and layout, where its numbers are not in the folder."""
        return jax.ShapeDtypeStruct(self._shape.shape, self._shape.dtype, sharding=self._sharding)

    def begin(self) -> Boxes:
        """Make room for the numbers, and return where they go."""
        kind = OnHost if self.is_on_host else _OnDevices
        shape = self._sharding.shard_shape(self._shape.shape)
        self._targets = {box: kind(shape, self._shape.dtype, devices) for box, devices in self._devices.items()}
        return Boxes(self._shape.shape, self._targets)

    def finish(self) -> jax.Array:
        """Return the array."""
        parts = [array for target in self._targets.values() for array in target.finish()]
        return jax.make_array_from_single_device_arrays(self._shape.shape, self._sharding, parts)


def are_finite(numbers: np.ndarray) -> bool:
    """Return whether all numbers are finite."""
    if numbers.dtype.name == "bfloat16":  # NumPy has no fast loop for it.
        return bool(((numbers.view(np.uint16) & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(numbers).all())
