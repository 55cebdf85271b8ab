"""Mesh axes, their sizes, and the devices behind them."""

import dataclasses

AXES = ("data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Size of each mesh axis; one of them may be -1: all devices that the others leave."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
