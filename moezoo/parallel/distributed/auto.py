"""Processes that a cluster describes."""

import dataclasses
from typing import Any, ClassVar

from moezoo.parallel.distributed.base import Distributed


@dataclasses.dataclass(frozen=True)
class Auto(Distributed):
    """As many as whoever started them says: a TPU slice, Slurm, Open MPI or Kubernetes."""

    name: ClassVar[str] = "auto"
    heartbeat_seconds: int = 30
    start_seconds: int = 300

    def arguments(self) -> dict[str, Any]:
        """None are needed: JAX asks the cluster."""
        return {}
