"""`moezoo prepare-data`: turn text into a file of token ids for `data=tokens`."""

import dataclasses
from collections.abc import Sequence

from moezoo.cli.command import KeysCommand
from moezoo.config import options
from moezoo.data import tokenize_files
from moezoo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Keys:
    """What can be set."""

    path: str = ""
    out: str = ""
    tokenizer: str | None = None


def main(arguments: Sequence[str]) -> None:
    """Write the files, and print a line that says what is in them."""
    keys = options.read(Keys, arguments)
    for name, what in (("path", "path=FILE_OR_FOLDER with the text"), ("out", "out=FILE.npy with a new file")):
        if not getattr(keys, name):
            raise UserError(f"{name} is missing; write {what}")
    print(tokenize_files(keys.path, keys.out, keys.tokenizer))


COMMAND = KeysCommand(
    "prepare-data",
    "turn text into a file of token ids for data=tokens",
    main,
    description="Turn text into a file of token ids for data=tokens. Beside FILE.npy it writes FILE.offsets.npy\n"
    "(where documents begin), FILE.json and, where there is a tokenizer, FILE.tokenizer.json.",
    keys=(
        "path=FILE_OR_FOLDER   a UTF-8 text file, or a folder of them: every file is a document",
        "out=FILE.npy          where the ids go, uint16 or uint32; must not exist yet",
        "tokenizer=FILE        a Hugging Face tokenizer.json; without one tokens are raw bytes",
    ),
    examples=("path=FOLDER out=tokens.npy", "path=FOLDER out=tokens.npy tokenizer=tokenizer.json"),
)
