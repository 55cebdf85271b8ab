"""Patterns of the paths of parameters, such as "*.attention.out"; `*` stands for any text."""

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
        here = _matches(pattern, paths)
        if not here:
            wider = (f"*{pattern.lstrip('*')}", f"*{pattern.strip('*')}*")
            fitting = next((each for each in wider if _matches(each, paths)), None)
            advice = f"write {show(fitting)}" if fitting else nearest(pattern, dict.fromkeys(map(pattern_of, paths)))
            raise UserError(f"{key}: {show(pattern)} matches no whole path of a parameter; {advice}")
        found |= here
    return found


def pattern_of(path: str) -> str:
    """Return the pattern that matches a parameter in the blocks of all stacks: "*.attention.out"."""
    return re.sub(r"^\.stacks\[\d+\]\.blocks\[\d+\]", "*", path)


def _matches(pattern: str, paths: Sequence[str]) -> set[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return {path for path in paths if expression.fullmatch(path)}
