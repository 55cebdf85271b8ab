"""The contract of the configuration group `distributed`; each entry is a frozen dataclass in a file of its own."""

import abc
from typing import Any, ClassVar

from moezoo.errors import UserError


class Distributed(abc.ABC):
    """How the processes of a run find each other.

    `heartbeat_seconds`: after so long a silence a process counts as dead and the others end. `start_seconds`: how long
    processes wait for each other at the start. An entry whose users may set them declares both as fields.
    """

    name: ClassVar[str]  # its key in `DISTRIBUTED`
    is_several: ClassVar[bool] = True  # whether a run expects other processes
    heartbeat_seconds: int = 30
    start_seconds: int = 300

    def __post_init__(self):
        for field in ("heartbeat_seconds", "start_seconds"):
            if getattr(self, field) < 1:
                raise UserError(f"distributed.{field}={getattr(self, field)} must be at least 1")

    @property
    def address(self) -> str | None:
        """Where the processes meet, if the settings say it."""
        return None

    @abc.abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What `jax.distributed.initialize` needs to find the others. Raises `UserError` where a setting is missing."""
