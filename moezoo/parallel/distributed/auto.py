"""Processes that a cluster has started and describes."""

import dataclasses
from typing import ClassVar

from moezoo.parallel.distributed.base import Distributed


@dataclasses.dataclass(frozen=True)
class Auto(Distributed):
    """The processes of a TPU slice, Slurm, Open MPI or Kubernetes: the entry `distributed=auto`."""

    name: ClassVar[str] = "auto"
    heartbeat_seconds: int = 30
    start_seconds: int = 300
