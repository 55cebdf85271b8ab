"""Compare a Hugging Face folder with transformers module by module: `python scripts/parity.py folder=FOLDER`."""

import os
import sys

# Python puts this folder first on its path, where tokenize.py would stand in for the standard library's module.
if (here := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(here)

import dataclasses
from collections.abc import Sequence

from moezoo import cli, options
from moezoo.convert import Checks, Range
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Keys:
    """What can be set."""

    folder: str = ""
    tokens: int = 16
    tolerance: float = 1e-4
    seed: int = 0


RANGES = {
    "tokens": Range(at_least=1),
    "tolerance": Range(above=0),
    "seed": Range(at_least=0),
}


def main(overrides: Sequence[str]) -> int:
    """Compare, and print the table; 1 when a module diverges."""
    keys = options.read(Keys, overrides, Checks(ranges=RANGES))
    if not keys.folder:
        raise UserError("folder is missing; write folder=FOLDER with a Hugging Face model folder")
    from moezoo.parity import compare

    result = compare(keys.folder, keys.tokens, seed=keys.seed, tolerance=keys.tolerance)
    print(result)
    return 0 if result.first is None else 1


if __name__ == "__main__":
    cli.run(
        main,
        description="Compare a Hugging Face folder in moezoo and in transformers, module by module: both read the\n"
        "same random tokens in float32, and the first module whose results differ is named.\n"
        'Needs PyTorch and transformers: pip install -e ".[peers]". Both models are in memory at once.\n'
        "Exit codes: 0 when all modules agree, 1 when one diverges, 2 after a mistake.",
        keys=(
            "folder=FOLDER    a Hugging Face model folder, with config.json and safetensors",
            "tokens=16        random tokens that both read, as one sequence",
            "tolerance=1e-4   largest difference of a module's result, over the largest value transformers has there",
            "seed=0           of the tokens",
        ),
        examples=("folder=FOLDER", "folder=FOLDER tokens=512 tolerance=1e-5"),
    )
