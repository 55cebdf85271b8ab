"""All commands by name, and the console command that runs one of them."""

import sys
from typing import NoReturn

from moezoo.cli import bench, endurance, evaluate, generate, parity, prepare_data, sharding, train
from moezoo.cli.command import Command, drop_output, execute, refuse
from moezoo.cli.help import table
from moezoo.convert import show
from moezoo.errors import UserError, nearest

COMMANDS: dict[str, Command] = {
    module.COMMAND.name: module.COMMAND
    for module in (train, evaluate, generate, sharding, parity, prepare_data, bench, endurance)
}


def main() -> NoReturn:
    """Run the console command `moezoo`: one of the commands, or the list of them."""
    first, *rest = sys.argv[1:] or ["--help"]
    if first in COMMANDS:
        execute(COMMANDS[first], rest, f"moezoo {first}")
    if first not in ("--help", "-h"):
        name = show(first)
        if first.startswith("-"):
            refuse(UserError(f"{name}: no such option; valid: --help, or a command: {', '.join(COMMANDS)}"))
        refuse(UserError(f"moezoo {name}: no such command; {nearest(first, COMMANDS)}"))
    commands = table((command.name, command.summary) for command in COMMANDS.values())
    ending = "moezoo COMMAND --help explains a command."
    try:
        print("\n".join(["usage: moezoo COMMAND [ARGUMENT ...]", "", "Commands:", *commands, "", ending]), flush=True)
    except BrokenPipeError:
        sys.exit(drop_output())
    sys.exit(0)


def run_script(name: str) -> NoReturn:
    """Run the command of a script."""
    execute(COMMANDS[name], sys.argv[1:], f"python {sys.argv[0]}")
