"""The contract of the configuration group `distributed`. Each entry is a frozen dataclass in a separate file."""

from typing import Any, ClassVar

from moezoo.typed import Size, check_fields


class Distributed:
    """How the processes of a run find each other.

    An entry that lets users set the two numbers of seconds declares both as fields.

    Attributes:
        name: The entry's key in `DISTRIBUTED`.
        is_several: Whether a run expects other processes.
        coordinator: The address where the processes meet, HOST:PORT; None if the settings do not contain it.
        heartbeat_seconds: After this time of silence a process counts as dead, and the others end.
        start_seconds: How long processes wait for each other at the start.

    Raises:
        UserError: A setting has a wrong type, or a number of seconds is less than 1.
    """

    name: ClassVar[str]
    is_several: ClassVar[bool] = True
    coordinator: str | None = None
    heartbeat_seconds: Size = 30
    start_seconds: Size = 300

    def __post_init__(self):
        check_fields("distributed", self)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `jax.distributed.initialize` that describe the other processes.

        By default there are none: JAX reads the cluster's environment.

        Raises:
            UserError: A setting is missing.
        """
        return {}
