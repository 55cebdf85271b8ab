"""A user's own dispatch strategy, named by the path of its class: `dispatch=package.module.Class`.

Only a name in the overrides of a command or of `moezoo.compose` is imported. A saved configuration with a strategy of
the user's own is refused unless the overrides name a strategy again. So no run folder makes moezoo import code.
"""

import dataclasses
import importlib
import inspect
import os
import re
import sys
import traceback
from types import ModuleType
from typing import Any

from moezoo.convert import is_plain, types_of
from moezoo.errors import UserError, nearest
from moezoo.moe.dispatch import DISPATCHES, Dispatch, DispatchChoice

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def path_of(kind: type[DispatchChoice]) -> str:
    """Return the name by which a configuration records a strategy: that of `conf/dispatch`, or the class's path."""
    known = (name for name, strategy in DISPATCHES.items() if strategy is kind)
    return next(known, f"{kind.__module__}.{kind.__qualname__}")


def import_strategy(path: str) -> type[Dispatch]:
    """Import the strategy `package.module.Class`; the current folder is searched after the installed packages.

    The folder stays in `sys.path`, for imports inside functions of the strategy.

    Raises `UserError` where the import fails, and where the class is not a complete frozen dataclass that derives from
    `moezoo.moe.dispatch.Dispatch`.
    """
    key = f"dispatch={path}"
    if not _PATH.fullmatch(path):
        raise UserError(f"{key}: expected the path of a class; write dispatch=package.module.Class")
    name, _, class_name = path.rpartition(".")
    module = _import_module(name, key)
    kind = getattr(module, class_name, None)
    if kind is None:
        found = [each for each, value in vars(module).items() if _is_strategy(value) and value is not Dispatch]
        hint = nearest(class_name, found) if found else "it has no strategy"
        where = f"module {name} ({getattr(module, '__file__', None) or 'no file'})"
        raise UserError(f"{key}: {where} has no class '{class_name}'; {hint}")
    if not _is_strategy(kind):
        raise UserError(f"{key}: {class_name} is not a strategy; derive the class from moezoo.moe.dispatch.Dispatch")
    check_strategy(kind, key)
    return kind


def check_strategy(kind: type[DispatchChoice], key: str) -> None:
    """Raise `UserError` unless a configuration can name and make the strategy `kind`, which the user set by `key`."""
    name = kind.__name__
    if "." in kind.__qualname__:
        raise UserError(
            f"{key}: {name} is defined inside a function or a class, where no command could find it again; define it "
            "at the top of a module"
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"{key}: {name} lacks {', '.join(missing)}; moezoo.moe.dispatch.Dispatch describes them")
    if getattr(kind, "moves", None) not in ("tokens", "weights"):
        raise UserError(f'{key}: {name}.moves must be "tokens" or "weights"; set it as a class attribute')
    if "__dataclass_fields__" not in vars(kind):
        raise UserError(f"{key}: {name} is not a dataclass; write @dataclasses.dataclass(frozen=True) above the class")
    try:
        fields = types_of(kind)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    for field in dataclasses.fields(kind):
        if not (field.init and is_plain(fields[field.name])):
            raise UserError(
                f"{key}: a configuration cannot set {name}.{field.name}; make it a number, a text, a Literal, or a "
                "tuple or mapping of these, or a class attribute"
            )


def _import_module(name: str, key: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise UserError(
                f"{key}: there is no module '{missing}' in {os.getcwd()} or among the installed packages; write "
                "dispatch=package.module.Class"
            ) from None
        raise UserError(f"{key}: the import of {name} fails ({_describe(error)}); correct it") from None


def _describe(error: BaseException) -> str:
    """Return an error on one line, with the last line in the current folder that it passed, or else in any file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(os.getcwd())]
    last = (own or frames)[-1]
    at = f" in {last.filename}, line {last.lineno}" * (not isinstance(error, SyntaxError))
    return " ".join(f"{type(error).__name__}: {error}{at}".split())


def _is_strategy(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Dispatch)
