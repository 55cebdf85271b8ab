"""`moezoo prepare-data`: convert text to a file of token ids for `data=tokens`, or show how a chat is read."""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from moezoo.cli.command import KeysCommand
from moezoo.config.options import describe_keys, key, read
from moezoo.errors import UserError
from moezoo.typed import Size, show


@dataclasses.dataclass(frozen=True)
class Keys:
    """The command's options."""

    path: str | None = key(
        "a UTF-8 text file, or a folder with one document per file; with field, files of records",
        "FILE_OR_FOLDER",
        default=None,
    )
    out: str | None = key(
        "the file to write, which must not exist yet; ids are uint16 or uint32", "FILE.npy", default=None
    )
    tokenizer: str | None = key(
        "a Hugging Face tokenizer.json; without one, each byte is a token", "FILE", default=None
    )
    chat: str | None = key(
        "instead of path and out: a file of chats, as data=chat reads it; one of them is printed, and in colour or "
        "between [ and ] what is trained",
        "FILE",
        default=None,
    )
    folder: str | None = key(
        "with chat: a Hugging Face folder, of which tokenizer and chat template are taken", "FOLDER", default=None
    )
    template: str | None = key("with chat: a file with another chat template", "FILE", default=None)
    loss_on: Literal["assistant", "last", "each", "all"] = key(
        "with chat: which tokens are predicted, as data.loss_on", "assistant|last|each|all", default="assistant"
    )
    field: str | None = key(
        "with path: the key or column of the text in records (JSON lines, a JSON array, Parquet, Arrow); with chat: "
        "that of the messages, as data.field",
        "NAME",
        default=None,
    )
    roles: Mapping[str, str] | None = key(
        "with chat: a role by another name, as data.roles; repeat it for several", "user|assistant|...", default=None
    )
    number: Size = key("with chat: the number of the chat in the file", default=1)

    def __post_init__(self):
        if self.chat is None:
            for name in ("path", "out"):
                if getattr(self, name) is None:
                    shown, text = next(pair for pair in describe_keys(Keys) if pair[0].startswith(f"{name}="))
                    raise UserError(f"{name} is missing; write {shown}: {text}")
        elif self.path is not None or self.out is not None:
            raise UserError(f"chat={self.chat} prints a chat, and writes no file; leave path and out out")


def main(arguments: Sequence[str]) -> None:
    """Write the files and print a line that describes them, or print a chat."""
    keys = read(Keys, arguments)
    if keys.chat is not None:
        return _print_chat(keys)
    from moezoo.data import tokenize_files

    print(tokenize_files(keys.path or "", keys.out or "", keys.tokenizer, keys.field))


def _print_chat(keys: Keys) -> None:
    """Print a chat as it is trained on: what is predicted in colour, or in brackets where there is none."""
    from rich.console import Console

    from moezoo.data import Chat

    tokenizer = keys.tokenizer
    if keys.folder is not None:
        if not os.path.isdir(os.path.expanduser(keys.folder)):
            raise UserError(f"{show(f'folder={keys.folder}')} is no folder; name one with tokenizer.json")
        tokenizer = tokenizer or str(Path(keys.folder) / "tokenizer.json")
    how = {"field": keys.field, "roles": keys.roles}
    how = {name: value for name, value in how.items() if value is not None}
    chat = Chat(path=keys.chat, tokenizer=tokenizer, template=keys.template, loss_on=keys.loss_on, **how)
    try:
        examples = chat.encode_line(keys.number)
    except UserError as error:  # training has these keys in its section `data`
        raise UserError(re.sub(r"\bdata\.(template|tokenizer|loss_on|field|roles)\b", r"\1", str(error))) from error
    console = Console(highlight=False, soft_wrap=True)
    open_, close = ("\033[1;32m", "\033[0m") if console.color_system and not console.no_color else ("[", "]")
    for encoded in examples:
        print(encoded.with_marks(open_, close))
    tokens, predicted = sum(len(e.ids) for e in examples), sum(int(e.mask[1:].sum()) for e in examples)
    several = f"{len(examples)} examples: " * (len(examples) != 1)
    print(f"{several}{tokens:,} tokens, of which {predicted:,} are predicted", file=sys.stderr)


COMMAND = KeysCommand(
    "prepare-data",
    "convert text to token ids for data=tokens, or show a chat",
    main,
    description="Convert text to a file of token ids for data=tokens. Next to FILE.npy it writes FILE.offsets.npy\n"
    "(where each document begins), FILE.json and, with a tokenizer, FILE.tokenizer.json.\n"
    "With chat=FILE, print one chat in its template, and which tokens of it data=chat trains.",
    keys=Keys,
    examples=(
        "path=FOLDER out=tokens.npy",
        "path=FOLDER out=tokens.npy tokenizer=tokenizer.json",
        "path=FILE.parquet field=text out=tokens.npy",
        "chat=FILE.jsonl folder=FOLDER",
    ),
)
