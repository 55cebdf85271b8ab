"""Patterns of the paths of parameters, such as "*.attention.out"; `*` stands for any text."""

import difflib
import re
from collections.abc import Iterable, Sequence

from moezoo.errors import UserError, nearest
from moezoo.typed import show


def matching(key: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """Return the paths that any of the patterns matches as a whole.

    Raises `UserError` for a pattern that matches none; `key` is the setting that has the patterns.
    """
    found: set[str] = set()
    for pattern in patterns:
        here = matches(pattern, paths)
        if not here:
            raise UserError(f"{key}: {show(pattern)} matches no whole path of a parameter; {_advise(pattern, paths)}")
        found |= here
    return found


def pattern_of(path: str) -> str:
    """Return the pattern that matches a parameter in the blocks of all stacks: "*.attention.out"."""
    return re.sub(r"^\.stacks\[\d+\]\.blocks\[\d+\]", "*", path)


def _advise(pattern: str, paths: Sequence[str]) -> str:
    """Return what to write for a pattern that matches nothing: a wider one, or one with the nearest words."""
    words = {word for path in paths for word in re.findall(r"\w+", path)}

    def spell(match: re.Match[str]) -> str:
        return match[0] if match[0] in words else next(iter(difflib.get_close_matches(match[0], words, n=1)), match[0])

    spelled = re.sub(r"\w+", spell, pattern)
    for each in (pattern, spelled):
        for wider in (each, f"*{each.lstrip('*')}", f"*{each.strip('*')}*"):
            if matches(wider, paths):
                return f"write {show(wider)}" if each == pattern else f"did you mean '{show(wider)}'?"
    return nearest(pattern, map(pattern_of, paths))


def matches(pattern: str, paths: Sequence[str]) -> set[str]:
    """Return the paths that the pattern matches as a whole."""
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return {path for path in paths if expression.fullmatch(path)}
