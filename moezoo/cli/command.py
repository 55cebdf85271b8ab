"""What every command does besides its task: --help, --cfg job, one line for a mistake, exit codes.

Modules of commands import JAX inside functions, so `Command.check` answers a mistyped word without it.
"""

import abc
import dataclasses
import errno
import importlib.metadata
import io
import os
import platform
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from moezoo.cli import help as help_text
from moezoo.config import options, overrides
from moezoo.errors import UserError, nearest
from moezoo.typed import show, types_of

VERSION = "--version"

# How stdout may be set to treat characters that its encoding lacks: by an error, in two ways.
_FAILING = ("strict", "surrogateescape")
_CACHE = re.compile("Error (writing|reading) persistent compilation cache entry")
_warned: set[str] = set()  # of which of both
# What any part of a command may run into.
_LIMITS = {
    errno.ENOSPC: "no space left where the output goes",
    errno.EMFILE: "too many open files for the limit of this process; raise it with ulimit -n",
}
Task = Callable[[Sequence[str]], int | None]


@dataclasses.dataclass(frozen=True)
class Command(abc.ABC):
    """A command of moezoo: `moezoo NAME ARGUMENT ...`, or the script of its name.

    - `summary` is its line in the list of commands;
    - `task` runs it with its arguments, and returns the exit code, None for 0;
    - `description` is the first paragraph of `--help`, and `examples` are arguments that `--help` shows;
    - `keys` is a dataclass of the command's own options (`moezoo.config.options`); `--help` lists them first.
    """

    name: str
    summary: str
    task: Task
    description: str
    keys: type | None
    examples: tuple[str, ...]

    @abc.abstractmethod
    def check(self, arguments: Sequence[str], prog: str) -> None:
        """Raise `UserError` for mistakes that can be found without importing JAX; `prog` is how the user called it."""

    @abc.abstractmethod
    def explain(self, arguments: Sequence[str]) -> list[str]:
        """Return the lines of `--help` about the arguments."""

    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        """Run the command and return the exit code, None for 0."""
        del prog
        return self.task(arguments)


@dataclasses.dataclass(frozen=True)
class ConfiguredCommand(Command):
    """A command that composes a configuration from its KEY=VALUE arguments.

    - `switches` is a dataclass of its options with dashes (`options.take_switches`), which `task` receives too;
    - `configure(*arguments)` returns the configuration that `--cfg job` prints, by default as `moezoo.compose`;
    - `groups` are the groups that `--help` lists after `keys`, by default all; with neither, it lists all keys of a
      configuration too.
    """

    keys: type | None = None
    examples: tuple[str, ...] = ("steps=100 mesh=ep8", "model.layers=2 dispatch=gather execution.dtype=bfloat16")
    switches: type | None = None
    configure: Callable[..., Any] | None = None
    groups: tuple[str, ...] = ()

    def check(self, arguments: Sequence[str], prog: str) -> None:
        """Refuse unknown options, keys and entries of groups, and own options that are missing or invalid."""
        rest, _ = self._split(arguments, prog)
        if self.keys is None:
            overrides.read(rest)
            return
        overrides.read(options.split(self.keys, rest)[1], types_of(self.keys))
        options.take(self.keys, rest)

    def explain(self, arguments: Sequence[str]) -> list[str]:
        keys = [*help_text.own_keys(self.keys), ""] if self.keys else []
        keys += help_text.overview(self.groups) if keys or self.groups else help_text.configuration(arguments)
        switches = options.describe_switches(self.switches) if self.switches else []
        switches += [("--help", "print this"), ("--cfg job", "print the configuration as YAML and exit")]
        switches += [(VERSION, "print the versions of moezoo, JAX and Python and exit")]
        return [*keys, "", "Options:", *help_text.table(switches)]

    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        """Print the configuration or run the task."""
        rest, show_job = self._split(arguments, prog)
        if not show_job:
            return self.task(arguments)
        from moezoo.config.compose import as_mapping, compose, to_yaml

        print(to_yaml(as_mapping((self.configure or compose)(*rest))), end="")

    def _split(self, arguments: Sequence[str], prog: str) -> tuple[list[str], bool]:
        """Return the overrides, and whether to print the configuration."""
        if self.switches is not None:
            arguments = options.take_switches(self.switches, arguments).rest
        found, show_job, rest = [], False, iter(arguments)
        for argument in rest:
            option, equals, value = argument.partition("=")
            if option == "--cfg":
                value = value if equals else next(rest, "job")
                if "=" in value:
                    found.append(value)
                elif value != "job":
                    raise UserError(
                        f"--cfg {show(value)}: expected --cfg job, which prints the configuration of the run"
                    )
                show_job = True
            elif argument.startswith("-"):
                raise UserError(f"{show(argument)}: {self._explain_unknown(option, prog)}")
            else:
                found.append(argument)
        return found, show_job

    def _explain_unknown(self, option: str, prog: str) -> str:
        """Return the end of the message about an option that the command does not have."""
        if (key := option.lstrip("-")) in overrides.top_keys():
            return f"settings have no dashes; write {key}=VALUE"
        if self.switches is not None:
            own = map(options.name_switch, types_of(self.switches))
            return f"no such option; {nearest(option, [*own, '--cfg', '--help'])}"
        loop = f"for m in single ep8; do {prog} mesh=$m; done"
        return f"no such option; valid: --help, --cfg job; several runs are a loop: {loop}, or moezoo sweep"


