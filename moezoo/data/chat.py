"""Data: chats, in records of several forms, which a template turns into text."""

import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from moezoo.data.cache import cache_folder, kept
from moezoo.data.chat_format import ChatFormat, EncodedChat, LossOn
from moezoo.data.chat_records import ROLES, columns, find_messages, read_chat
from moezoo.data.chat_template import CONFIG, TEMPLATE, TOKENS, RenderError, Template, file_template, folder_template
from moezoo.data.corpus import Ids
from moezoo.data.documents import Document, How, Make, describe_nul
from moezoo.data.file_settings import FileSettings
from moezoo.data.files import Found, find_files
from moezoo.data.held_out import Split, hold_out_chats
from moezoo.data.json_values import parse_record
from moezoo.data.packing import Packing
from moezoo.data.records import SUFFIXES, read_records
from moezoo.data.source import Source
from moezoo.data.token_files import TokenFiles
from moezoo.data.tokenizer import HuggingFace, Tokenizer, text_tokenizer
from moezoo.errors import UserError, locating
from moezoo.typed import show

# What a template sees as today, unless it is set: a date that changes would change the data.
DATE = "2025-01-01"
_NAMED = 3  # chats that are named with their reason, and reasons that are counted
_ENOUGH = 100  # refused chats after which a run ends that ends anyway
_MUCH = 0.1  # a larger share of the chats left out is warned of
_DROP = "correct them, or leave them out with data.refused=drop"
_MADE = 3  # how a chat becomes ids; another number makes older entries of the cache unused


