"""Plain values, as YAML and the command line give them, checked into frozen dataclasses field by field; and back."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from moezoo.errors import UserError, nearest


class Range(NamedTuple):
    """The numbers a setting may be."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def holds(self, value: Any) -> bool:
        """Whether `value` is one of them."""
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        bounds = ((name.replace("_", " "), bound) for name, bound in self._asdict().items())
        return " and ".join(f"{name} {bound}" for name, bound in bounds if math.isfinite(bound))


class Checks(NamedTuple):
    """What types do not say, by dotted key.

    - `tags`: (the key inside a section that picks its class, the classes by name);
    - `ranges`: the numbers a setting may be, where it is not null.
    """

    tags: Mapping[str, tuple[str, Mapping[str, type]]] = types.MappingProxyType({})
    ranges: Mapping[str, Range] = types.MappingProxyType({})


NO_CHECKS = Checks()

_SCALARS = {int: "a whole number such as 4", float: "a number such as 0.5", bool: "true or false", str: "text"}


def convert(kind: Any, value: Any, key: str = "", checks: Checks = NO_CHECKS) -> Any:
    """`value` as an instance of `kind`.

    `kind` is int, float (takes whole numbers too), bool, str, a `Literal`, `X | None`, `tuple[X, ...]`,
    `Mapping[str, X]`, or a dataclass of these. `key` is the dotted key of `value`, empty at the top.

    Raises `UserError` naming the key, what was expected and what was found.
    """
    if key in checks.tags or dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, key, checks)
    inner, optional = _optional(kind)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if value is None and optional:
        return None
    if origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif is_table(inner):
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: convert(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif _is_scalar(value, inner):
        valid = checks.ranges.get(key)
        if valid is not None and not valid.holds(value):
            raise UserError(f"{key}={show(value)} must be {valid}")
        return inner(value)
    found = show(value) if origin is typing.Literal else _describe_value(value)
    quote = "; quotes inside quotes make it text: '\"...\"'" if inner is str and isinstance(value, int | float) else ""
    raise UserError(f"{key}={show(value)}: expected {_describe_type(kind)}, found {found}{quote}")


def plain(value: Any, key: str = "", checks: Checks = NO_CHECKS) -> Any:
    """What `convert` makes `value` from: dicts, lists, numbers, text and None."""
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        fields = {name: plain(getattr(value, name), _join(key, name), checks) for name in names}
        if key not in checks.tags:
            return fields
        tag, classes = checks.tags[key]
        return {tag: next(name for name, kind in classes.items() if type(value) is kind), **fields}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """Field -> type of a dataclass, in the order they are declared."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def is_table(kind: Any) -> bool:
    """Whether `kind` is a mapping, whose keys are free."""
    return typing.get_origin(kind) is Mapping


def show(value: Any) -> str:
    """`value` on one line, as it would be typed."""
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{show(name)}: {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe_type(kind: Any) -> str:
    """What a value of `kind` looks like, in words."""
    inner, optional = _optional(kind)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is typing.Literal:
        words = "one of " + ", ".join(map(show, arguments))
    elif is_table(inner):
        words = "names and their values such as {a: [b]}"
    else:
        words = "a list such as [a, b]" if origin is tuple else _SCALARS.get(inner, "a section with keys")
    return f"{words}, or null" if optional else words


def set_key(kind: type, mapping: dict[str, Any], key: str, value: Any, checks: Checks = NO_CHECKS) -> None:
    """Put `value` at the dotted `key` of `mapping`, which `convert` will make a `kind` of, in place of what is there.

    Raises `UserError` for a key that does not exist and for a section, whose keys are set one by one.
    """
    top, *below = key.split(".")
    fields = types_of(kind)
    if top not in fields:
        homes = [f"{name}.{top}" for name, part in mapping.items() if isinstance(part, dict) and top in part]
        if homes and not below:
            raise UserError(f"{key}: there is no key '{key}' at the top; did you mean '{homes[0]}'?")
        raise _unknown_key_error(key, top, "", fields)
    tag = checks.tags[top][0] if top in checks.tags else None
    if tag is None and not dataclasses.is_dataclass(fields[top]):
        if below:
            raise UserError(f"{key}: {top} is one value and has no keys; write {top}=VALUE")
        mapping[top] = value
        return
    section = mapping.get(top)
    if not isinstance(section, dict):
        raise UserError(f"{top}={show(section)}: expected a section with keys, found {_describe_value(section)}")
    if not below:
        raise UserError(
            f"{key}={show(value)}: {top} is a section; set its keys, such as {top}.{next(iter(section))}=VALUE"
        )
    name, *inner = below
    if name == tag:
        raise UserError(f"{key}={show(value)}: {top} is chosen together with its keys; write {top}=NAME")
    named, known = _class_of(section, top, checks) if tag else ("", fields[top])
    if name not in types_of(known):
        raise _unknown_key_error(key, name, f"{top} {named}", types_of(known))
    table = section.setdefault(name, {}) if inner and is_table(types_of(known)[name]) else None
    if not inner:
        section[name] = value
    elif len(inner) == 1 and isinstance(table, dict):
        table[inner[0]] = value
    else:
        parent = key.rpartition(".")[0]
        raise UserError(f"{key}: {parent} is one value and has no keys; write {parent}=VALUE")


def _class_of(section: Mapping[Any, Any], key: str, checks: Checks) -> tuple[str, type]:
    """The tag of a section, and the class that it picks."""
    tag, classes = checks.tags[key]
    if tag not in section:
        raise UserError(f"{key}.{tag} is missing; set it to one of {', '.join(classes)}")
    name = show(section[tag])
    if name not in classes:
        raise UserError(f"{key}.{tag}={name}: no such {key}; {nearest(name, classes)}")
    return name, classes[name]


def _dataclass(kind: Any, value: Any, key: str, checks: Checks) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={show(value)}: expected a section with keys, found {_describe_value(value)}")
    section, named = dict(value), ""
    if key in checks.tags:
        named, kind = _class_of(section, key, checks)
        del section[checks.tags[key][0]]
    hints = types_of(kind)
    for name in section:
        if name not in hints:
            raise _unknown_key_error(_join(key, show(name)), name, f"{key} {named}".strip(), hints)
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in section:
            raise UserError(f"{_join(key, field.name)} is missing; set it to {_describe_type(hints[field.name])}")
    return kind(**{name: convert(hints[name], item, _join(key, name), checks) for name, item in section.items()})


def _unknown_key_error(key: str, name: Any, section: str, valid: Mapping[str, Any]) -> UserError:
    """The error for the dotted `key`, whose part `name` its section (empty at the top) does not have."""
    where = f" in {section.rstrip()}" if section else ""
    hint = nearest(show(name), valid) if valid else "it takes none"
    return UserError(f"{key}: there is no key '{show(name)}'{where}; {hint}")


def _is_scalar(value: Any, kind: Any) -> bool:
    if kind is float:  # nan and infinity are never what a setting means
        return type(value) in (int, float) and abs(value) <= 1e308
    return kind in _SCALARS and type(value) is kind and value != ""


def _optional(kind: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), anything else as itself and False."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) not in (typing.Union, types.UnionType) or types.NoneType not in arguments:
        return kind, False
    (inner,) = (a for a in arguments if a is not types.NoneType)
    return inner, True


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _describe_value(value: Any) -> str:
    if value is None or value == "":
        return "null" if value is None else "nothing"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    words = {bool: "true or false", int: "a whole number", float: "a decimal number", str: "text", list: "a list"}
    return words.get(type(value), "names and values")
