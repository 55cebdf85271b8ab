"""The one exception for mistakes a user can make, and the nearest-name hint that goes with it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user asked for.

    Its message is one line: what was wrong, what was expected and what was found, what to do. Scripts print it
    without a traceback and exit with code 2.
    """


def nearest(name: str, options: Iterable[str]) -> str:
    """A closing hint for an unknown `name`: the nearest valid one where one is near, else all of them."""
    valid = sorted(options)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(valid)}"
