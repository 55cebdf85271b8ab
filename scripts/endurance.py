"""Disturb a run: `python scripts/endurance.py folder=/tmp/endurance`. It is a part of the tests."""

import sys
from pathlib import Path

import moezoo.interrupts as interrupts

if __name__ == "__main__":
    with interrupts.ending():
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "training"))
        from endurance import COMMAND

        from moezoo.cli.command import execute

        execute(COMMAND, sys.argv[1:], f"python {sys.argv[0]}")
