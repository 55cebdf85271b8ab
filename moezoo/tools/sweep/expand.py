"""The runs of a sweep: every combination of the values that a user lists for some keys. Nothing here imports JAX."""

import hashlib
import itertools
import json
import math
import urllib.parse
from collections.abc import Mapping, Sequence
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
    """One run of a sweep."""

    number: int  # its place in the product, from 0: keys are sorted, and the values of the last one change fastest
    name: str  # of its folder
    values: dict[str, Any]  # key -> value, of each key with several values
    words: list[str]  # its overrides


class Sweep(NamedTuple):
    """What a sweep trains."""

    settings: dict[str, str]  # key -> value as text, of the overrides that all runs have
    keys: tuple[str, ...]  # those with several values
    elements: list[Element]


def expand(words: Sequence[str]) -> Sweep:
    """Return the sweep that overrides ask for, some of which list several values.

    Raises `UserError` where none does, where there are too many runs, for a key of the command itself, and for what
    cannot be parsed.
    """
    fixed, listed = [], {}
    for word in words:
        found, name = overrides.list_values(word, _MOST_RUNS), word.partition("=")[0]
        key = name.lstrip("+")
        if advice := _OWN.get(key.partition(".")[0]):
            raise UserError(f"{show(word)}: {advice}")
        if key in listed:
            raise UserError(f"{show(word)}: {key} is given twice; leave one out")
        if found is None:
            fixed.append(word)
        else:
            listed[key] = [(f"{name}={text}", value) for text, value in found[1].items()]
    asked = overrides.read(fixed)
    settings = {key: _plain(value) for key, value in {**asked.choices, **asked.changes}.items()}
    if both := sorted(settings.keys() & listed.keys()):
        raise UserError(f"{both[0]} is given twice; leave one out")
    if not listed:
        raise UserError("no key has several values; write KEY=A,B, such as seed=0,1, or train one run: moezoo train")
    if (count := math.prod(map(len, listed.values()))) > _MOST_RUNS:
        raise UserError(f"{' '.join(listed)}: {count} runs, more than {_MOST_RUNS}; list fewer values")
    listed = dict(sorted(listed.items()))
    elements = []
    for number, chosen in enumerate(itertools.product(*listed.values())):
        values = {key: value for key, (_, value) in zip(listed, chosen, strict=True)}
        elements.append(Element(number, _name(values), values, [*fixed, *(word for word, _ in chosen)]))
    return Sweep(settings, tuple(listed), elements)


def _name(values: Mapping[str, Any]) -> str:
    """Return the name of a folder that can be typed as it is, as a value and as an argument: without `=` and `,`.

    It has of each key the last parts, as many as tell it from the others.
    """
    parts = []
    for key, value in values.items():
        ends = (key.split(".", count)[-1] for count in range(key.count("."), -1, -1))
        short = next((e for e in ends if sum(f".{k}".endswith(f".{e}") for k in values) == 1), key)
        parts.append(f"{short}-{urllib.parse.quote(_plain(value), safe='+')}")
    name = "_".join(parts)
    end = f"-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]}" if len(name) > _LONGEST_NAME else ""
    return f"{name[:_LONGEST_NAME]}{end}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
