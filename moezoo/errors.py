"""The exception for users' mistakes, the hint at the nearest valid name, and two common checks."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """A mistake in what the user asked for.

    Its message is one line: the key or value as the user typed it, what was expected and found, and what to do.
    Commands print it without a traceback and exit with code 2.
    """


def nearest(name: str, options: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the most similar of `options`, or all of them."""
    valid = sorted(options)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(valid)}"


def check_positive(section: str, settings: Any, *names: str) -> None:
    """Raise `UserError` unless these numbers of `settings` are greater than 0; `section` is its key for the user."""
    for name in names:
        if getattr(settings, name) <= 0:
            raise UserError(f"{section}.{name}={getattr(settings, name)} must be greater than 0")


def check_not_negative(section: str, settings: Any, *names: str) -> None:
    """Raise `UserError` if one of these numbers of `settings` is below 0; `section` is its key for the user."""
    for name in names:
        if getattr(settings, name) < 0:
            raise UserError(f"{section}.{name}={getattr(settings, name)} must not be negative; 0 turns it off")


def check_numbers(section: str, settings: Any) -> None:
    """Raise `UserError` where a number of the dataclass `settings` is not finite, or an integer exceeds int32."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, numbers.Real) and not math.isfinite(value):
            raise UserError(f"{section}.{field.name}={value} must be a finite number")
        if isinstance(value, numbers.Integral) and value >= 2**31:
            raise UserError(f"{section}.{field.name}={value} must be at most {2**31 - 1}, the largest int32")
