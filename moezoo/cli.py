"""What every script's command line does besides its work: --help, --cfg job, one line for a mistake, exit codes."""

import errno
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from moezoo import distributed
from moezoo.compose import CONF, as_mapping, compose, defaults, groups, to_yaml
from moezoo.convert import show
from moezoo.errors import UserError
from moezoo.settings import TrainConfig

# What names a choice, and is no setting of it.
_TAGS = ("name", "family")


def run(
    task: Callable[[Sequence[str]], int | None],
    *,
    description: str,
    configure: Callable[..., TrainConfig] = compose,
    examples: Sequence[str] = ("steps=100 mesh=ep8", "model.layers=2 dispatch=gather execution.dtype=bfloat16"),
    keys: Sequence[str] | None = None,
) -> NoReturn:
    """Run a script: hand the command line's overrides to `task` and exit with what it returns, 0 for None.

    `--help` prints `description`, all groups and keys and how to call the script with `examples`; `--cfg job` prints
    the configuration that `configure(*overrides)` returns. A script with `keys` of its own, a line of help each,
    composes nothing: it has no groups and no `--cfg job`, and `task` reads them with `moezoo.options.read`.

    Exit codes: 2 after a `UserError`, printed as one line without a traceback; 130 when interrupted; 141 when whoever
    reads the output has gone.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _tell_warning
            if keys is None:
                code = _dispatch(sys.argv[1:], task, description, configure, examples) or 0
            else:
                code = _dispatch_own(sys.argv[1:], task, description, keys, examples) or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"{distributed.name()}error: {error}{_as_typed(str(error), sys.argv[1:])}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"{distributed.name()}error: no space left where the output goes", file=sys.stderr)
            code = 2
        elif distributed.several():
            traceback.print_exc()
            code = 1
        else:
            raise
    distributed.leave(code)
    sys.exit(code)


def _tell_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """A warning to the user is one line; one between libraries says where it comes from."""
    where = "" if category is UserWarning else f" ({category.__name__}, {filename}:{lineno})"
    print(f"warning: {message}{where}", file=sys.stderr)


def _as_typed(message: str, arguments: Sequence[str]) -> str:
    """The choice that the user typed, such as mesh=ep8, where a message names only keys that it set."""
    typed = {a.partition("=")[0]: a for a in arguments if "=" in a}
    groups = {key.partition(".")[0] for key in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+(?==)", message) if key not in typed}
    choices = [typed[group] for group in sorted(groups) if group in typed and typed[group] not in message]
    return f" ({', '.join(choices)})" if choices else ""


def _dispatch(
    arguments: Sequence[str],
    task: Callable[[Sequence[str]], int | None],
    description: str,
    configure: Callable[..., TrainConfig],
    examples: Sequence[str],
) -> int | None:
    if "--help" in arguments or "-h" in arguments:
        print(_help(description, examples))
        return 0
    overrides, show_job = _split(arguments)
    if show_job:
        print(to_yaml(as_mapping(configure(*overrides))), end="")
        return 0
    return task(overrides)


def _dispatch_own(
    arguments: Sequence[str],
    task: Callable[[Sequence[str]], int | None],
    description: str,
    keys: Sequence[str],
    examples: Sequence[str],
) -> int | None:
    if "--help" in arguments or "-h" in arguments:
        calls = (f"  {_command()} {example}" for example in examples)
        parts = [f"usage: {_command()} KEY=VALUE ...", "", description, "", "Keys:", *(f"  {line}" for line in keys)]
        print("\n".join([*parts, "", "Examples:", *calls]))
        return 0
    if option := next((a for a in arguments if a.startswith("-")), None):
        raise UserError(f"{show(option)}: no such option; valid: --help, and KEY=VALUE")
    return task(arguments)


def _split(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The overrides, and whether the configuration is to be printed."""
    overrides, show_job, rest = [], False, iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option == "--cfg":
            value = value if equals else next(rest, "job")
            if "=" in value:
                overrides.append(value)
            elif value != "job":
                raise UserError(f"--cfg {show(value)}: expected --cfg job, which prints the configuration of the run")
            show_job = True
        elif argument.startswith("-"):
            loop = f"for m in single ep8; do {_command()} mesh=$m; done"
            raise UserError(
                f"{show(argument)}: no such option; valid: --help, --cfg job; several runs are a loop: {loop}"
            )
        else:
            overrides.append(argument)
    return overrides, show_job


def _command() -> str:
    return f"python {sys.argv[0]}"


def _help(description: str, examples: Sequence[str]) -> str:
    entries, names = [], groups()
    for group, default in defaults().items():
        keys: list[str] = []
        own = "  or the path of your own .yaml file" * (group == "rules")
        entries.append(f"  {group}{own}")
        for option in names[group]:
            text, marked = (CONF / group / f"{option}.yaml").read_text(), option + "*" * (option == default)
            entries.append(f"    {marked:<15} {_first_comment(text)}".rstrip())
            if option == default:
                keys = [f"{group}.{key}" for key in re.findall(r"^(\w+):", text, re.MULTILINE) if key not in _TAGS]
        entries += textwrap.wrap(" ".join(keys), 110, initial_indent="    keys: ", subsequent_indent="      ")
    keys = (CONF / "train.yaml").read_text().partition("- _self_\n")[2].strip().splitlines()
    return "\n".join(
        [
            f"usage: {_command()} [KEY=VALUE ...]",
            "",
            description,
            "",
            "Groups, set by name such as mesh=ep8; * is what you get otherwise:",
            *entries,
            "",
            "Keys, set like steps=100 or execution.dtype=bfloat16, and their values otherwise:",
            *(f"  {line}".rstrip() for line in keys),
            "",
            "Keys of groups, shown for the * choice, are set like model.layers=2; --cfg job prints their values.",
            "",
            "Options:",
            "  --help          print this",
            "  --cfg job       print the configuration of the run as YAML, and do nothing",
            "",
            "Examples:",
            *(f"  {_command()} {example}" for example in examples),
        ]
    )


def _first_comment(text: str) -> str:
    line = text.partition("\n")[0]
    return line[1:].strip() if line.startswith("#") else ""
