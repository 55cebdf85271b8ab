"""Conversion between plain values, as YAML and the command line give them, and checked frozen dataclasses.

A field's type states what it may hold, and `Annotated[..., Range(...)]` which numbers. `convert` makes a dataclass of
plain values; `check_fields`, which a dataclass calls when it is made, holds values from Python to the same conditions.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from moezoo.errors import UserError, describe_class, nearest

_T = TypeVar("_T")


class Range(NamedTuple):
    """The numbers that a field may have. An integer without an upper bound is at most the largest int32."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    multiple_of: int | None = None

    def holds(self, value: Any) -> bool:
        """Return whether `value` is in the range. All other values than numbers are."""
        if not isinstance(value, int | float):
            return True
        within = self.at_least <= value <= self.at_most and self.above < value < self.below
        return within and (self.multiple_of is None or value % self.multiple_of == 0)

    def __str__(self) -> str:
        bounds = ((name.replace("_", " "), getattr(self, name)) for name in ("at_least", "above", "at_most", "below"))
        words = [f"{name} {bound}" for name, bound in bounds if math.isfinite(bound)]
        return " and ".join(words if self.multiple_of is None else [*words, f"a multiple of {self.multiple_of}"])


class AtMost(NamedTuple):
    """A note at a field: it is at most the field `other` beside it, or, if `strict`, below it. None has no limit."""

    other: str
    strict: bool = False


class MayChange(NamedTuple):
    """A note at a setting of a model: the same weights may have another value of it.

    `at_start` is the value where weights from elsewhere begin to be trained, unless it is set; None: the one that they
    come with. Where the settings beside it have `without_effect`, a key and its value, it stays as it is.
    """

    at_start: float | None = None
    without_effect: tuple[str, Any] | None = None


ANY_NUMBER = Range()
Size = Annotated[int, Range(at_least=1)]
Count = Annotated[int, Range(at_least=0)]
Even = Annotated[int, Range(at_least=2, multiple_of=2)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
_INT32 = Range(at_most=2**31 - 1)  # devices count in int32


class Name(str):
    """The type of a field that holds a key of `registry`, at the time when it is set. The value is plain text.

    `refused` are names that a user may expect there, and why they are not.
    """

    registry: ClassVar[Mapping[str, Any]]
    refused: ClassVar[Mapping[str, str]] = types.MappingProxyType({})


class Checks(NamedTuple):
    """What types cannot express, by dotted key."""

    # For a section whose class depends on one of its keys: that key, and the class by its value. `SECTION.*` stands for
    # all sections in it.
    tags: Mapping[str, tuple[str, Mapping[str, type]]] = types.MappingProxyType({})
    renamed: Mapping[str, str] = types.MappingProxyType({})  # old key -> new key
    asked: Mapping[str, Any] = types.MappingProxyType({})  # the keys that the user has set one by one, and their values

    def tag(self, key: str) -> tuple[str, Mapping[str, type]] | None:
        """Return the key that chooses the class of a section, and the classes; None where it has one class."""
        return self.tags.get(key) or self.tags.get(f"{key.rpartition('.')[0]}.*")


NO_CHECKS = Checks()
# Metadata of the field of a dataclass whose keys stand beside the others in a configuration, not in a section.
INLINED = "inlined"

_SCALARS = {int: "a whole number such as 4", float: "a number such as 0.5", bool: "true or false", str: "text"}


def convert(kind: Any, value: Any, key: str = "", checks: Checks = NO_CHECKS, valid: Range = ANY_NUMBER) -> Any:
    """Convert `value` to an instance of `kind`.

    Args:
        kind: The type: int, float (whole numbers too), bool, str, a `Literal` or `Name`, `tuple[X, ...]` (for these two
            one name alone too), `Mapping[str, X]`, or a dataclass of these; or a union with classes such as None's,
            whose instances are taken as they are. Any takes every value.
        value: A plain value. What it omits of a dataclass takes the default of the field. Numbers of NumPy count as
            numbers, paths as text, and tuples as lists; a bool is never a number, and a float never a whole number.
        key: The dotted key of `value`; empty at the top.
        checks: Further conditions.
        valid: The numbers that are accepted.

    Raises:
        UserError: `value` does not fit. The message has the key, what was expected and what was found.
    """
    if checks.tag(key) or dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, key, checks)
    if kind is Any:
        return value
    inner, classes = _apart(kind)
    origin, arguments, choices = typing.get_origin(inner), typing.get_args(inner), _choices(inner)
    if isinstance(value, classes):
        return value
    if choices is not None:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        if isinstance(value, str) and (reason := getattr(inner, "refused", {}).get(value)):
            raise UserError(f"{key}={value}: {reason}")
    elif origin is tuple:
        if isinstance(value, str) and _choices(arguments[0]) is not None:
            value = [value]
        if isinstance(value, list | tuple):
            return tuple(convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is Mapping:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: convert(arguments[1], item, f"{key}.{name}", checks) for name, item in value.items()}
    elif (scalar := _scalar(inner, value)) is not None:
        unbounded = inner is int and valid.at_most == math.inf
        if wrong := [limits for limits in (valid, _INT32)[: 1 + unbounded] if not limits.holds(scalar)]:
            raise UserError(f"{key}={show(value)} must be {wrong[0]}{', or null' * (types.NoneType in classes)}")
        return scalar
    found = _describe_value(value) if choices is None else show(value)
    if inner is float and isinstance(value, str) and value.lstrip("+-").lower() in (".inf", ".nan"):  # as YAML has them
        found = "no finite number"
    if inner is int and isinstance(value, float) and value.is_integer() and _INT32.holds(abs(value)):  # typed as 1e3
        found += f"; write {int(value)}"
    typed = checks is not NO_CHECKS and inner is str and isinstance(value, int | float)
    quote = "; quotes inside quotes make it text: '\"...\"'" * typed
    raise UserError(f"{key}={show(value)}: expected {_describe_type(kind)}, found {found}{quote}")


