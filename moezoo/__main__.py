"""The command line: `moezoo COMMAND ...`, and `python -m moezoo COMMAND ...`.

The commands are in `moezoo.tools.commands`. It is imported when signals already end the process without a traceback.
"""

import sys

import moezoo.interrupts as interrupts


def main() -> None:
    """Run the console command `moezoo`, which exits."""
    with interrupts.ending():
        import moezoo.tools.commands as commands  # `from moezoo import` would import JAX

        commands.choose(commands.COMMANDS, "moezoo", "command")


def run_script(name: str) -> None:
    """Run one command with the arguments of this process, for a script; exits."""
    with interrupts.ending():
        import moezoo.tools.commands as commands  # `from moezoo import` would import JAX

        commands.execute(commands.COMMANDS[name], sys.argv[1:], f"python {sys.argv[0]}")


if __name__ == "__main__":
    main()
