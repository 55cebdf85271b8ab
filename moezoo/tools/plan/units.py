"""Bytes and seconds as a user reads them, in the unit that suits them."""

from collections.abc import Sequence

BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
SECONDS = (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def suiting(number: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest of `units` of which there is at least one, otherwise the smallest: its name and its size."""
    return next((unit for unit in units if number >= unit[1]), units[-1])


def show_bytes(number: float) -> str:
    """Return a number of bytes, such as "72.8 GiB"."""
    name, one = suiting(number, BYTES)
    return f"{number / one:,.1f} {name}"


def show_seconds(number: float) -> str:
    """Return a number of seconds in four digits, such as "998.6 ms"."""
    name, one = suiting(number, SECONDS)
    return f"{number / one:,.0f} {name}" if number >= 1000 else f"{number / one:.4g} {name}"
