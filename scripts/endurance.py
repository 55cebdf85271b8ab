"""Try what a run survives: `python scripts/endurance.py folder=/tmp/endurance`; `--help` lists what can be set."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from collections.abc import Sequence
from pathlib import Path

from moezoo import cli, options
from moezoo.convert import Checks, Range
from moezoo.errors import UserError

RANGES = {
    "kills": Range(at_least=0),
    "signals": Range(at_least=0),
    "flips": Range(at_least=0),
    "checkpoint_every": Range(at_least=1),
}


def main(arguments: Sequence[str]) -> int:
    """Print the table, a line as soon as it is known; 1 where something was not as it must be."""
    from moezoo.endurance import Trial, endure

    if not any(argument.startswith("folder=") for argument in arguments):
        raise UserError("folder is missing; write folder=FOLDER with a new folder for the runs")
    trial, overrides = options.take(Trial, arguments, Checks(ranges=RANGES))
    train = Path(__file__).with_name("train.py")
    return 0 if endure(trial, train, overrides, lambda line: print(line, flush=True)) else 1


if __name__ == "__main__":
    cli.run(
        main,
        description="Train a tiny model twice, undisturbed and again and again killed, stopped and continued; compare\n"
        "every row of metrics.jsonl and every parameter, to the bit; then flip bits of what it left.\n"
        "Exit codes: 0 when all was as it must be, 1 when something was not, 2 after a mistake.",
        keys=(
            "folder=FOLDER        where the runs go, a new folder",
            "kills=20             kill -9: in a step, during a save, while starting, by turns",
            "signals=2            SIGTERM and SIGINT by turns, in a step",
            "flips=10             bits of a checkpoint's files, one at a time",
            "checkpoint_every=5   steps between two saves",
            "seed=0               of the moments",
            "other KEY=VALUE      as in scripts/train.py, such as mesh=ep8 dispatch=ragged",
        ),
        examples=("folder=/tmp/endurance", "folder=/tmp/endurance kills=3 flips=1 mesh=ep8 dispatch=ragged"),
    )
