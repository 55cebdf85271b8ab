"""What a user plugs in from outside, named by its path: `dispatch=package.module.Class`, `model=package.module.Family`.

Only a name in the overrides of a command or of `moezoo.compose` is imported. A saved configuration with an entry of
the user's own is refused unless the overrides name an entry again. So no run folder makes moezoo import code.
"""

import dataclasses
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from moezoo.config.overrides import MEMBERS, PLUGS, defaults, groups, is_own, own_path
from moezoo.config.settings import CONTEXT_PARALLEL, KERNELS, TAG, ExecutionSettings, TrainConfig
from moezoo.errors import UserError, nearest
from moezoo.models import Family, ModelConfig, families
from moezoo.moe.dispatch import Dispatch
from moezoo.parallel.context_parallel import ContextParallel
from moezoo.typed import get, is_plain, put, show, types_of

# For each key of `PLUGS`, the key that chooses the class, and the classes by name. `execution.context_parallel` is one
# name where it is moezoo's, and a section where it is the user's.
TAGS = {key: TAG.get(key, ("name", CONTEXT_PARALLEL)) for key in PLUGS}
# What each of them derives from is what a configuration takes.
_BASES = {**types_of(TrainConfig), "dispatch": Dispatch, "execution.context_parallel": ContextParallel}
_KERNELS = {f"execution.{name}": backends for name, backends in KERNELS.items()}
# Entries of moezoo's in place of the user's own, while the rest of a saved configuration is read; of kernels None.
_STAND_IN = {**defaults(), "execution.context_parallel": ExecutionSettings.context_parallel, **dict.fromkeys(_KERNELS)}
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def name_in(value: Any) -> str:
    """Return the name by which a configuration records the value of one of `PLUGS`: moezoo's, or the class's path."""
    return value if isinstance(value, str) else path_of(type(value))


def path_of(kind: type) -> str:
    """Return the name of a class of one of `PLUGS` in `conf`, or its path; of a model's, the path of its family.

    Raises `UserError` where a family is not at the top of the module of its configuration, or of a package around it.
    """
    if known := [name for _, classes in TAGS.values() for name, each in classes.items() if each is kind]:
        return known[0]
    if not issubclass(kind, ModelConfig):
        return f"{kind.__module__}.{kind.__qualname__}"
    family, name = _family(kind), kind.__module__
    while name:
        if found := [each for each, value in vars(importlib.import_module(name)).items() if value is family]:
            return f"{name}.{found[0]}"
        name = name.rpartition(".")[0]
    raise UserError(
        f"model: the family {family.name} is not at the top of the module of {kind.__name__}, where a command could "
        "find it again; assign it there"
    )


def import_own(key: str, path: str) -> type:
    """Import what the user set `key` to and return its class, of a family that of its configurations.

    The current folder is searched after the installed packages, and stays in `sys.path`, for imports inside functions.

    Raises `UserError` where the import fails, and where the class is not a complete frozen dataclass that derives from
    the class in `PLUGS`.
    """
    (noun, base), shown = PLUGS[key], f"{key}={path}"
    what = "family" if key == "model" else "class"
    if not _PATH.fullmatch(path):
        there = groups().get(key, ())
        hint = f"{nearest(path, there)} (or {own_path(key)} of your own)" if there else f"write {key}={own_path(key)}"
        raise UserError(f"{shown}: expected the path of a {what}{' or a name' * bool(there)}; {hint}")
    name, _, attribute = path.rpartition(".")
    module = _import_module(name, key, path)
    value = getattr(module, attribute, None)
    if value is None:
        found = [each for each, value in vars(module).items() if _is_one(key, value) and value is not _BASES[key]]
        hint = nearest(attribute, found) if found else f"it has no {noun}"
        where = f"module {name} ({getattr(module, '__file__', None) or 'no file'})"
        raise UserError(f"{shown}: {where} has no {what} '{attribute}'; {hint}")
    if not _is_one(key, value):
        how = f"make it with {base}(...)" if key == "model" else f"derive the class from {base}"
        raise UserError(f"{shown}: {attribute} is no {noun}; {how}")
    if not isinstance(value, Family):
        check_class(key, value, shown)
        return value
    if (other := _family(value.config)) is not value:
        raise UserError(
            f"{shown}: {value.config.__name__} is the configuration of the family {other.name}; derive a class of its "
            f"own for {attribute}"
        )
    check_class(key, value.config, shown)
    return value.config


