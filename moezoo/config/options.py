"""A command's own KEY=VALUE arguments and switches, next to what configures a run. Nothing here imports JAX."""

import dataclasses
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from moezoo.config import overrides
from moezoo.errors import UserError, nearest
from moezoo.typed import convert, put, ranges_of, show, types_of

_T = TypeVar("_T")


class Taken(NamedTuple):
    """A command's own options, and the other arguments."""

    options: Any
    rest: list[str]


def key(text: str, shown: str = "", *, default: Any = dataclasses.MISSING) -> Any:
    """Declare an option as a field of a dataclass; without a default it is required.

    `--help` prints `text` as its line, and `shown`, such as FOLDER, or else the default, as its value.
    """
    return dataclasses.field(default=default, metadata={"text": text, "shown": shown})


def describe_keys(kind: type) -> list[tuple[str, str]]:
    """Return each option of the dataclass `kind` as KEY=VALUE, with its line of help."""
    types = types_of(kind)
    return [
        (
            f"{field.name}{'.NAME' * _has_names(types[field.name])}={field.metadata['shown'] or show(field.default)}",
            field.metadata["text"],
        )
        for field in dataclasses.fields(typing.cast(Any, kind))
    ]


def split(kind: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments whose key is of the dataclass `kind`, as in `take`, from the others."""
    own, rest, types = [], [], types_of(kind)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_own = name in types or _has_names(types.get(name.partition(".")[0]))
        (own if equals and is_own else rest).append(argument)
    return own, rest


def _has_names(kind: Any) -> bool:
    """Return whether a field of this type is given as FIELD.NAME=VALUE: a mapping, or None."""
    return any(typing.get_origin(each) is Mapping for each in (kind, *typing.get_args(kind)))


def take(kind: type[_T], arguments: Sequence[str]) -> Taken:
    """Make an instance of the dataclass `kind` from those of `arguments` whose key is one of its fields.

    The value of a text is taken literally. A field of several values is given once for each, any other field once. Of a
    mapping each name is given once, as FIELD.NAME=VALUE, and a value is what Hydra reads.

    Raises `UserError` where a required option is missing, and for a value of the wrong type or outside its range.
    """
    own, rest = split(kind, arguments)
    types, values, given = types_of(kind), {}, set()
    for argument in own:
        name, _, text = argument.partition("=")
        field, _, below = name.partition(".")
        if _has_names(types[field]) and not below.isidentifier():
            raise UserError(f"{show(argument)}: expected {field}.NAME=VALUE")
        if typing.get_origin(types[field]) is tuple:
            item = typing.get_args(types[field])[0]
            if item is str and not text:
                raise UserError(f"{show(argument)}: expected text, found nothing; write {name}=TEXT")
            value = convert(item, _value(item, name, text), name, valid=ranges_of(kind)[name])
            values.setdefault(name, []).append(value)
        elif name in given:
            raise UserError(f"{show(argument)}: {name} is given twice; leave one out")
        else:
            values = put(values, name, _value(types[field], name, text))
        given.add(name)
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.default is dataclasses.MISSING and field.name not in values:
            shown, text = field.metadata["shown"], field.metadata["text"]
            raise UserError(f"{field.name} is missing; write {field.name}={shown}: {text}")
    return Taken(convert(kind, values), rest)


def name_positions(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return `arguments` as KEY=VALUE: those without a key, such as a path, have the keys `names` in this order.

    A name that ends with `...` is the key of all that are left. Switches, which begin with --, stay as they are.

    Raises `UserError` where there are more of them.
    """
    keys = (itertools.repeat(name[:-3]) if name.endswith("...") else [name] for name in names)
    left, found = itertools.chain.from_iterable(keys), []
    for argument in arguments:
        if names and not re.match(r"--|[A-Za-z_]\w*=", argument):
            if (name := next(left, None)) is None:
                raise UserError(f"{show(argument)}: expected KEY=VALUE after {' and '.join(names)}")
            argument = f"{name}={argument}"
        found.append(argument)
    return found


def read(kind: type[_T], arguments: Sequence[str]) -> _T:
    """Do what `take` does, for a command without other arguments. Raises `UserError` for those it does not know."""
    for text in split(kind, arguments)[1]:
        name, equals, _ = text.partition("=")
        if not equals:
            write = f"{name}=VALUE" if name in types_of(kind) else f"{next(iter(types_of(kind)))}={show(text)}"
            raise UserError(f"{show(text)}: expected KEY=VALUE, such as {write}")
        raise UserError(f"{name}: there is no key '{name}'; {nearest(name, types_of(kind))}")
    return take(kind, arguments).options


def name_switch(field: str) -> str:
    """Return the switch that sets a field, such as --parameters-only."""
    return f"--{field.replace('_', '-')}"


def describe_switches(kind: type) -> list[tuple[str, str]]:
    """Return each switch of the dataclass `kind` as the user types it, with its line of help."""
    found = []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        shown, switch = field.metadata["shown"], name_switch(field.name)
        found.append((f"{switch}={shown}" if shown else switch, field.metadata["text"]))
    return found


def take_switches(kind: type[_T], arguments: Sequence[str]) -> Taken:
    """Make an instance of the dataclass `kind` from the switches in `arguments`: --NAME, --NAME=VALUE or --NAME VALUE.

    Fields are declared by `key`. A field of type bool is true where its switch is given, and takes no value. `rest` has
    all other arguments, also those that begin with a dash.

    Raises `UserError` for a switch that is given twice, and for a value that is missing, of another type, or too much.
    """
    types, values, rest = types_of(kind), {}, []
    fields = {name_switch(name): name for name in types}
    left = iter(arguments)
    for argument in left:
        switch, equals, text = argument.partition("=")
        if (name := fields.get(switch)) is None:
            rest.append(argument)
            continue
        if name in values:
            raise UserError(f"{switch} is given twice; leave one out")
        if types[name] is bool:
            if equals:
                raise UserError(f"{show(argument)}: {switch} takes no value; write {switch}, or leave it out")
            values[name] = True
            continue
        text = text if equals else next(left, "")
        if not text or text.startswith("--"):
            write = next(shown for shown, _ in describe_switches(kind) if switch in shown)
            raise UserError(f"{switch}: expected a value; write {write}")
        values[name] = convert(types[name], _value(types[name], name, text), switch)
    return Taken(kind(**values), rest)


def _value(kind: Any, name: str, text: str) -> Any:
    """Return the value that `text` stands for where a `kind` is expected: a text as it is, others as in overrides."""
    return text if str in (kind, *typing.get_args(kind)) else overrides.read_value(f"{name}={text}")
