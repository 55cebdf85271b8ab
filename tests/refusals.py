"""Expecting errors of users."""

import contextlib
from collections.abc import Iterator

import pytest

from moezoo.errors import UserError


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a `UserError` of one line that begins with the first of `parts` and contains the others in this order."""
    with pytest.raises(UserError) as caught:
        yield
    message, end = str(caught.value), 0
    assert "\n" not in message
    assert message.startswith(parts[0]), message
    for part in parts:
        assert part in message[end:], (part, message)
        end = message.index(part, end) + len(part)
