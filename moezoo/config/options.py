"""A command's own KEY=VALUE arguments, beside those that configure a run."""

import json
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from moezoo.convert import NO_CHECKS, Checks, convert, show, types_of
from moezoo.errors import UserError, nearest

_T = TypeVar("_T")


class Taken(NamedTuple):
    """A command's options, and the arguments that are not its own."""

    options: Any
    rest: list[str]


def take(kind: type[_T], arguments: Sequence[str], checks: Checks = NO_CHECKS) -> Taken:
    """An instance of the dataclass `kind` from those of `arguments` whose key is one of its fields.

    A text is taken as it stands, a field of several texts may be given several times, anything else once. Raises
    `UserError` for a value that is not of the field's type or, by `checks`, not in its range.
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
            values[key] = text if str in (types[key], *typing.get_args(types[key])) else _value(text)
    return Taken(convert(kind, values, "", checks), rest)


def read(kind: type[_T], arguments: Sequence[str], checks: Checks = NO_CHECKS) -> _T:
    """`take` for a command that has no other arguments. Raises `UserError` for those it does not know."""
    taken = take(kind, arguments, checks)
    for text in taken.rest:
        key, equals, _ = text.partition("=")
        if not equals:
            write = f"{key}=VALUE" if key in types_of(kind) else f"{next(iter(types_of(kind)))}={show(text)}"
            raise UserError(f"{show(text)}: expected KEY=VALUE, such as {write}")
        raise UserError(f"{key}: there is no key '{key}'; {nearest(key, types_of(kind))}")
    return taken.options


def check_keys(arguments: Sequence[str], *kinds: type) -> None:
    """Raise `UserError` for a KEY=VALUE without a section whose key is no field of one of the dataclasses `kinds`."""
    known = [name for kind in kinds for name in types_of(kind)]
    for argument in arguments:
        key = argument.partition("=")[0]
        if "." not in key and key not in known:
            raise UserError(f"{show(argument)}: there is no key '{show(key)}'; {nearest(key, known)}")


def _value(text: str) -> Any:
    for read_as in (json.loads, float):  # null, true, 3, 1e-4; then .5 and what is no number, for an error to name
        try:
            return read_as(text)
        except ValueError:
            continue
    return text
