"""The command line: `moezoo COMMAND ...`, and the scripts of the same names."""

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


class _ListOfCommands(Command):
    """What `moezoo` does where its first argument names no command."""

    def call(self, arguments: Sequence[str], prog: str) -> int:
        """Print the commands, or refuse one that does not exist."""
        if not arguments or arguments[0] in ("--help", "-h"):
            lines = [f"  {command.name:<14}{command.summary}" for command in COMMANDS.values()]
            usage = f"usage: {prog} COMMAND [ARGUMENT ...]"
            print("\n".join([usage, "", "Commands:", *lines, "", f"{prog} COMMAND --help lists what can be set."]))
            return 0
        raise UserError(f"{prog} {show(arguments[0])}: no such command; {nearest(arguments[0], COMMANDS)}")


def main() -> NoReturn:
    """What the console command `moezoo` runs."""
    name, *arguments = sys.argv[1:] or [""]
    if name in COMMANDS:
        execute(COMMANDS[name], arguments, f"moezoo {name}")
    execute(_ListOfCommands("moezoo", ""), sys.argv[1:], "moezoo")


def run_script(name: str) -> NoReturn:
    """What a script runs: the command of that name."""
    execute(COMMANDS[name], sys.argv[1:], f"python {sys.argv[0]}")