@dataclasses.dataclass(frozen=True)
class KeysCommand(Command):
    """A command with options of its own and no configuration; `task` reads its arguments as an instance of `keys`.

    - `positions` are the keys that arguments without a key set, in this order; one that ends with `...` takes the rest;
    - `switches` is a dataclass of its options with dashes (`options.take_switches`), none of which takes a value;
    - `alone` states that `task` never runs in several processes, so that JAX, which may be broken, is not imported.
    """

    keys: type
    positions: tuple[str, ...] = ()
    switches: type | None = None
    alone: bool = False

    def check(self, arguments: Sequence[str], prog: str) -> None:
        if self.switches is not None:
            arguments = options.take_switches(self.switches, arguments).rest
        if option := next((a for a in arguments if a.startswith("-")), None):
            own = "".join(f"{name}, " for name, _ in options.describe_switches(self.switches)) if self.switches else ""
            raise UserError(f"{show(option)}: no such option; valid: {own}--help, and KEY=VALUE")
        options.read(self.keys, options.name_positions(self.positions, arguments))

    def explain(self, arguments: Sequence[str]) -> list[str]:
        del arguments
        switches = options.describe_switches(self.switches) if self.switches else []
        return [*help_text.own_keys(self.keys), *(["", "Options:", *help_text.table(switches)] if switches else [])]

    def call(self, arguments: Sequence[str], prog: str) -> int | None:
        del prog
        return self.task(options.name_positions(self.positions, arguments))


class _Alone:
    """Stands for `moezoo.parallel.distributed` in a command that imports no JAX."""

    name = staticmethod(lambda: "")
    several = staticmethod(lambda: False)
    leave = staticmethod(lambda code: None)


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder cannot be read ({error.strerror}); change to one that exists") from None


def _import_distributed() -> Any:
    """Return `moezoo.parallel.distributed`, which imports JAX; exit with one line where a variable prevents that."""
    try:
        from moezoo.parallel import distributed
    except ValueError as error:  # JAX reads the variables of its settings while it is imported
        names = [name for name in os.environ if name.startswith("JAX_")]
        if not names:
            raise
        said = str(error).splitlines()[0]
        named = [name for name in names if name in said] or names
        shown = ", ".join(f"{name}={show(os.environ[name])}" for name in named)
        refuse(UserError(f"{shown}: JAX cannot be imported ({said}); correct or unset it"))
    return distributed