def check_fields(section: str, settings: Any) -> None:
    """Convert each field of a frozen dataclass in place, as `convert` does. Its `__post_init__` calls this first.

    A field whose type is another class, or a union of classes, must hold an instance. Fields of types that no
    configuration can hold are left as they are. `section` is the dotted key of `settings`, empty at the top.

    Raises `UserError` if a value does not fit the type or the range of its field, or, by `AtMost`, another field.
    """
    kind = type(settings)
    for name, hint in types_of(kind).items():
        key, value = _join(section, name), getattr(settings, name)
        if is_plain(_apart(hint)[0]):
            object.__setattr__(settings, name, convert(hint, value, key, valid=ranges_of(kind)[name]))
        elif not _fits(value, hint):
            kinds = [each.__name__ for each in typing.get_args(hint) or [hint] if each is not types.NoneType]
            expected, found = f"a value of {' or '.join(kinds)}", _describe_value(value)
            names = "; only moezoo.compose takes names" * isinstance(value, str)
            raise UserError(f"{key}={show(value)}: expected {expected}, found {found}{names}")
    for name, (other, strict) in notes_of(kind, AtMost).items():
        value, most = getattr(settings, name), getattr(settings, other)
        if None not in (value, most) and (value > most or (strict and value == most)):
            bound = "below" if strict else "at most"
            raise UserError(f"{_join(section, name)}={value} must be {bound} {_join(section, other)}={most}")


