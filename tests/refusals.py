"""Expecting errors of users, and tables of them."""

import contextlib
import inspect
from collections.abc import Iterator

import pytest

from moezoo.errors import UserError


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a `UserError` whose message `check_line` accepts."""
    with pytest.raises(UserError) as caught:
        yield
    check_line(str(caught.value), *parts)


def check_line(message: str, *parts: str) -> None:
    """Check that a message is one line that begins with the first of `parts` and contains the others in this order.

    In a part, " ... " stands for any text.
    """
    first, *others = " ... ".join(parts).split(" ... ")
    end = len(first)
    assert message.isprintable(), message
    assert message.startswith(first), message
    for part in others:
        assert part in message[end:], (part, message)
        end = message.index(part, end) + len(part)


def by_table(text: str) -> pytest.MarkDecorator:
    """Parametrise a test by the rows of a table: what is refused, and the message of the refusal.

    The first row names the arguments, and "=>" is between columns. A line that is indented goes on with the row above
    it, and one that begins with "# " is a comment. All cells of a row but the message name its test.
    """
    lines = inspect.cleandoc(text).replace("\n    ", " ").split("\n")
    names, *rows = [tuple(cell.strip() for cell in line.split("=>")) for line in lines if not line.startswith("# ")]
    return pytest.mark.parametrize(names, rows, ids=[" ".join(row[:-1]) for row in rows])
