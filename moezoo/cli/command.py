"""What every command does besides its work: --help, --cfg job, one line for a mistake, exit codes."""

import abc
import dataclasses
import errno
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from moezoo.config.compose import CONF, PACKAGE, as_mapping, compose, defaults, groups, to_yaml
from moezoo.config.settings import TrainConfig
from moezoo.convert import show
from moezoo.errors import UserError
from moezoo.parallel import distributed

Task = Callable[[Sequence[str]], int | None]


@dataclasses.dataclass(frozen=True)
class Command(abc.ABC):
    """A command of moezoo: `moezoo NAME ARGUMENT ...`, or the script of its name; `summary` is its line of help."""

    name: str
    summary: str

    @abc.abstractmethod
    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        """Do it; the exit code, None for 0. `prog` is how the user called the command."""


@dataclasses.dataclass(frozen=True)
class ConfiguredCommand(Command):
    """A command that composes a configuration from its KEY=VALUE arguments.

    `task` gets the arguments. `--help` prints `description`, all groups, the keys of the chosen entries, and how to
    call the command with `examples`; `--cfg job` prints the configuration that `configure(*arguments)` returns.
    """

    task: Task
    description: str
    configure: Callable[..., TrainConfig] = compose
    examples: tuple[str, ...] = ("steps=100 mesh=ep8", "model.layers=2 dispatch=gather execution.dtype=bfloat16")

    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        """Help, the configuration, or the task."""
        if _asks_for_help(arguments):
            print(_help(prog, self.description, self.examples, arguments))
            return 0
        overrides, show_job = _split(arguments, prog)
        if show_job:
            print(to_yaml(as_mapping(self.configure(*overrides))), end="")
            return 0
        return self.task(overrides)


@dataclasses.dataclass(frozen=True)
class KeysCommand(Command):
    """A command with KEY=VALUE arguments of its own, a line of help each in `keys`, and no configuration.

    `task` gets the arguments and reads them with `moezoo.config.options`.
    """

    task: Task
    description: str
    keys: tuple[str, ...]
    examples: tuple[str, ...]

    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        """Help or the task."""
        if _asks_for_help(arguments):
            keys = (f"  {line}" for line in self.keys)
            calls = (f"  {prog} {example}" for example in self.examples)
            print(
                "\n".join(
                    [f"usage: {prog} KEY=VALUE ...", "", self.description, "", "Keys:", *keys, "", "Examples:", *calls]
                )
            )
            return 0
        if option := next((a for a in arguments if a.startswith("-")), None):
            raise UserError(f"{show(option)}: no such option; valid: --help, and KEY=VALUE")
        return self.task(arguments)


def execute(command: Command, arguments: Sequence[str], prog: str) -> NoReturn:
    """Run `command` and exit with its code.

    Other exit codes: 2 after a `UserError`, printed as one line without a traceback; 130 when interrupted; 141 when the
    reader of the output has gone.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            code = command.call(arguments, prog) or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"{distributed.name()}error: {error}{_typed_choices(str(error), arguments)}", file=sys.stderr)
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


def _print_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """A warning to the user is one line; one between libraries says where it comes from."""
    where = "" if category is UserWarning else f" ({category.__name__}, {filename}:{lineno})"
    print(f"warning: {message}{where}", file=sys.stderr)


def _typed_choices(message: str, arguments: Sequence[str]) -> str:
    """The choices that the user typed, such as mesh=ep8, where a message names only keys that they set."""
    typed = {a.partition("=")[0]: a for a in arguments if "=" in a}
    groups = {key.partition(".")[0] for key in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+(?==)", message) if key not in typed}
    choices = [typed[group] for group in sorted(groups) if group in typed and typed[group] not in message]
    return f" ({', '.join(choices)})" if choices else ""


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def _split(arguments: Sequence[str], prog: str) -> tuple[list[str], bool]:
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
            loop = f"for m in single ep8; do {prog} mesh=$m; done"
            raise UserError(
                f"{show(argument)}: no such option; valid: --help, --cfg job; several runs are a loop: {loop}"
            )
        else:
            overrides.append(argument)
    return overrides, show_job


def _help(prog: str, description: str, examples: Sequence[str], arguments: Sequence[str]) -> str:
    entries, names = [], groups()
    given = dict(a.split("=", 1) for a in arguments if "=" in a)
    cfg = compose(*(f"{group}={name}" for group, name in given.items() if name in names.get(group, ())))
    for group, default in defaults().items():
        own = "  or the path of your own .yaml file" * (group == "rules")
        entries.append(f"  {group}{own}")
        for option in names[group]:
            text, marked = (CONF / group / f"{option}.yaml").read_text(), option + "*" * (option == default)
            entries.append(f"    {marked:<15} {_first_comment(text)}".rstrip())
        keys = " ".join(_keys(getattr(cfg, group), group))
        entries += textwrap.wrap(keys, 110, initial_indent="    keys: ", subsequent_indent="      ")
    keys = (CONF / "train.yaml").read_text().partition("\n\n")[2].strip().splitlines()
    return "\n".join(
        [
            f"usage: {prog} [KEY=VALUE ...]",
            "",
            description,
            "",
            "Groups, set by name such as mesh=ep8; * is what you get otherwise:",
            *entries,
            "",
            "Keys, set like steps=100 or execution.dtype=bfloat16, and their values otherwise:",
            *(f"  {line}".rstrip() for line in keys),
            "",
            "Keys of groups are set like model.layers=2; --cfg job prints their values. They are shown for the *",
            "choice, or for what stands beside --help, such as model=deepseek.",
            "",
            "Options:",
            "  --help          print this",
            "  --cfg job       print the configuration of the run as YAML, and do nothing",
            "",
            "Examples:",
            *(f"  {prog} {example}" for example in examples),
        ]
    )


def _keys(settings: Any, key: str) -> Iterator[str]:
    """The dotted keys below `key`, whose value is `settings`; a name is no setting."""
    if not dataclasses.is_dataclass(settings):
        yield key
        return
    for field in dataclasses.fields(settings):
        if field.name != "name":
            yield from _keys(getattr(settings, field.name), f"{key}.{field.name}")


def _first_comment(text: str) -> str:
    line = text.removeprefix(PACKAGE).partition("\n")[0]
    return line[1:].strip() if line.startswith("#") else ""
