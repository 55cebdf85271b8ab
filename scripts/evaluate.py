"""Evaluate a run: `python scripts/evaluate.py run_dir=runs/NAME mesh=single dispatch=gather`."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from collections.abc import Sequence

from moezoo import cli
from moezoo.errors import UserError


def split(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The run's folder, and what to change in its configuration."""
    folders = [o.partition("=")[2] for o in overrides if o.startswith("run_dir=")]
    if not folders or not folders[-1]:
        raise UserError("run_dir is missing; write run_dir=FOLDER with the folder of a run")
    return folders[-1], [o for o in overrides if not o.startswith("run_dir=")]


def configure(*overrides: str):
    """The run's configuration with overrides on top."""
    import moezoo

    folder, changes = split(overrides)
    return moezoo.saved_config(folder, *changes)


def main(overrides: Sequence[str]) -> None:
    """Load the run's last checkpoint and print its validation loss."""
    import moezoo

    folder, changes = split(overrides)
    model, cfg = moezoo.load_run(folder, *changes)
    result = moezoo.evaluate(model, cfg)
    over = f"{result.tokens:,} {result.unit}s, {result.dropped} dropped"
    print(f"validation  {result.loss:.6f} nats a {result.unit} over {over}")


if __name__ == "__main__":
    cli.run(
        main,
        description="Evaluate the last checkpoint of the run in run_dir, on its validation data.\n"
        "What is not set is the run's own; what concerns training alone changes nothing.",
        configure=configure,
        examples=("run_dir=runs/NAME", "run_dir=runs/NAME mesh=single dispatch=gather data.eval_sequences=0"),
    )
