"""Data: chats, in JSON objects, one per line, which a template turns into text."""

import dataclasses
import datetime
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from moezoo.data.cache import How, Kept
from moezoo.data.chat_format import ChatFormat, EncodedChat, LossOn
from moezoo.data.chat_records import LIKE, read_chat
from moezoo.data.chat_renderer import RenderError
from moezoo.data.chat_template import CONFIG, TEMPLATE, TOKENS, Template, file_template, folder_template
from moezoo.data.corpus import HELD_OUT, Ids, Split, hold_out, select_held_out_by_index
from moezoo.data.documents import Document, describe_nul
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found, find_files
from moezoo.data.jsonl import parse_object, read_lines
from moezoo.data.packing import Packing
from moezoo.data.source import Source
from moezoo.data.tokenizer import HuggingFace, Tokenizer, text_tokenizer
from moezoo.errors import UserError, locating
from moezoo.typed import show

# What a template sees as today, unless it is set: a date that changes would change the data.
DATE = "2025-01-01"
_MADE = 2  # how a chat becomes ids; another number makes older entries of the cache unused


@dataclasses.dataclass(frozen=True)
class Chat(FileSettings):
    """Chats, as `moezoo.data.chat_records.read_chat` takes them, one per line, in a chat template.

    - `field`: the key of the messages in each object;
    - `template`: a file with the template; None for that in the folder of `tokenizer`;
    - `date`: what the template sees as today, as YYYY-MM-DD;
    - `loss_on`: which tokens are predicted, as in `moezoo.data.chat_format.ChatFormat.encode`. With `each`, a chat is a
      document for each turn of the assistant: the chat up to there as the template shows it then, with the loss on it;
    - `too_long`: whether a chat that is longer than a row is cut at its end, or left out; chats in `packing=stream` are
      neither;
    - `end_token`: a token at which answers end, next to those by which the template ends them and `eos_token` of
      tokenizer_config.json. It is added to no chat: the template writes what ends a turn.
    """

    field: str = "messages"
    template: str | None = None
    date: str = DATE
    loss_on: LossOn = "assistant"
    too_long: Literal["cut", "drop"] = "cut"
    packing: Packing = dataclasses.field(default="whole", kw_only=True)

    kind: ClassVar[str] = "chat"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    answers: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError as error:
            shown = show(f"data.date={self.date}")
            raise UserError(f"{shown} is no date ({error}); write one such as {DATE}") from None

    @property
    def reader(self) -> str:
        template = self.read_template()
        digest = hashlib.sha256(json.dumps([template.texts, template.variables]).encode()).hexdigest()
        return f"chat {_MADE} {self.field} {self.loss_on} {self.date} {digest}"

    def documents(self, found: Found) -> Iterator[Document]:
        for number, line in enumerate(read_lines(found)):
            record = parse_object(line.text, line.where, LIKE)
            if self.loss_on != "each":
                yield line
                continue
            with locating(line.where):
                turns = read_chat(record, self.field).turns
            yield from (line._replace(turn=turn, name=str(number)) for turn in turns)

    def load(self, *, seed: int, vocab: int) -> Source:
        source = super().load(seed=seed, vocab=vocab)
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        decode = tokenizer.decode_special if isinstance(tokenizer, HuggingFace) else tokenizer.decode
        return dataclasses.replace(source, decode=decode, too_long=self.too_long, held_out=())

    def describe(self, found: Found, read: Kept) -> dict[str, str]:
        facts = super().describe(found, read)
        if self.loss_on == "each":
            facts["examples"] = f"{len(read.names):,}, one for each turn of {len(set(read.names)):,} chats"
        return facts

    def split(self, read: Kept) -> Split:
        if self.loss_on == "each" and len(set(read.names)) > 1:  # all turns of a chat are on the same side
            chats = np.array(read.names, np.int64)
            held_out = hold_out(read.corpus, select_held_out_by_index(chats.max() + 1)[chats])
            return held_out._replace(how=f"1 chat in {HELD_OUT}, by a hash of its index")
        # The hash of an index holds out one of two documents; of a single one, the end would be held out.
        if read.corpus.documents < 2:
            raise UserError(f"data.path={self.path} has one chat alone; give more, or set data.validation")
        return super().split(read)

    def encode_line(self, number: int) -> list[EncodedChat]:
        """Return what is trained of chat number `number`, from 1, of `path`. Raises `UserError` as training on it."""
        found = find_files(self.path or "", key="chat", suffixes=self.suffixes)
        document = next(itertools.islice(read_lines(found), number - 1, None), None)
        if document is None:
            raise UserError(f"{found.shown} has no chat number {number}; choose a smaller number")
        record = parse_object(document.text, document.where, LIKE)
        with self.format() as chats, locating(document.where):
            return chats.examples(read_chat(record, self.field), self.loss_on)

    def ends(self, tokenizer: Tokenizer, about: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        if not isinstance(tokenizer, HuggingFace):
            return ()
        found = next((each["answers_end"] for each in about if "answers_end" in each), None)
        if found is None:
            with self.format() as chats:
                found = chats.ends()
        return tuple(dict.fromkeys([*super().ends(tokenizer), *found]))

    def read_template(self) -> Template:
        """Return the chat template. Raises `UserError` if there is none, or it is damaged."""
        if self.template is not None:
            return file_template(self.template, key="data.template", tokenizer=self.tokenizer)
        if (tokenizer := self.tokenizer_file()) is None:
            raise UserError(
                "data.template is required for data=chat; pass data.template=FILE, or data.tokenizer=FILE in a folder "
                "that has a chat template"
            )
        return folder_template(tokenizer.parent, key=f"data.tokenizer={self.tokenizer}")

    def chat_files(self) -> dict[str, Path]:
        if (tokenizer := self.tokenizer_file()) is None:
            return {}
        found = {name: tokenizer.parent / name for name in (CONFIG, TOKENS, TEMPLATE)}
        if self.template is not None:
            own = Path(os.path.expanduser(self.template))
            del found[TEMPLATE]  # it would come before the one in the configuration
            found[CONFIG if own.suffix == ".json" else TEMPLATE] = own
        return {name: path for name, path in found.items() if path.is_file()}

    def format(self) -> ChatFormat:
        """Return what renders chats and makes their tokens; close it after use. Raises `UserError` as it does."""
        return ChatFormat(self.read_template(), text_tokenizer(self.tokenizer, key="data.tokenizer"), self.date)

    def _how(self, vocab: int) -> How:
        return super()._how(vocab)._replace(end=None)

    def _read(self, found: Found, how: How) -> Kept:
        lost: list[str] = []
        nul: dict[str, int] = {}
        with self.format() as chats:

            def make(document: Document) -> Ids:
                chat, loss_on = read_chat(json.loads(document.text), self.field), self.loss_on
                if document.turn is not None:
                    chat, loss_on = chat.until(document.turn), "last"
                try:
                    encoded = chats.encode(chat, loss_on)
                except RenderError as error:
                    if error.fault != "ended":
                        raise
                    lost.append(f"{document.where} is left out: {error}")  # no other chat is the worse for it
                    return Ids(np.zeros(0, how.dtype), np.zeros(0, bool))
                nul[document.where] = encoded.text.count("\0")
                return Ids(encoded.ids.astype(how.dtype), encoded.mask)

            def about() -> dict[str, Any]:
                return {"notes": [*chats.notes(), *lost, *describe_nul(nul)], "answers_end": chats.ends()}

            nothing = f"the template {self.read_template().shown} writes nothing for these chats; give another template"
            return super()._read(found, how._replace(make=make, about=about, nothing=nothing))


def folder_format(folder: str) -> ChatFormat:
    """Return what renders chats for the model of a Hugging Face folder. Raises `UserError` where it has no template."""
    template = folder_template(folder, key=f"folder={folder}", advice=f"write {TEMPLATE} there")
    return ChatFormat(template, HuggingFace(Path(os.path.expanduser(folder)) / "tokenizer.json", key="tokenizer"), DATE)


def folder_ends(folder: str) -> tuple[int, ...]:
    """Return the tokens at which answers end in the template of a folder. Raises as `folder_format` does."""
    with folder_format(folder) as chats:
        return chats.ends()
