"""Chats that a template refuses: counted, and named by place and reason."""

import collections
import re
import threading
from collections.abc import Mapping

from moezoo.data.chat_renderer import RenderError
from moezoo.errors import UserError

_NAMED = 3  # chats that are named with their reason, and reasons that are counted
_ENOUGH = 100  # refused chats after which a run ends that ends anyway
_MUCH = 0.1  # a larger share of the chats left out is warned of
_DROP = "correct them, or leave them out with data.refused=drop"


class Refusals:
    """Collects the chats that a template refuses or fails for, from any number of threads.

    A chat whose process has ended, perhaps for lack of memory, is left out also without `drop`.
    """

    def __init__(self, *, drop: bool):
        self._drop, self._lock = drop, threading.Lock()
        self._refused: dict[str, str] = {}
        self._ended: dict[str, str] = {}

    def add(self, where: str, error: RenderError) -> None:
        """Take note of a chat. Raises the error where it is a matter of the template alone."""
        if error.fault in ("unsafe", "syntax"):
            raise error
        with self._lock:
            (self._ended if error.fault == "ended" else self._refused)[where] = str(error)

    def check(self, chats: int | None = None) -> None:
        """Raise `UserError` if chats were refused that are not to be left out, or all chats.

        `chats` is the number of all chats, when they are read; None, before that, waits for many refused ones.
        """
        refused = len(self._refused)
        if (refused and refused == chats) or (not self._drop and refused >= (_ENOUGH if chats is None else 1)):
            raise UserError(f"{self._describe(chats)}; {'correct them' if self._drop else _DROP}")

    def notes(self, chats: int) -> list[str]:
        """Return lines about what is left out."""
        lost = [f"{where} is left out: {why}" for where, why in _in_order(self._ended).items()]
        return [f"left out: {self._describe(chats)}", *lost] if self._refused else lost

    def warnings(self, chats: int) -> list[str]:
        """Return a line where many chats are left out."""
        refused = len(self._refused)
        if refused <= _MUCH * chats:
            return []
        return [f"{refused:,} of {chats:,} chats ({refused / chats:.0%}) are left out: the template refuses them"]

    def _describe(self, chats: int | None) -> str:
        """Return the first chats with their reasons and, of several, how many there are for which reasons."""
        with self._lock:
            found = _in_order(self._refused)
        first = "; ".join(f"{where}: {why}" for where, why in list(found.items())[:_NAMED])
        of = " or more" if chats is None else f" of {chats:,}"
        if len(found) == 1:
            return f"{first} (1{of} chats)"
        reasons = collections.Counter(found.values()).most_common()
        shown = [f"{number:,} by {why}" for why, number in reasons[:_NAMED]]
        rest = sum(number for _, number in reasons[_NAMED:])
        shown += [f"{rest:,} for other reasons"] * bool(rest)
        return f"{first}; in all {len(found):,}{of} chats: {', '.join(shown)}"


def _in_order(found: Mapping[str, str]) -> dict[str, str]:
    """Return what is said of places, in the order in which they are read: numbers in them count as such."""

    def key(where: str) -> list[str | int]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", where)]

    return dict(sorted(found.items(), key=lambda item: key(item[0])))
