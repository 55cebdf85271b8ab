"""A run of one process."""

import dataclasses
from typing import ClassVar

from moezoo.parallel.distributed.base import Distributed


@dataclasses.dataclass(frozen=True)
class Alone(Distributed):
    """One process: the entry `distributed=none`."""

    name: ClassVar[str] = "none"
    is_several: ClassVar[bool] = False
