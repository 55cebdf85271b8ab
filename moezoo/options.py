"""A script's own KEY=VALUE arguments, beside those that configure a run."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from moezoo.convert import convert, types_of
from moezoo.errors import UserError

_T = TypeVar("_T")


class Taken(NamedTuple):
    """A script's options, and the arguments that are not its own."""

    options: Any
    rest: list[str]


def take(kind: type[_T], arguments: Sequence[str]) -> Taken:
    """An instance of the dataclass `kind` from those of `arguments` whose key is one of its fields.

    A text is taken as it stands, a field of several texts may be given several times, anything else once. Raises
    `UserError` for a value of another type.
    """
    types, values, rest = types_of(kind), {}, []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in types:
            rest.append(argument)
        elif types[key] == tuple[str, ...]:
            values.setdefault(key, []).append(text)
        elif key in values:
            raise UserError(f"{argument}: {key} is asked for twice; leave one out")
        else:
            values[key] = text if str in (types[key], *getattr(types[key], "__args__", ())) else _value(text)
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    for name in required:
        if name not in values:
            raise UserError(f"{name} is missing; write {name}=...")
    return Taken(kind(**{key: convert(types[key], value, key) for key, value in values.items()}), rest)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
