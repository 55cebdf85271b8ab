"""All commands by name, and the choice of one by the first argument of a command line."""

import sys
from collections.abc import Mapping
from typing import NoReturn

import moezoo.tools.doctor.command as doctor
import moezoo.tools.parity.command as parity
import moezoo.tools.plan.command as plan
import moezoo.tools.routing.command as routing
import moezoo.tools.sharding.command as sharding
import moezoo.tools.sweep.command as sweep
from moezoo.cli import convert, evaluate, generate, prepare_data, train
from moezoo.cli.command import VERSION, Command, execute, print_and_exit, print_versions, refuse
from moezoo.cli.help import table
from moezoo.errors import UserError, nearest
from moezoo.tools import compare
from moezoo.typed import show

COMMANDS: dict[str, Command] = {
    module.COMMAND.name: module.COMMAND
    for module in (
        train,
        sweep,
        compare,
        evaluate,
        generate,
        routing,
        convert,
        sharding,
        plan,
        parity,
        prepare_data,
        doctor,
    )
}


def choose(commands: Mapping[str, Command], prog: str, what: str) -> NoReturn:
    """Run the one of `commands` that the first argument names, or print the list of them.

    `prog` is how the user called the program, and `what` the word for one of them.
    """
    first, *rest = sys.argv[1:] or ["--help"]
    if first in commands:
        execute(commands[first], rest, f"{prog} {first}")
    if first == VERSION:
        print_versions()
    if first not in ("--help", "-h"):
        name = show(first)
        if first.startswith("-"):
            refuse(UserError(f"{name}: no such option; valid: --help, {VERSION}, or a {what}: {', '.join(commands)}"))
        refuse(UserError(f"{prog} {name}: no such {what}; {nearest(first, commands)}"))
    rows, word = table((command.name, command.summary) for command in commands.values()), what.upper()
    usage, ending = f"usage: {prog} {word} [ARGUMENT ...]", f"{prog} {word} --help explains a {what}."
    print_and_exit("\n".join([usage, "", f"{what.capitalize()}s:", *rows, "", ending]))