def is_plain(kind: Any) -> bool:
    """Return whether `convert` can make a `kind` from one value of a configuration."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return len(arguments) == 2 and types.NoneType in arguments and any(map(is_plain, arguments))
    if origin is tuple:
        return len(arguments) == 2 and arguments[1] is ... and is_plain(arguments[0])
    if origin is Mapping:
        return arguments[0] is str and is_plain(arguments[1])
    return _choices(kind) is not None or kind in _SCALARS


def _fits(value: Any, hint: Any) -> bool:
    """Return whether `value` is an instance of a class or a union of classes; True for other types."""
    try:
        return isinstance(value, hint)
    except TypeError:
        return True


def to_plain(value: Any, key: str = "", checks: Checks = NO_CHECKS) -> Any:
    """Return the plain value that `convert` makes `value` from: dicts, lists, numbers, text and None."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if inlined := _inlined(type(value)):
            return to_plain(fields.pop(inlined), key, checks) | to_plain(fields)
        plain = to_plain(fields, key, checks)
        if (tagged := checks.tag(key)) is None:
            return plain
        for name, kind in tagged[1].items():
            if type(value) is kind:
                return {tagged[0]: name, **plain}
        raise UserError(
            f"{key}: a configuration cannot record {type(value).__name__} here, only {', '.join(tagged[1])}"
        )
    if isinstance(value, Mapping):
        return {name: to_plain(item, _join(key, name), checks) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def complete(kind: Any, value: Any, key: str = "", checks: Checks = NO_CHECKS, default: Any = None) -> Any:
    """Return a copy of the plain `value` with all defaults filled in, for `convert` to make a `kind` of.

    Defaults are those of the dataclass instance `default`, otherwise of `kind`. What `convert` refuses is kept as it
    is.
    """
    if not isinstance(value, Mapping):
        return value
    if typing.get_origin(kind) is Mapping:
        inside = typing.get_args(kind)[1]
        return {name: complete(inside, item, _join(key, show(name)), checks) for name, item in value.items()}
    inlined, completed = _inlined(kind), dict(value)
    if inlined is None and (tagged := checks.tag(key)):
        kind = tagged[1].get(show(value.get(tagged[0])))
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        name, hint, at = field.name, types_of(kind)[field.name], _join(key, field.name)
        usual = field.default_factory() if callable(field.default_factory) else field.default
        usual = getattr(default, name) if type(default) is kind else usual
        if name == inlined:
            completed |= complete(hint, _beside(kind, value), key, checks)
        elif name in value:
            completed[name] = complete(hint, value[name], at, checks, usual)
        elif usual is not dataclasses.MISSING:
            completed[name] = to_plain(usual, at, checks)
    return completed


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """Return field name -> type of a dataclass, in the order of declaration.

    Raises `UserError` where a user's own class has a type that Python cannot evaluate.
    """
    try:
        hints = typing.get_type_hints(kind)
    except Exception as error:
        raise UserError(f"the types of {kind.__name__}'s fields cannot be read ({error}); correct them") from None
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def ranges_of(kind: type) -> dict[str, Range]:
    """Return field name -> range of a dataclass."""
    return dict.fromkeys(types_of(kind), ANY_NUMBER) | notes_of(kind, Range)


@functools.cache
def notes_of(kind: type, note: type[_T]) -> dict[str, _T]:
    """Return field name -> what `Annotated` notes of this class; what a base class notes holds in its subclasses."""
    found: dict[str, _T] = {}
    for base in kind.__mro__:
        for name, hint in typing.get_type_hints(base, include_extras=True).items():
            for part in (hint, *typing.get_args(hint)):  # the range of `X | None` is that of X
                for each in getattr(part, "__metadata__", ()):
                    if isinstance(each, note):
                        found.setdefault(name, each)
    return found


def show(value: Any) -> str:
    """Return `value` on one line, as a user would type it; a very long one is shortened."""
    text = _show(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... ({len(text)} characters)"


def counted(number: int, noun: str) -> str:
    """Return how many things there are, in words."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


_LONGEST = 300


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_show(name)}: {_show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 4000:  # Python refuses to print more digits
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = " ".join(str(value).split())
    return text if text.isprintable() else repr(text)


def _describe_type(kind: Any) -> str:
    """Describe in words what a value of `kind` looks like."""
    inner, classes = _apart(kind)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if (choices := _choices(inner)) is not None:
        words = "one of " + ", ".join(map(show, choices))
    elif origin is Mapping:
        words = "names and their values such as {a: [b]}"
    elif origin is tuple:
        names = _choices(arguments[0])
        words = f"a list of {', '.join(map(show, names))}" if names else "a list such as [a, b]"
    else:
        words = _SCALARS.get(inner, "a section with keys")
    return f"{words}, or null" if types.NoneType in classes else words


def get(mapping: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where there is none."""
    value: Any = mapping
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def put(mapping: Mapping[str, Any], key: str, value: Any, at: str = "") -> dict[str, Any]:
    """Return `mapping`, the section `at` (empty at the top), with another value of the dotted `key` in it.

    Raises `UserError` if a part of the key is one value.
    """
    name, _, rest = key.partition(".")
    here = _join(at, name)
    if rest:
        below = mapping.get(name, {})
        if not isinstance(below, Mapping):
            raise UserError(f"{here}.{rest}: {here} is one value and has no keys; write {here}=VALUE")
        value = put(below, rest, value, here)
    return {**mapping, name: value}


def flatten(mapping: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys."""
    flat = {}
    for name, value in mapping.items():
        flat |= flatten(value, f"{at}{name}.") if isinstance(value, Mapping) else {f"{at}{name}": value}
    return flat


def _inlined(kind: Any) -> str | None:
    """Return the field whose keys stand beside the others; None without one."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return next((field.name for field in fields if field.metadata.get(INLINED)), None)


def _beside(kind: Any, section: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the keys in a section that are not those of its class: those of the field that is `INLINED`."""
    return {name: value for name, value in section.items() if name not in types_of(kind)}


def _dataclass(kind: Any, value: Any, key: str, checks: Checks, around: Collection[str] = ()) -> Any:
    """Do what `convert` does for a section. `around` are keys of another class that may stand in it."""
    if key in checks.asked and checks.tag(key) is None:
        write = f"{key}.{next(iter(types_of(kind)), 'NAME')}=VALUE"
        raise UserError(f"{key}={show(checks.asked[key])}: {key} is a section; set its keys, such as {write}")
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={show(value)}: expected a section with keys, found {_describe_value(value)}")
    made, name, section, completed = {}, "", dict(value), complete(kind, value, key, checks)
    if inlined := _inlined(kind):
        inner = {name: section.pop(name) for name in _beside(kind, value)}
        hints = types_of(kind)
        made[inlined] = _dataclass(hints[inlined], inner, key, checks, hints.keys() - {inlined})
    elif tagged := checks.tag(key):
        tag, classes = tagged
        if tag not in section:
            raise UserError(f"{key}.{tag} is missing; set it to one of {', '.join(classes)}")
        if (name := show(section.pop(tag))) not in classes:
            raise UserError(f"{key}.{tag}={name}: no such {key}; {nearest(name, classes)}")
        kind = classes[name]
    hints, valid = types_of(kind), ranges_of(kind)
    for unknown in (name for name in section if name not in hints):
        raise _unknown_key_error(key, unknown, name, {**hints, **dict.fromkeys(around)}, completed, checks)
    for missing in (name for name in hints if name not in completed and name not in made):
        raise UserError(f"{_join(key, missing)} is missing; set it to {_describe_type(hints[missing])}")
    return kind(**made, **{n: convert(hints[n], completed[n], _join(key, n), checks, valid[n]) for n in section})


def _unknown_key_error(
    at: str, name: Any, named: str, valid: Mapping[str, Any], section: Mapping[str, Any], checks: Checks
) -> UserError:
    """Return the error for the key `name`, which the section `at` (empty at the top) has and is not `valid` there."""
    key = _join(at, show(name))
    typed = next((each for each in checks.asked if each.startswith(f"{key}.")), key)
    new = checks.renamed.get(key, "")
    if new.removeprefix(f"{at}.").partition(".")[0] in valid:
        return UserError(f"{key} is now {new}")
    homes = [f"{home}.{key}" for home, part in section.items() if isinstance(part, Mapping) and name in part]
    if homes and not at:
        return UserError(f"{key}: there is no key '{key}' at the top; did you mean '{homes[0]}'?")
    where = f" in {at} {named}".rstrip() if at else ""
    hint = nearest(show(name), valid) if valid else "it takes none"
    tag, kinds = checks.tag(at) or ("", {})
    # An entry of a group has the name of its class, except that several models are of one family.
    also = f"{tag} " if tag == "family" else f"{at}="
    others = [f"{also}{entry}" for entry, kind in kinds.items() if name in types_of(kind)]
    hint += f"; {' and '.join(others)} ha{'ve' if len(others) > 1 else 's'} it" * bool(others)
    for field, kind in valid.items():  # the keys of sections with free names, such as the sources of a mixture
        below = typing.get_args(kind)[1] if typing.get_origin(kind) is Mapping else None
        inner = types_of(below).keys() - {_inlined(below)} if dataclasses.is_dataclass(below) else ()
        if close := difflib.get_close_matches(show(name), inner, 1):
            hint = f"write {_join(at, field)}.NAME.{close[0]}"
    return UserError(f"{typed}: there is no key '{show(name)}'{where}; {hint}")


def _scalar(kind: Any, value: Any) -> Any:
    """Return `value` as an int, float, bool or text, or None if it is no `kind`."""
    if kind is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return text if type(text) is str and text else None
    if kind is bool or isinstance(value, bool):
        return value if type(value) is kind else None
    if kind is int:
        return int(value) if isinstance(value, numbers.Integral) else None
    if kind is float and isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # a whole number beyond every float
            number = float(value)
            return number if math.isfinite(number) else None  # no setting may be nan or infinite
    return None


def _apart(kind: Any) -> tuple[Any, tuple[type, ...]]:
    """Return the plain type X of a union `X | A | B`, and the classes A, B, among them None's; (kind, ()) without."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind, ()
    classes = tuple(each for each in arguments if isinstance(each, type) and not is_plain(each))
    rest = [each for each in arguments if each not in classes]
    return (rest[0], classes) if len(rest) == 1 else (kind, ())


def _choices(kind: Any) -> tuple[Any, ...] | None:
    """Return the values of a `Literal`, and the names that a registry has now; None for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    return tuple(kind.registry) if isinstance(kind, type) and issubclass(kind, Name) else None


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _describe_value(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value):
        return "nothing" if isinstance(value, str) else "null"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and not math.isfinite(value):
        return "no finite number"
    for kinds, words in _WORDS:
        if isinstance(value, kinds):
            return words
    return describe_class(value)


_WORDS = (
    (bool, "true or false"),
    (numbers.Integral, "a whole number"),
    (numbers.Real, "a decimal number"),
    (str, "text"),
    (list | tuple, "a list"),
    (Mapping, "names and values"),
)
