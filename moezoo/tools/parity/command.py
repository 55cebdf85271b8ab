"""`moezoo parity`: compare a Hugging Face folder in moezoo and in transformers, module by module."""

import dataclasses
from collections.abc import Sequence

from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read
from moezoo.typed import Count, Positive, Size


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    folder: str = key("a Hugging Face model folder, with config.json and safetensors", "FOLDER")
    tokens: Size = key("random tokens that both models read, as one sequence", default=16)
    tolerance: Positive = key(
        "largest difference of a module's result, relative to the largest value of that result in transformers",
        "1e-4",
        default=1e-4,
    )
    seed: Count = key("seed of the tokens", default=0)


def main(arguments: Sequence[str]) -> int:
    """Compare and print the table; return 1 when a module diverges."""
    from moezoo.parallel.mesh import check_precision, start
    from moezoo.tools.parity.compare import compare

    keys = read(Keys, arguments)
    check_precision()
    start()
    result = compare(keys.folder, keys.tokens, seed=keys.seed, tolerance=keys.tolerance)
    print(result)
    return 0 if result.first is None else 1


COMMAND = KeysCommand(
    "parity",
    "compare a Hugging Face folder with transformers",
    main,
    description="Compare a Hugging Face folder in moezoo and in transformers, module by module. Both read the same\n"
    "random tokens in float32; the first module whose results differ is named. Both models are in\n"
    "memory together. Needs PyTorch and transformers: pip install 'moezoo[peers]'.\n"
    "Exit codes: 0 when all modules agree, 1 when one diverges, 2 after a mistake.",
    keys=Keys,
    examples=("folder=FOLDER", "folder=FOLDER tokens=512 tolerance=1e-5"),
)
