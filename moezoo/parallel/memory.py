"""The refusal of what the devices of a mesh cannot hold."""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from moezoo.errors import UserError
from moezoo.host.machine import check_host, free_memory, in_gib, peak_of_process
from moezoo.parallel.mesh import has_started


def peak_bytes(mesh: Mesh) -> int:
    """Return the most bytes in use so far on a device of `mesh` in this process; on CPUs, in the process."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in here]
    return max(found) or peak_of_process()


def local_bytes(tree: PyTree, placements: PyTree) -> int:
    """Return the bytes per device that store `tree`, whose leaves are arrays or shapes."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(placements), strict=True)
    return sum(placement.local_size(x.shape) * np.dtype(x.dtype).itemsize for x, placement in leaves)


class Room(NamedTuple):
    """Memory that `devices` of this process share, in `bytes`; `owner` says whose it is."""

    devices: int
    bytes: int
    owner: str


def room_of(mesh: Mesh) -> Room | None:
    """Return the memory for the devices of `mesh` in this process: that of each, or what virtual CPU devices share.

    None where the devices do not report it.
    """
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if here[0].platform == "cpu":
        return Room(len(here), free_memory(), "this process")
    limits = [limit for device in here if (limit := (device.memory_stats() or {}).get("bytes_limit"))]
    return Room(1, min(limits), f"a {here[0].device_kind}") if limits else None


def check_devices(what: str, needed: int, mesh: Mesh | AbstractMesh | None, advice: str) -> None:
    """Raise `UserError` where the devices of a mesh do not have `needed` bytes each.

    Virtual CPU devices share the memory of the machine. Devices that this machine does not have, and those that do not
    report their memory, are not checked.

    Args:
        what: The start of the message.
        needed: A lower bound of the bytes per device.
        mesh: The devices; None for JAX's first.
        advice: The end of the message: what to do.
    """
    if isinstance(mesh, AbstractMesh) or not has_started():
        return
    here = jax.local_devices()
    devices = here[:1] if mesh is None else [device for device in mesh.devices.flat if device in here]
    if devices and devices[0].platform == "cpu":
        where = f" on {len(devices)} CPU devices" * (len(devices) > 1)
        check_host(what, needed * len(devices), advice, where)
        return
    for device in devices:
        have = (device.memory_stats() or {}).get("bytes_limit")
        if have is not None and needed > have:
            raise UserError(
                f"{what} needs at least {in_gib(needed)} of memory per device, and a {device.device_kind} has "
                f"{in_gib(have)}; {advice}"
            )
