"""The command line: `moezoo COMMAND ...`, and the scripts of the same names.

The commands are in `moezoo.cli.console`. It is imported when signals already end the process without a traceback.
"""

import moezoo.interrupts as interrupts


def main() -> None:
    """Run the console command `moezoo`, which exits."""
    with interrupts.ending():
        from moezoo.cli import console

        console.main()


def run_script(name: str) -> None:
    """Run the command of a script, which exits."""
    with interrupts.ending():
        from moezoo.cli import console

        console.run_script(name)
