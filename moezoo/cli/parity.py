"""`moezoo parity`: a Hugging Face folder in moezoo and in transformers, module by module."""

import dataclasses
from collections.abc import Sequence

from moezoo.cli.command import KeysCommand
from moezoo.config import options
from moezoo.convert import Checks, Range
from moezoo.errors import UserError
from moezoo.hub.parity import compare


@dataclasses.dataclass(frozen=True)
class Keys:
    """What can be set."""

    folder: str = ""
    tokens: int = 16
    tolerance: float = 1e-4
    seed: int = 0


_RANGES = {"tokens": Range(at_least=1), "tolerance": Range(above=0), "seed": Range(at_least=0)}


def main(arguments: Sequence[str]) -> int:
    """Compare, and print the table; 1 when a module diverges."""
    keys = options.read(Keys, arguments, Checks(ranges=_RANGES))
    if not keys.folder:
        raise UserError("folder is missing; write folder=FOLDER with a Hugging Face model folder")
    result = compare(keys.folder, keys.tokens, seed=keys.seed, tolerance=keys.tolerance)
    print(result)
    return 0 if result.first is None else 1


COMMAND = KeysCommand(
    "parity",
    "compare a Hugging Face folder with transformers",
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
