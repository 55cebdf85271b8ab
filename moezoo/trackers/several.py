"""Several trackers at once: `tracker=[tensorboard,wandb]`."""

import dataclasses
from collections.abc import Mapping

from moezoo.errors import UserError, check_type
from moezoo.trackers.base import RunStart, Tracker, Writer


@dataclasses.dataclass(frozen=True)
class Several(Tracker):
    """The trackers `members` by name. Each has its own thread, so that one that fails stops no other."""

    members: Mapping[str, Tracker] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        for name, member in self.members.items():
            check_type(f"tracker.members.{name}", member, Tracker, "write WandB() or another of moezoo.trackers")

    def check(self) -> None:
        """Check each of them."""
        if not self.members:
            raise UserError("tracker=several has no members; write tracker=[tensorboard,wandb], or tracker=none")
        for member in self.members.values():
            member.check()

    def start(self, run: RunStart) -> Writer:
        """Raise: only its members start."""
        raise NotImplementedError

    def active(self) -> Mapping[str, Tracker]:
        """Return the members."""
        return self.members