@dataclasses.dataclass(frozen=True)
class Chat(FileSettings):
    """Chats, as `moezoo.data.chat_records.read_chat` takes them, in a chat template.

    - `field`: the key of the messages in each record, or two keys USER/ANSWER; "messages" stands for all known forms;
    - `roles`: roles by other names: theirs -> ours;
    - `refused`: whether chats that the template refuses end the run, or are left out. They are counted;
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
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Literal["stop", "drop"] = "stop"
    template: str | None = None
    date: str = DATE
    loss_on: LossOn = "assistant"
    too_long: Literal["cut", "drop"] = "cut"
    packing: Packing = dataclasses.field(default="whole", kw_only=True)

    kind: ClassVar[str] = "chat"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    answers: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError as error:
            shown = show(f"data.date={self.date}")
            raise UserError(f"{shown} is no date ({error}); write one such as {DATE}") from None
        if not 1 <= len(keys := self.field.split("/")) <= 2 or len({*filter(None, keys)}) < len(keys):
            raise UserError(f"{show(f'data.field={self.field}')}: expected a key, or two different ones as USER/ANSWER")
        for theirs, ours in self.roles.items():
            if ours not in ROLES:
                raise UserError(f"{show(f'data.roles.{theirs}={ours}')} is none of moezoo's; valid: {', '.join(ROLES)}")

    @property
    def reader(self) -> str:
        template = self.read_template()
        digest = hashlib.sha256(json.dumps([template.texts, template.variables]).encode()).hexdigest()
        settings = (self.field, dict(self.roles), self.refused, self.loss_on, self.date)
        return f"chat {_MADE} {json.dumps(settings)} {digest}"

    def documents(self, found: Found, seen: "Seen | None" = None) -> Iterator[Document]:
        """Yield documents, and count in `seen` what they are. Raises `UserError` when it has too many refused ones."""
        seen = seen or Seen(drop=True)
        for path in found.paths:
            yield from self._of_one_form(read_records(found._replace(paths=[path]), self._choose, chats=True), seen)

    def _of_one_form(self, records: Iterable[Document], seen: "Seen") -> Iterator[Document]:
        """Yield the documents of records that all have one form, as `documents` does."""
        first = None
        for record in records:
            value = parse_record(record.text, record.where)
            with locating(record.where):
                chat = find_messages(value, self.field, self.roles)
                if first is not None and chat.form != first[0]:
                    raise UserError(f"the form is {chat.form}, but {first[0]} at {first[1]}; make two files of it")
                turns = read_chat(value, self.field, self.roles).turns if self.loss_on == "each" else [None]
            if first is None:
                first = chat.form, record.where
                seen.forms[f"{chat.form} in {record.container}"] += 1
            yield from (record._replace(turn=turn, name=str(seen.chats) * (turn is not None)) for turn in turns)
            seen.chats += 1
            seen.empty += not turns
            seen.unread.update(chat.unread)
            seen.check(done=False)

    def _choose(self, names: Sequence[str]) -> list[str]:
        """Choose the columns to read of a table: those that a chat may have."""
        return columns(names, self.field)

    def load(self, *, seed: int, vocab: int) -> Source:
        source = super().load(seed=seed, vocab=vocab)
        tokenizer = text_tokenizer(self.tokenizer, key="data.tokenizer")
        decode = tokenizer.decode_special if isinstance(tokenizer, HuggingFace) else tokenizer.decode
        return dataclasses.replace(source, decode=decode, too_long=self.too_long, held_out=())

    def describe(self, found: Found, read: TokenFiles) -> dict[str, str]:
        facts = {**super().describe(found, read), "form": read.about["form"]}
        if self.loss_on == "each":
            facts["examples"] = f"{len(read.names):,}, one for each turn of {len(set(read.names)):,} chats"
        return facts

    def split(self, read: TokenFiles) -> Split:
        chats = np.arange(read.corpus.documents)
        if self.loss_on == "each":  # all turns of a chat are on the same side
            chats = np.unique(np.array(read.names, np.int64), return_inverse=True)[1]
        shown = show(f"data.path={self.path}")
        return hold_out_chats(read.corpus, self.held_out, hashes=read.hashes, chats=chats, shown=shown)

    def encode_line(self, number: int) -> list[EncodedChat]:
        """Return what is trained of chat number `number`, from 1, of `path`. Raises `UserError` as training on it."""
        found = find_files(self.path or "", key="chat", suffixes=self.suffixes)
        document = next(itertools.islice(read_records(found, self._choose, chats=True), number - 1, None), None)
        if document is None:
            raise UserError(f"{found.shown} has no chat number {number}; choose a smaller number")
        record = parse_record(document.text, document.where)
        with self.format() as chats, locating(document.where):
            return chats.examples(read_chat(record, self.field, self.roles), self.loss_on)

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

    def _read(self, found: Found, how: How) -> TokenFiles:
        seen = Seen(drop=self.refused == "drop")
        with self.format() as chats:

            def about() -> dict[str, Any]:
                seen.check(done=True)
                forms = (f"{form}: {number} files" if number > 1 else form for form, number in seen.forms.items())
                facts = {"answers_end": chats.ends(), "form": ", ".join(forms)}
                return {"notes": [*chats.notes(), *seen.notes()], "warnings": seen.warnings(), **facts}

            nothing = f"the template {self.read_template().shown} writes nothing for these chats; give another template"
            make = self._maker(chats, how.dtype, seen)
            how = how._replace(make=make, about=about, nothing=nothing, skips=True)
            return kept(cache_folder(self.cache), found, self.documents(found, seen), how)

    def _maker(self, chats: ChatFormat, dtype: np.dtype, seen: "Seen") -> Make:
        """Return what makes the ids and the mask of a chat; one that the template refuses has no token."""

        def make(document: Document) -> Ids:
            record = parse_record(document.text, document.where)
            chat, loss_on = read_chat(record, self.field, self.roles), self.loss_on
            if document.turn is not None:
                chat, loss_on = chat.until(document.turn), "last"
            try:
                encoded = chats.encode(chat, loss_on)
            except RenderError as error:
                seen.refuse(document.where, error)
                return Ids(np.zeros(0, dtype), np.zeros(0, bool))
            if count := encoded.text.count("\0"):
                seen.nul[document.where] += count
            return Ids(encoded.ids.astype(dtype), encoded.mask)

        return make


class Seen:
    """What was read, and the chats that a template refuses or fails for, from any number of threads.

    A chat whose process has ended, perhaps for lack of memory, is left out also without `drop`.

    - `chats`, `empty`: the number of chats, and of those without a turn to train in an example of its own;
    - `forms`: the number of files of each form and kind;
    - `unread`: the number of records with each key that is not read;
    - `nul`: the number of NUL characters by place.
    """

    def __init__(self, *, drop: bool, at_once: bool = False):
        """With `at_once`, the first refused chat that is not to be left out ends the run; others are not counted."""
        self._drop, self._at_once, self._lock = drop, at_once, threading.Lock()
        self._refused: dict[str, str] = {}
        self._ended: dict[str, str] = {}
        self.chats = self.empty = 0
        self.forms, self.unread, self.nul = Counter[str](), Counter[str](), Counter[str]()

    def refuse(self, where: str, error: RenderError) -> None:
        """Take note of a refused chat. Raises the error where it is a matter of the template alone."""
        ended = error.fault == "ended"
        if error.fault in ("unsafe", "syntax") or (self._at_once and not (self._drop or ended)):
            raise error
        if not self._at_once:
            with self._lock:
                (self._ended if ended else self._refused)[where] = str(error)

    def check(self, *, done: bool) -> None:
        """Raise `UserError` if chats were refused that are not to be left out, or all chats.

        Before all chats are read, that waits for many refused ones.
        """
        refused = len(self._refused)
        if (done and refused == self.chats > 0) or (not self._drop and refused >= (1 if done else _ENOUGH)):
            raise UserError(f"{self._describe(done=done)}; {'correct them' if self._drop else _DROP}")

    def notes(self) -> list[str]:
        """Return lines about what is left out, or not trained."""
        lines = [f"left out: {self._describe(done=True)}"] if self._refused else []
        lines += [f"{where} is left out: {why}" for where, why in _in_order(self._ended).items()]
        lines += [f"{self.empty:,} of {self.chats:,} chats have no turn to train"] if self.empty else []
        if self.unread:
            keys = [f"{show(key)} ({number:,})" for key, number in self.unread.most_common(8)]
            keys += [f"and {len(self.unread) - 8} others"] if len(self.unread) > 8 else []
            lines.append(f"keys of records that are not read: {', '.join(keys)}")
        return [*lines, *describe_nul(self.nul)]

    def warnings(self) -> list[str]:
        """Return a line where many chats are left out."""
        refused, chats = len(self._refused), self.chats
        if refused <= _MUCH * chats:
            return []
        return [f"{refused:,} of {chats:,} chats ({refused / chats:.0%}) are left out: the template refuses them"]

    def _describe(self, *, done: bool) -> str:
        """Return the first chats with their reasons and, of several, how many there are for which reasons."""
        with self._lock:
            found = _in_order(self._refused)
        first = "; ".join(f"{where}: {why}" for where, why in list(found.items())[:_NAMED])
        of = f" of {self.chats:,}" if done else " or more"
        if len(found) == 1:
            return f"{first} (1{of} chats)"
        reasons = Counter(found.values()).most_common()
        shown = [f"{number:,} by {why}" for why, number in reasons[:_NAMED]]
        rest = sum(number for _, number in reasons[_NAMED:])
        shown += [f"{rest:,} for other reasons"] * bool(rest)
        return f"{first}; in all {len(found):,}{of} chats: {', '.join(shown)}"


def _in_order(found: Mapping[str, str]) -> dict[str, str]:
    """Return what is said of places, in the order in which they are read: numbers in them count as such."""

    def key(where: str) -> list[str | int]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", where)]

    return dict(sorted(found.items(), key=lambda item: key(item[0])))


def folder_format(folder: str) -> ChatFormat:
    """Return what renders chats for the model of a Hugging Face folder. Raises `UserError` where it has no template."""
    template = folder_template(folder, key=f"folder={folder}", advice=f"write {TEMPLATE} there")
    return ChatFormat(template, HuggingFace(Path(os.path.expanduser(folder)) / "tokenizer.json", key="tokenizer"), DATE)


def folder_ends(folder: str) -> tuple[int, ...]:
    """Return the tokens at which answers end in the template of a folder. Raises as `folder_format` does."""
    with folder_format(folder) as chats:
        return chats.ends()
