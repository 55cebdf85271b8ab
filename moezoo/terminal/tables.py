"""Tables as lines of text. All commands and benchmarks print their tables with these functions."""

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

_GAP = "  "
_NARROWEST = 8  # characters of a column whose cells are wrapped
_LONGEST = 34  # characters of a name with a text beside it


def cell(value: Any, form: str | Callable[[Any], str] = "") -> str:
    """Return a value as `format` or the function `form` prints it; None leaves the cell empty."""
    if value is None:
        return ""
    return format(value, form) if isinstance(form, str) else form(value)


def plain(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[int] = (),
    rule: bool = True,
    width: int | None = None,
    gap: str = _GAP,
) -> list[str]:
    """Return the lines of a table. A cell may have several lines, and the last cells of a row may be left out.

    Args:
        header: The titles of the columns.
        rows: The cells of each row.
        right: The columns, counted from 0, that are aligned to the right; their cells are never wrapped.
        rule: Whether a line separates the header from the rows.
        width: The most characters of a line. The longest cells that are aligned to the left are wrapped to fit it.
        gap: What separates two columns.
    """
    columns = [[text.split("\n") for text in each] for each in itertools.zip_longest(header, *rows, fillvalue="")]
    widths = [max(len(line) for lines in column for line in lines) for column in columns]
    if width is not None:
        widths = _narrow(widths, right, width - len(gap) * (len(widths) - 1))
        columns = [[_wrap(c, w) for c in column] for column, w in zip(columns, widths, strict=True)]
    lines = []
    for number, cells in enumerate(zip(*columns, strict=True)):
        height = max(map(len, cells))
        blank = [[""] * (height - len(each)) for each in cells]
        # Titles end at the rule, and rows begin on one line.
        padded = [b + c if number == 0 else c + b for b, c in zip(blank, cells, strict=True)]
        lines += [gap.join(_align(line, widths, right)).rstrip() for line in zip(*padded, strict=True)]
        if number == 0 and rule:
            lines.append("─" * (sum(widths) + len(gap) * (len(widths) - 1) + 1))
    return lines


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return the lines of a table that is also Markdown; arguments as in `plain`."""
    escaped = [[text.replace("|", "\\|") for text in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*escaped, strict=True)]
    marks = ["-" * (width - 1) + (":" if number in right else "-") for number, width in enumerate(widths)]
    first, *others = (_align(row, widths, right) for row in escaped)
    return [f"| {' | '.join(row)} |" for row in (first, marks, *others)]


def pairs(rows: Iterable[tuple[str, str]], width: int, indent: int = 0, column: int = 0) -> list[str]:
    """Return the lines of names, each with a text beside it, which is wrapped; that of a very long name is below it.

    Args:
        rows: The names and texts.
        width: The most characters of a line.
        indent: The column, counted from 0, where names begin.
        column: The first column where texts may begin; they begin two characters behind the longest name.
    """
    rows = list(rows)
    beside = [len(name) for name, _ in rows if len(name) <= _LONGEST]
    column = max(column, indent + len(_GAP) + max(beside, default=0))
    lines = []
    for name, text in rows:
        first, *more = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
        start = " " * indent + name
        if len(name) > _LONGEST:
            lines.append(start)
            start = ""
        lines += [f"{start:<{column}}{first}".rstrip(), *(" " * column + line for line in more)]
    return lines


def _align(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [text.rjust(w) if n in right else text.ljust(w) for n, (text, w) in enumerate(zip(row, widths, strict=True))]


def _narrow(widths: Sequence[int], right: Collection[int], width: int) -> list[int]:
    """Return the widths of columns, of which the widest ones that may be wrapped are narrower to sum to `width`."""
    found = list(widths)
    wrapped = [n for n, each in enumerate(widths) if n not in right and each > _NARROWEST]
    while wrapped and sum(found) > width:
        widest = max(wrapped, key=lambda n: found[n])
        if found[widest] == _NARROWEST:
            break
        found[widest] -= 1
    return found


def _wrap(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