def check_class(key: str, kind: type, shown: str) -> None:
    """Raise `UserError` unless a configuration can name and make the class `kind`, which the user set by `shown`."""
    name, base = kind.__name__, PLUGS[key][1] if key != "model" else "moezoo.models.ModelConfig"
    if "." in kind.__qualname__:
        raise UserError(
            f"{shown}: {name} is defined inside a function or a class, where no command could find it again; define it "
            "at the top of a module"
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"{shown}: {name} lacks {', '.join(missing)}; {base} describes them")
    if key == "dispatch" and getattr(kind, "moves", None) not in ("tokens", "weights"):
        raise UserError(f'{shown}: {name}.moves must be "tokens" or "weights"; set it as a class attribute')
    if not getattr(vars(kind).get("__dataclass_params__"), "frozen", False):
        frozen = "frozen " * ("__dataclass_params__" in vars(kind))
        raise UserError(
            f"{shown}: {name} is not a {frozen}dataclass; write @dataclasses.dataclass(frozen=True) above the class"
        )
    try:
        fields = types_of(kind)
    except UserError as error:
        raise UserError(f"{shown}: {error}") from None
    needed = inspect.get_annotations(_BASES[key])
    if missing := [each for each in needed if each not in fields and not hasattr(kind, each)]:
        raise UserError(f"{shown}: {name} lacks the field {missing[0]}; {base} describes it")
    for field in dataclasses.fields(kind):
        if not (field.init and _can_be_set(fields[field.name])):
            raise UserError(
                f"{shown}: a configuration cannot set {name}.{field.name}; make it a number, a text, a Literal, or a "
                "tuple or mapping of these, or a class attribute"
            )


def saved_own(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved configuration has of the user's own: the path by key, and backends that are not registered.

    Nothing is imported.
    """
    named = {key: get(mapping, f"{key}.{tag}") for key, (tag, _) in TAGS.items()}
    found: dict[str, Any] = {k: name for k, name in named.items() if isinstance(name, str) and is_own(k, name)}
    names = names_of(get(mapping, MEMBERS))
    if any(is_own("tracker", name) for name in names):
        found["tracker"] = f"[{','.join(names)}]"
    for key, backends in _KERNELS.items():
        names = get(mapping, key)
        if isinstance(names, list) and any(isinstance(name, str) and name not in backends for name in names):
            found[key] = names
    return found


def names_of(members: Any) -> list[str]:
    """Return the names of the trackers in plain `members`, as far as they have one."""
    names = [get(section, "name") for section in (members.values() if isinstance(members, Mapping) else ())]
    return [name for name in names if isinstance(name, str)]


def without_own(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved configuration in which moezoo's own entries stand in for those of the user's."""
    for key in saved_own(mapping):
        name = _STAND_IN[key]
        mapping = put(mapping, key, {TAG[key][0]: name} if key in TAG else name)
    return mapping


def refuse_saved(missing: Mapping[str, Any]) -> UserError:
    """Return the error for entries of the user's own in a saved configuration, which the overrides do not name again.

    `missing` is a part of what `saved_own` returns.
    """
    words = {key: f"{key}={show(name)}" for key, name in missing.items()}
    if kernels := [key for key in missing if key in _KERNELS]:
        key, kernel = kernels[0], kernels[0].partition(".")[2]
        return UserError(
            f"{words[key]} was saved with this run, and not all of these backends are registered; register them first, "
            f"in Python (register of moezoo.kernels.{kernel}), or set {key}=null"
        )
    again = " ".join(words.values())
    saved = f"{again} {'was' if len(words) == 1 else 'were'} saved with this run"
    if main := [key for key, name in missing.items() if name.startswith("__main__.")]:
        return UserError(
            f"{saved} of a script or notebook: there, write {again} again; for commands, move the code to a module and "
            f"write {' '.join(words[key].replace('=__main__', '=module') for key in main)}"
        )
    others = [f"{key}={_STAND_IN[key]}" for key in missing if key not in ("model", "data")]
    noun = PLUGS[next(iter(missing))][0]
    instead = f", or another {noun if len(words) == 1 else 'choice'} such as {' '.join(others)}" * bool(others)
    return UserError(f"{saved}, and moezoo imports your own code only where you name it: write {again} again{instead}")


def _family(kind: type) -> Family:
    for family in families():
        if family.config is kind:
            return family
    raise UserError(f"model: no family has configurations {kind.__name__}; make one with moezoo.models.Family(...)")


def _can_be_set(hint: Any) -> bool:
    return is_plain(hint) or (dataclasses.is_dataclass(hint) and all(map(_can_be_set, types_of(hint).values())))  # pyright: ignore[reportArgumentType]


def _is_one(key: str, value: Any) -> bool:
    return isinstance(value, Family) if key == "model" else inspect.isclass(value) and issubclass(value, _BASES[key])


def _import_module(name: str, key: str, path: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise UserError(
                f"{key}={path}: there is no module '{missing}' in {os.getcwd()} or among the installed packages; write "
                f"{key}={own_path(key)}"
            ) from None
        raise UserError(f"{key}={path}: the import of {name} fails ({_describe(error)}); correct it") from None


def _describe(error: BaseException) -> str:
    """Return an error on one line, with the last line in the current folder that it passed, or else in any file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(os.getcwd())]
    last = (own or frames)[-1]
    at = f" in {last.filename}, line {last.lineno}" * (not isinstance(error, SyntaxError))
    return " ".join(f"{type(error).__name__}: {error}{at}".split())
