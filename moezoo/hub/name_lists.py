"""Many names of tensors in one line of a message."""

from collections.abc import Sequence

from moezoo.convert import show

_MOST_NAMES = 60  # in a message; a layer of any family has fewer


def count(names: Sequence[str]) -> str:
    """Return the beginning of a sentence about so many tensors."""
    return f"{len(names)} tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def list_names(names: Sequence[str]) -> str:
    """Return names in one line. Names that differ only by layer and expert numbers become one, with their count."""
    alike: dict[tuple[str | None, ...], list[list[str]]] = {}
    for name in sorted(names):
        parts = name.split(".")
        is_number = [part.isdecimal() and len(part) < 10 for part in parts]
        pattern = tuple(None if number else part for number, part in zip(is_number, parts, strict=True))
        alike.setdefault(pattern, []).append(parts)
    shown = []
    for pattern, group in alike.items():
        columns = zip(pattern, zip(*group, strict=True), strict=True)
        text = ".".join(_range(column) if part is None else part for part, column in columns)
        shown.append(show(text)[:200] + (f" ({len(group)})" if len(group) > 1 else ""))
    more = [f"and {len(shown) - _MOST_NAMES} more"] if len(shown) > _MOST_NAMES else []
    return ", ".join(shown[:_MOST_NAMES] + more)


def _range(numbers: Sequence[str]) -> str:
    lowest, highest = min(map(int, numbers)), max(map(int, numbers))
    return f"{lowest}" if lowest == highest else f"{lowest}-{highest}"
