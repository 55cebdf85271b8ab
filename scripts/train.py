"""Train a model: `python scripts/train.py model=mixtral mesh=ep8`; `--help` lists what can be set."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

from collections.abc import Sequence

from moezoo import cli


def main(overrides: Sequence[str]) -> None:
    """Compose and train."""
    import moezoo

    moezoo.train(moezoo.compose(*overrides))


if __name__ == "__main__":
    cli.run(main, description="Train a model; everything it leaves is in run_dir.")
