"""The runs of a sweep: every combination of the values that a user lists for some keys. Nothing here imports JAX."""

import hashlib
import itertools
import json
import math
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from moezoo.config import overrides
from moezoo.errors import UserError
from moezoo.typed import show

_MOST_RUNS = 1000
_LONGEST_NAME = 200  # of a folder; file systems allow 255 bytes
# What the sweep itself sets, and what to write instead.
_OWN = {
    "run_dir": "a sweep names the folders of its runs; write sweep_dir=FOLDER",
    "resume": "a sweep continues its runs itself; give the same command and sweep_dir=FOLDER again",
    "distributed": "a sweep starts single processes; run one element of it per task: only=N",
}


class Element(NamedTuple):
    """One run of a sweep.

    Attributes:
        number: Its place in the product, from 0. Keys are sorted, and the values of the last one change fastest.
        name: The name of its folder.
        values: Key -> value, of each key with several values.
        words: The overrides of the run.
    """

    number: int
    name: str
    values: dict[str, Any]
    words: list[str]


class Sweep(NamedTuple):
    """What a sweep trains.

    Attributes:
        settings: Key -> value as text, of the overrides that all runs have.
        keys: The keys with several values.
        elements: The runs.
    """

    settings: dict[str, str]
    keys: tuple[str, ...]
    elements: list[Element]


def expand(words: Sequence[str]) -> Sweep:
    """Return the sweep that overrides ask for, some of which list several values.

    Raises `UserError` where none does, where there are too many runs, for a key of the command itself, and for what
    cannot be parsed.
    """
    fixed, listed = [], {}
    for word in words:
        found = overrides.list_values(word, _MOST_RUNS)
        key = word.lstrip("+").partition("=")[0]
        if key.partition(".")[0] in _OWN:
            raise UserError(f"{show(word)}: {_OWN[key.partition('.')[0]]}")
        if key in listed:
            raise UserError(f"{show(word)}: {key} is given twice; leave one out")
        if found is None:
            fixed.append(word)
        else:
            plus = "+" * word.startswith("+")
            listed[key] = [(f"{plus}{key}={text}", value) for text, value in found[1].items()]
    asked = overrides.read(fixed)
    settings = {key: _plain(value) for key, value in {**asked.choices, **asked.changes}.items()}
    if both := sorted(settings.keys() & listed.keys()):
        raise UserError(f"{both[0]} is given twice; leave one out")
    if not listed:
        raise UserError("no key has several values; write KEY=A,B, such as seed=0,1, or train one run: moezoo train")
    if (count := math.prod(map(len, listed.values()))) > _MOST_RUNS:
        raise UserError(f"{' '.join(listed)}: {count} runs, more than {_MOST_RUNS}; list fewer values")
    listed = dict(sorted(listed.items()))
    short = _shorten(list(listed))
    elements = []
    for number, chosen in enumerate(itertools.product(*listed.values())):
        values = {key: value for key, (_, value) in zip(listed, chosen, strict=True)}
        elements.append(Element(number, _name(short, values), values, [*fixed, *(word for word, _ in chosen)]))
    return Sweep(settings, tuple(listed), elements)


def _shorten(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key its last parts, as many as tell it from the others."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        short[key] = next((e for e in ends if sum(f".{k}".endswith(f".{e}") for k in keys) == 1), key)
    return short


def _name(short: dict[str, str], values: dict[str, Any]) -> str:
    """Return the name of a folder that can be typed as it is, as a value and as an argument: without `=` and `,`."""
    parts = (f"{short[key]}-{urllib.parse.quote(_plain(value), safe='+')}" for key, value in values.items())
    name = "_".join(parts)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
