"""Processes that the user numbers."""

import dataclasses
from typing import Annotated, Any, ClassVar

from moezoo.errors import UserError
from moezoo.parallel.distributed.base import Distributed
from moezoo.typed import AtMost, Count


@dataclasses.dataclass(frozen=True)
class Manual(Distributed):
    """Processes that the user starts with their numbers: the entry `distributed=manual`.

    Attributes:
        coordinator: The address where they meet, HOST:PORT on process 0.
        processes: The number of processes.
        process: The number of this process, from 0.

    Raises:
        UserError: The address is not HOST:PORT, or `process` is not below `processes`.
    """

    name: ClassVar[str] = "manual"
    coordinator: str | None = None
    processes: int | None = None
    process: Annotated[Count, AtMost("processes", strict=True)] | None = None
    heartbeat_seconds: int = 30
    start_seconds: int = 300

    def __post_init__(self):
        super().__post_init__()
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise UserError(f"distributed.coordinator={self.coordinator} must be HOST:PORT, such as localhost:8476")

    def arguments(self) -> dict[str, Any]:
        """Return address, number of processes and number of this process."""
        for field, example in (("coordinator", "HOST:PORT"), ("processes", "2"), ("process", "0")):
            if getattr(self, field) is None:
                raise UserError(f"distributed=manual needs distributed.{field}; write distributed.{field}={example}")
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.processes,
            "process_id": self.process,
            "cluster_detection_method": "deactivate",
        }
