"""Data: chats, in JSON objects, one per line, which a template turns into text."""

import dataclasses
import datetime
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from moezoo.data.cache import How, Kept
from moezoo.data.chat_format import ChatFormat, EncodedChat, LossOn
from moezoo.data.chat_records import read_chat
from moezoo.data.chat_template import CONFIG, TEMPLATE, TOKENS, Template, file_template, folder_template
from moezoo.data.corpus import Ids, Split
from moezoo.data.documents import Document
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found, find_files
from moezoo.data.jsonl import parse_object, read_lines
from moezoo.data.packing import Packing
from moezoo.data.source import Source
from moezoo.data.tokenizer import Bytes, HuggingFace, Tokenizer, text_tokenizer
from moezoo.errors import UserError
from moezoo.typed import show

# What a template sees as today, unless it is set: a date that changes would change the data.
DATE = "2025-01-01"
_MADE = 2  # how a chat becomes ids; another number makes older entries of the cache unused
_LIKE = '{"messages": [{"role": ..., "content": ...}, ...]}'


@dataclasses.dataclass(frozen=True)
class Chat(FileSettings):
    """Chats, as `moezoo.data.chat_records.read_chat` takes them, one per line, in a chat template.

    - `field`: the key of the messages in each object;
    - `template`: a file with the template; None for that in the folder of `tokenizer`;
    - `date`: what the template sees as today, as YYYY-MM-DD;
    - `loss_on`: which tokens are predicted, as in `moezoo.data.chat_format.ChatFormat.encode`;
    - `too_long`: whether a chat that is longer than a row is cut at its end, or left out; chats in `packing=stream` are
      neither;
    - `end_token`: a token at which answers end, next to `eos_token` of tokenizer_config.json. It is added to no chat:
      the template writes what ends a turn.
    """

    field: str = "messages"
    template: str | None = None
    date: str = DATE
    loss_on: LossOn = "assistant"
    too_long: Literal["cut", "drop"] = "cut"
    packing: Packing = dataclasses.field(default="whole", kw_only=True)

    kind: ClassVar[str] = "chat"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def __post_init__(self):
        super().__post_init__()
        check_date(self.date, key="data.date")

    @property
    def reader(self) -> str:
        template = self.read_template()
        digest = hashlib.sha256(json.dumps([template.texts, template.variables]).encode()).hexdigest()
        return f"chat {_MADE} {self.field} {self.loss_on} {self.date} {digest}"

    def documents(self, found: Found) -> Iterator[Document]:
        for line in read_lines(found):
            parse_object(line.text, line.where, _LIKE)
            yield line

    def load(self, *, seed: int, vocab: int) -> Source:
        source, tokenizer = super().load(seed=seed, vocab=vocab), self.read_tokenizer()
        decode = tokenizer.decode_special if isinstance(tokenizer, HuggingFace) else tokenizer.decode
        return dataclasses.replace(source, decode=decode, ends=self.ends(tokenizer), too_long=self.too_long)

    def split(self, read: Kept) -> Split:
        # The hash of an index holds out one of two documents; of a single one, the end would be held out.
        if read.corpus.documents < 2:
            raise UserError(f"data.path={self.path} has one chat alone; give more, or set data.validation")
        return super().split(read)

    def encode_line(self, number: int) -> EncodedChat:
        """Return the chat number `number`, from 1, of `path`. Raises `UserError` as training on it does."""
        found = find_files(self.path or "", key="chat", suffixes=self.suffixes)
        document = next(itertools.islice(self.documents(found), number - 1, None), None)
        if document is None:
            raise UserError(f"{found.shown} has no chat number {number}; choose a smaller number")
        with self.format() as chats:
            try:
                return self._encode(chats, document)
            except UserError as error:
                raise UserError(f"{document.where}: {error}") from error

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        if not isinstance(tokenizer, HuggingFace):
            return ()
        return _ends(tokenizer, self.end_token, self.read_template())

    def read_template(self) -> Template:
        """Return the chat template. Raises `UserError` if there is none, or it is damaged."""
        if self.template is not None:
            return file_template(self.template, key="data.template", tokenizer=self.tokenizer)
        if self.tokenizer is None:
            raise UserError(
                "data.template is required for data=chat; pass data.template=FILE, or data.tokenizer=FILE in a folder "
                "that has a chat template"
            )
        folder = Path(os.path.expanduser(self.tokenizer)).parent
        return folder_template(folder, key=f"data.tokenizer={self.tokenizer}")

    def chat_files(self) -> dict[str, Path]:
        if self.tokenizer is None:
            return {}
        beside = Path(os.path.expanduser(self.tokenizer)).parent
        found = {name: beside / name for name in (CONFIG, TOKENS, TEMPLATE) if (beside / name).is_file()}
        if self.template is None:
            return found
        own = Path(os.path.expanduser(self.template))
        if own.suffix != ".json":
            return {**found, TEMPLATE: own}
        found.pop(TEMPLATE, None)  # it would come before the one in the configuration
        return {**found, CONFIG: own}

    def read_tokenizer(self) -> Bytes | HuggingFace:
        """Return the tokenizer. Raises `UserError` for a file that is none."""
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        assert isinstance(tokenizer, Bytes | HuggingFace)
        return tokenizer

    def format(self) -> ChatFormat:
        """Return what renders chats and makes their tokens; close it after use. Raises `UserError` as it does."""
        return ChatFormat(self.read_template(), self.read_tokenizer(), self.date)

    def _how(self, vocab: int) -> How:
        return super()._how(vocab)._replace(end=None)

    def _read(self, found: Found, how: How) -> Kept:
        with self.format() as chats:

            def make(document: Document) -> Ids:
                encoded = self._encode(chats, document)
                return Ids(encoded.ids.astype(how.dtype), encoded.mask)

            return super()._read(found, how._replace(make=make))

    def _encode(self, chats: ChatFormat, document: Document) -> EncodedChat:
        return chats.encode(read_chat(json.loads(document.text), self.field), self.loss_on)


def folder_format(folder: str) -> ChatFormat:
    """Return what renders chats for the model of a Hugging Face folder. Raises `UserError` where it has no template."""
    return ChatFormat(_own_template(folder), _folder_tokenizer(folder), DATE)


def folder_ends(folder: str) -> tuple[int, ...]:
    """Return the tokens at which answers end in the template of a folder. Raises as `folder_format` does."""
    return _ends(_folder_tokenizer(folder), None, _own_template(folder))


def _own_template(folder: str) -> Template:
    return folder_template(folder, key=f"folder={folder}", advice=f"write {TEMPLATE} there")


def _folder_tokenizer(folder: str) -> HuggingFace:
    return HuggingFace(Path(os.path.expanduser(folder)) / "tokenizer.json", key="tokenizer")


def _ends(tokenizer: HuggingFace, end_token: str | None, template: Template) -> tuple[int, ...]:
    ids = [tokenizer.token_id(text) for text in (end_token, template.variables.get("eos_token")) if text]
    return tuple(dict.fromkeys(number for number in ids if number is not None))


def check_date(date: str, *, key: str) -> None:
    """Raise `UserError`, naming `key`, unless a text is a date such as 2025-01-01."""
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UserError(f"{show(f'{key}={date}')} is no date ({error}); write one such as {DATE}") from None
