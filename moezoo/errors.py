"""The exception for users' mistakes, hints, places and lines for messages, and the check of an argument's class."""

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """A mistake in what the user asked for.

    Its message is one line: the key or value as the user typed it, what was expected and found, and what to do.
    Commands print it without a traceback and exit with code 2.
    """


def nearest(name: str, options: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the most similar of `options`, or all of them."""
    valid = sorted({*options})
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(valid)}"


@contextlib.contextmanager
def locating(where: str) -> Iterator[None]:
    """Let a mistake in the block begin with its place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def last_words(stderr: str) -> str:
    """Return the line of a crashed process's stderr that names the reason, or else the last one; empty for none."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = (line for line in lines if line.startswith(("F0", "Check failed", "Fatal")))
    return next(said, lines[-1] if lines else "")[:300]


def describe_end(code: int) -> str:
    """Return how a process ended whose `subprocess` return code, below 0 for a signal, is not 0."""
    if code >= 0:
        return f"ended with code {code}"
    return f"ended by {signal.Signals(-code).name}{', perhaps because memory ran out' * (code == -signal.SIGKILL)}"


def check_type(name: str, value: Any, kind: type, remedy: str) -> None:
    """Raise `UserError` unless `value`, the argument `name` of a public function, is a `kind`."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {describe_class(value)}, expected {_with_article(kind)}; {remedy}")


def describe_class(value: Any) -> str:
    """Return the class of `value` in words: "a dict", "None", or "the class X" for a class itself."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else _with_article(type(value))


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeioAEIO' else 'a'} {kind.__name__}"