def execute(command: Command, arguments: Sequence[str], prog: str) -> NoReturn:
    """Print the help of `command` or versions if asked, otherwise run it; exit with its code.

    Other exit codes: 2 after a `UserError`, printed as one line without a traceback; 141 when the reader of the output
    has gone; those after signals are in `moezoo.interrupts`.
    """
    if VERSION in arguments:
        print_versions()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _FAILING:
        # As stderr; a task must not fail when it prints its result. Only a command may change stdout, so what a program
        # calls, such as `moezoo.train`, escapes its own lines (`report.print_lines`).
        sys.stdout.reconfigure(errors="backslashreplace")
    asked = "--help" in arguments or "-h" in arguments
    try:
        _check_current_folder()
        if not asked:
            command.check(arguments, prog)
    except UserError as error:
        refuse(error)
    if getattr(command, "alone", False):
        distributed: Any = _Alone
    else:
        distributed = _import_distributed()
    # To the end of the process, as are filters that a task sets: Python also warns of what it collects at exit.
    warnings.showwarning = _print_warning
    try:
        code = (_print_help(command, arguments, prog) if asked else command.call(arguments, prog)) or 0
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except UserError as error:
        print(f"{distributed.name()}error: {error}{_typed_choices(str(error), arguments)}", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        code = drop_output()
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LIMITS:
            print(f"{distributed.name()}error: {_LIMITS[error.errno]}", file=sys.stderr)
            code = 2
        elif distributed.several():
            traceback.print_exc()
            code = 1
        else:
            raise
    distributed.leave(code)
    sys.exit(code)


def print_versions() -> NoReturn:
    """Print the versions of moezoo, JAX and Python on one line, without importing JAX, and exit."""
    names = (f"{name} {importlib.metadata.version(name)}" for name in ("moezoo", "jax"))
    print_and_exit(f"{', '.join(names)}, Python {platform.python_version()}")


def print_and_exit(text: str) -> NoReturn:
    """Print a text and exit with code 0, or 141 when the reader of the output has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.exit(drop_output())
    sys.exit(0)


def drop_output() -> int:
    """Return the exit code for a process whose output has no reader any more, and discard further output."""
    # Python flushes the output again at exit, and would report the error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def refuse(error: UserError) -> NoReturn:
    """Print a mistake and exit with code 2."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _print_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """Print a warning on one line; a warning of a library also names its source."""
    if found := _CACHE.match(str(message)):
        # JAX warns of every program. It writes no entry anew that is there, also if it was cut.
        if (what := found[1]) not in _warned:
            _warned.add(what)
            print(f"warning: {_describe_cache(what, str(message).rpartition(': ')[2])}", file=sys.stderr)
        return
    where = "" if category is UserWarning else f" ({category.__name__}, {filename}:{lineno})"
    print(f"warning: {message}{where}", file=sys.stderr)


def _describe_cache(what: str, reason: str) -> str:
    from moezoo.parallel.cache import SETTINGS

    folder = SETTINGS.jax_compilation_cache_dir
    if what == "writing":
        return f"{folder}: compiled programs cannot be kept ({reason}); make room there, or set cache_dir"
    return f"{folder}: some compiled programs cannot be read ({reason}) and are compiled again; remove this folder"


def _typed_choices(message: str, arguments: Sequence[str]) -> str:
    """Return the choices that the user typed, such as mesh=ep8, where a message names only keys that these set."""
    typed = {a.partition("=")[0]: a for a in arguments if "=" in a and " " not in a}  # not the words of an --option
    groups = {key.partition(".")[0] for key in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+(?==)", message) if key not in typed}
    choices = [typed[group] for group in sorted(groups) if group in typed and typed[group] not in message]
    return f" ({', '.join(choices)})" if choices else ""


def _print_help(command: Command, arguments: Sequence[str], prog: str) -> None:
    examples = [f"  {prog} {example}" for example in command.examples]
    width = help_text.terminal_width()
    description = [line for part in command.description.splitlines() for line in textwrap.wrap(part, width) or [""]]
    first = "".join(f"{name.upper()} " for name in getattr(command, "positions", ()))
    usage = f"usage: {prog} {first}[KEY=VALUE ...]{' [OPTION ...]' * (getattr(command, 'switches', None) is not None)}"
    print("\n".join([usage, "", *description, "", *command.explain(arguments), "", "Examples:", *examples]))
