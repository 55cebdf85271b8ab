"""The command line: `moezoo COMMAND ...`, and the scripts of the same names."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import NoReturn

from moezoo.cli import bench, endurance, evaluate, generate, parity, prepare_data, train
from moezoo.cli.command import Command, execute
from moezoo.convert import show
from moezoo.errors import UserError, nearest

COMMANDS: dict[str, Command] = {
    module.COMMAND.name: module.COMMAND
    for module in (train, evaluate, generate, parity, prepare_data, bench, endurance)
}


@dataclasses.dataclass(frozen=True)
class _ListCommands(Command):
    """What `moezoo` does where its first argument names no command."""

    def call(self, arguments: Sequence[str], prog: str) -> int:
        """Print the commands, or refuse an argument that is none."""
        first = arguments[0] if arguments else "--help"
        if first in ("--help", "-h"):
            lines = [f"  {command.name:<14}{command.summary}" for command in COMMANDS.values()]
            usage = f"usage: {prog} COMMAND [ARGUMENT ...]"
            print("\n".join([usage, "", "Commands:", *lines, "", f"{prog} COMMAND --help lists what can be set."]))
            return 0
        if first.startswith("-"):
            raise UserError(f"{show(first)}: no such option; valid: --help, or a command: {', '.join(COMMANDS)}")
        raise UserError(f"{prog} {show(first)}: no such command; {nearest(first, COMMANDS)}")


def main() -> NoReturn:
    """What the console command `moezoo` runs."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        execute(COMMANDS[arguments[0]], arguments[1:], f"moezoo {arguments[0]}")
    execute(_ListCommands("moezoo", "list the commands"), arguments, "moezoo")


def run_script(name: str) -> NoReturn:
    """What a script runs: the command of that name."""
    execute(COMMANDS[name], sys.argv[1:], f"python {sys.argv[0]}")
