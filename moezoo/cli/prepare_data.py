"""`moezoo prepare-data`: convert text to a file of token ids for `data=tokens`."""

import dataclasses
from collections.abc import Sequence

from moezoo.cli.command import KeysCommand
from moezoo.config.options import key, read


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    path: str = key("a UTF-8 text file, or a folder with one document per file", "FILE_OR_FOLDER")
    out: str = key("the file to write, which must not exist yet; ids are uint16 or uint32", "FILE.npy")
    tokenizer: str | None = key(
        "a Hugging Face tokenizer.json; without one, each byte is a token", "FILE", default=None
    )


def main(arguments: Sequence[str]) -> None:
    """Write the files and print a line that describes them."""
    from moezoo.data import tokenize_files

    keys = read(Keys, arguments)
    print(tokenize_files(keys.path, keys.out, keys.tokenizer))


COMMAND = KeysCommand(
    "prepare-data",
    "convert text to a file of token ids for data=tokens",
    main,
    description="Convert text to a file of token ids for data=tokens. Next to FILE.npy it writes FILE.offsets.npy\n"
    "(where each document begins), FILE.json and, with a tokenizer, FILE.tokenizer.json.",
    keys=Keys,
    examples=("path=FOLDER out=tokens.npy", "path=FOLDER out=tokens.npy tokenizer=tokenizer.json"),
)
