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
    chosen: list[Element]  # those to train


def expand(words: Sequence[str], only: int | None = None) -> Sweep:
    """Return the sweep that overrides ask for, some of which list several values; `only` is the number of one run.

    Raises `UserError` where none does, where there are too many runs, for a key of the command itself, and for what
    cannot be parsed.
    """
    fixed, listed = [], {}
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for name, word in zip(keys, words, strict=True):
        found = overrides.list_values(word, _MOST_RUNS)
        if advice := _OWN.get(name.partition(".")[0]):
            raise UserError(f"{show(word)}: {advice}")
        if found is None:
            fixed.append(word)
            continue
        if keys.count(name) > 1:
            raise UserError(f"{show(word)}: {name} is given twice; leave one out")
        listed[name] = [(f"{word.partition('=')[0]}={text}", value) for text, value in found[1].items()]
    asked = overrides.read(fixed)
    settings = {name: _plain(value) for name, value in {**asked.choices, **asked.changes}.items()}
    if not listed:
        raise UserError("no key has several values; write KEY=A,B, such as seed=0,1, or train one run: moezoo train")
    if (count := math.prod(map(len, listed.values()))) > _MOST_RUNS:
        raise UserError(f"{' '.join(listed)}: {count} runs, more than {_MOST_RUNS}; list fewer values")
    listed = dict(sorted(listed.items()))
    elements = []
    for number, chosen in enumerate(itertools.product(*listed.values())):
        values = {name: value for name, (_, value) in zip(listed, chosen, strict=True)}
        elements.append(Element(number, _name_folder(values), values, [*fixed, *(word for word, _ in chosen)]))
    if only is not None and only >= count:
        raise UserError(f"only={only} but the sweep has {count} runs; write 0 to {count - 1}")
    return Sweep(settings, tuple(listed), elements, elements if only is None else [elements[only]])


def _name_folder(values: Mapping[str, Any]) -> str:
    """Return the name of a folder that can be typed as it is, as a value and as an argument: without `=` and `,`.

    It has of each key the last parts, as many as tell it from the others.
    """
    parts = []
    for name, value in values.items():
        ends = (name.split(".", count)[-1] for count in range(name.count("."), -1, -1))
        short = next((e for e in ends if sum(f".{k}".endswith(f".{e}") for k in values) == 1), name)
        parts.append(f"{short}-{urllib.parse.quote(_plain(value), safe='+')}")
    whole = "_".join(parts)
    end = f"-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]}" if len(whole) > _LONGEST_NAME else ""
    return f"{whole[:_LONGEST_NAME]}{end}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
