"""The tokens of a chat in its template, and which of them a model learns to predict."""

import collections
import contextlib
import functools
import itertools
import json
import re
import threading
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from moezoo.data.chat_records import Chat, Message
from moezoo.data.chat_template import RefusedError, Renderer, RenderError, Template, missing_tokens
from moezoo.data.chat_turns import BLOCK, Turn, Turns, UnclearTurnError, shared
from moezoo.data.tokenizer import Bytes, Guarded, HuggingFace
from moezoo.errors import UserError, nearest
from moezoo.typed import counted, show

LossOn = Literal["assistant", "last", "each", "all"]
_WORD, _ID = "Zqj", "000000000"  # a text that no template has, and the id of a call, as Mistral's templates want it
_USER, _ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": _WORD}
_FUNCTION = {"name": "f", "arguments": {"x": _WORD}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": _ID, "function": _FUNCTION}]}
_RESULT = {"role": "tool", "content": "x", "tool_call_id": _ID}


class EncodedChat(NamedTuple):
    """A chat as tokens.

    - `text`: as the template writes it;
    - `ids`: the tokens of the text;
    - `begins`: the index in the text of the first character of each token;
    - `mask`: whether a token is predicted: whether one of its characters is trained.
    """

    text: str
    ids: Int64[np.ndarray, "tokens"]
    begins: Int64[np.ndarray, "tokens"]
    mask: Bool[np.ndarray, "tokens"]

    def with_marks(self, begin: str, end: str) -> str:
        """Return the text with `begin` and `end` around what is predicted."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False))
        places = [0, *np.append(self.begins, len(self.text))[edges].tolist(), len(self.text)]
        *parts, rest = (self.text[first:last] for first, last in itertools.pairwise(places))
        marked = zip(parts, itertools.cycle((begin, end)), strict=False)
        return "".join(itertools.chain.from_iterable(marked)) + rest


class ChatFormat:
    """Chats in a template, as tokens of a tokenizer; from any number of threads. `close` ends its processes.

    Args:
        template: The template.
        tokenizer: Bytes, or the tokenizer of the template's special tokens.
        date: What the template sees as today, as YYYY-MM-DD.

    Raises:
        UserError: The library jinja2 is not installed, or too old.
    """

    def __init__(self, template: Template, tokenizer: Bytes | HuggingFace, date: str):
        self._template, self._tokenizer = template, tokenizer
        self._renderer = Renderer(template, date)
        self._turns = Turns(self._render)
        self._takes = functools.cache(self._find_taken)
        self._lock = threading.Lock()
        self._seen: collections.Counter[str] = collections.Counter()

    @functools.cached_property
    def _guarded(self) -> Guarded:
        return Guarded(self._tokenizer, self._template.texts.values())  # takes a moment, and data may be in the cache

    def __enter__(self) -> "ChatFormat":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    def examples(self, chat: Chat, loss_on: LossOn) -> list[EncodedChat]:
        """Return what is trained of a chat: with `each` one example for each turn. Raises as `encode` does."""
        if loss_on != "each":
            return [self.encode(chat, loss_on)]
        return [self.encode(chat.until(number), "last") for number in chat.turns]

    def encode(self, chat: Chat, loss_on: LossOn) -> EncodedChat:
        """Return the tokens of a chat.

        Args:
            chat: The chat.
            loss_on: Which tokens are predicted: those that the assistant has written, with the token that ends each of
                its turns (assistant); those of its last turn (last, and here also each); or all. What the assistant has
                written is what stands in the template's blocks `{% generation %}`, or else what
                `moezoo.data.chat_turns` finds, without white space after the token that ends it. Messages that the
                record excludes are not predicted.

        Raises:
            UserError: The template cannot render the chat, or the tokenizer cannot read the text or has a special token
                that cannot be told from its text.
            RenderError: As `Renderer.render`.
        """
        self._count(*(f"key {name}" for name in chat.others))
        try:
            chat, text = self._render_calls(self._guard(chat))
            spans = self._find_spans(chat, text, loss_on)
        except UnclearTurnError as error:
            instead = ", or set data.loss_on=each" if loss_on == "assistant" else ""
            raise UnclearTurnError(
                f"{self._template.shown} does not show which text is the assistant's: {error}; give a template that "
                f"has {{% generation %}} around it{instead}"
            ) from None
        if loss_on != "all" and spans and chat.turns[-1:] == [len(chat.messages) - 1]:
            text += spans[-1][1] or ""
        found, text = self._guarded.encode(text), self._guarded.restore(text)
        mask = np.full(len(found.ids), loss_on == "all")
        special = found.begins[found.special], found.ends[found.special]
        for turn, closing in spans:
            first = np.searchsorted(found.ends, turn.begin, side="right")
            mask[first : np.searchsorted(found.begins, _find_end(turn, closing, text, *special))] = loss_on != "all"
        return EncodedChat(text, found.ids, found.begins, mask)

    def prompt(self, chat: Chat) -> EncodedChat:
        """Return the tokens of a chat and of the beginning of an answer to it. Raises `UserError` as `encode` does."""
        _, text = self._render_calls(self._guard(chat), prompt=True)
        found = self._guarded.encode(text)
        return EncodedChat(self._guarded.restore(text), found.ids, found.begins, np.zeros(len(found.ids), bool))

    def unfinished(self, chat: Chat) -> str:
        """Return the text of a chat up to the end of its last message, whose content a model continues.

        White space at the end of the content stays where the template keeps it. Raises `UserError` as `encode` does, or
        where the template does not show the content.
        """
        *before, last = chat.messages
        marked = chat._replace(messages=[*before, {**last, "content": f"{last['content']}{_WORD} "}])
        text, found, rest = self._render_calls(self._guard(marked))[1].rpartition(_WORD)
        if not found:
            raise UserError(f"{self._template.shown} does not show the last message, which is to be continued")
        return self._guarded.restore(text if rest.startswith(" ") else text.rstrip())

    def ends(self) -> tuple[int, ...]:
        """Return the tokens at which answers and calls of tools end: by the template, and `eos_token` of its folder."""
        found = [self._end(calls).token for calls in (False, True)]
        if isinstance(self._tokenizer, HuggingFace):
            found.append(self._tokenizer.token_id(self._template.variables.get("eos_token") or ""))
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def notes(self) -> list[str]:
        """Return what a user should know of the chats that were encoded, in lines."""
        lines, shown, written = [], self._template.shown, "".join(self._template.texts.values())
        for fact, number in sorted(self._seen.items()):
            if fact == "arguments":
                lines.append(
                    f"{counted(number, 'example')} with the arguments of calls as text: {shown} fails with objects"
                )
            elif not re.search(rf"\b{re.escape(name := fact.removeprefix('key '))}\b", written):
                lines.append(
                    f"key {show(name)} in {counted(number, 'message')} has no effect: {shown} does not read it"
                )
        missing = missing_tokens(self._template, self._renderer.about(tools=False).names)
        lines += [missing] if missing else []
        with contextlib.suppress(RefusedError):  # a template may refuse such a chat
            prompt, text = self._render(_chat(_USER), prompt=True), self._render(self._guard(_chat(_USER, _ANSWER)))
            if not text.startswith(prompt):
                rest = json.dumps(prompt[max(0, len(shared([prompt, text])) - 30) :], ensure_ascii=False)
                lines.append(f"generate begins an answer behind {show(rest)}, which finished turns do not have")
        if isinstance(self._tokenizer, HuggingFace) and {self._end(calls).token for calls in (False, True)} == {None}:
            lines.append(f"{shown} writes no special token after an answer, so answers do not end; write one there")
        return lines

    def _count(self, *facts: str) -> None:
        with self._lock:
            self._seen.update(facts)

    def _guard(self, chat: Chat) -> Chat:
        """Return a chat with contents of the form that the template takes, in which no text is a special token."""

        def change(message: Message) -> Message:
            given = message.get("content", "")
            return _in_form(message, as_parts=self._takes(message["role"], isinstance(given, list)))

        return chat._replace(messages=[*map(change, chat.messages)]).guarded(self._guarded.guard)

    def _find_taken(self, role: str, given_parts: bool) -> bool:
        """Return whether the template gets the content of a role as parts."""
        before = {"assistant": [_USER], "tool": [_USER, {**_CALL, "content": "x"}]}.get(role, [])
        message = {**(_RESULT if role == "tool" else {"role": role}), "content": _WORD}
        after = [_USER] if role in ("system", "developer") else []

        def shows(*, as_parts: bool) -> bool:
            # A template may want the others so, or a message of the system.
            for others, system in itertools.product((False, True), ([], [{"role": "system", "content": "x"}])):
                known = [_in_form(each, as_parts=others) for each in (*system, *before)]
                with contextlib.suppress(RefusedError):
                    text = self._render(_chat(*known, _in_form(message, as_parts=as_parts), *after)).lower()
                    if _WORD.lower() in text and not re.search(f"text['\"]: ['\"]{_WORD.lower()}", text):
                        return True
            return False

        return given_parts == (shows(as_parts=given_parts) or not shows(as_parts=not given_parts))

    def _render(self, chat: Chat, **how: Any) -> str:
        asked = {"messages": chat.messages, "tools": chat.tools, "variables": chat.variables}
        return self._renderer.render({**asked, "prompt": False, "marks": ("", ""), "within": False, **how})

    def _render_calls(self, chat: Chat, *, prompt: bool = False) -> tuple[Chat, str]:
        """Return a chat with the arguments of calls in the form, objects or texts, that renders, and its text."""
        objects, texts = (chat.with_arguments(as_text=as_text) for as_text in (False, True))
        try:
            return objects, self._render(objects, prompt=prompt)
        except RefusedError:
            with contextlib.suppress(RenderError):
                if texts != objects:
                    text = self._render(texts, prompt=prompt)
                    self._count("arguments")
                    return texts, text
            raise

    def _find_spans(self, chat: Chat, text: str, loss_on: LossOn) -> list[tuple[Turn, str | None]]:
        """Return the parts of a text that are trained or, with `all`, are not.

        A turn of the assistant has what the next message writes to end it, or an empty text; other parts have None.
        """
        numbers = sorted(chat.excluded) if loss_on == "all" else chat.turns
        numbers = numbers[-1:] if loss_on in ("last", "each") else numbers
        own = {number for number in numbers if chat.messages[number]["role"] == "assistant"}
        if not self._renderer.about(tools=bool(chat.tools)).marked:
            turns = self._turns.find(chat, numbers, text)
            calls = {number: "tool_calls" in chat.messages[number] for number in own}
            ends = {number: "" if loss_on == "all" else self._end(calls[number]).closing for number in own}
            return [(turn, ends.get(number)) for number, turn in zip(numbers, turns, strict=True)]
        spans = self._turns.find(chat, [number for number in numbers if number not in own], text)
        every = loss_on == "assistant" and not chat.excluded
        if every or own:
            spans += self._find_blocks(chat, text, None if every else own)
        return [(span, None) for span in spans]

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise `UserError` unless the template has every one of these words, which are its variables."""
        words = {*re.findall(r"\w+", " ".join(self._template.texts.values()))}
        for name in names:
            if name not in words:
                near = nearest(name, words)
                advice = near if near.startswith("did") else "leave it out"
                raise UserError(f"template.{name}: {self._template.shown} has no such variable; {advice}")

    def _find_blocks(self, chat: Chat, text: str, messages: Collection[int] | None) -> list[Turn]:
        """Return the parts of a text that blocks `{% generation %}` of some messages have made; None for all blocks.

        A block is of the last message that has a text before the end of the block.
        """
        # A filter around a block may trim its white space, but no mark; some templates ask whether a content is empty.
        marking = (None,) if messages is None else (True, False)
        ways = [(empty, {"marks": BLOCK, "within": within}) for within in (False, True) for empty in marking]
        marks = self._turns.marks(chat, text, ways)
        edges = [mark.char for mark in marks or () if mark.char in BLOCK]
        if marks is None or edges != [*BLOCK] * (len(edges) // 2):
            why = "a block {% generation %} is inside another, cut, or in a filter that changes more than white space"
            raise UserError(f"{self._template.shown} fails for this chat ({why}); correct one of them")
        found, begin, number = [], 0, 0
        for mark in marks:
            if mark.char not in BLOCK:
                number = mark.number
            elif mark.char == BLOCK[0]:
                begin = mark.at
            elif begin < mark.at and (messages is None or number in messages):
                found.append(Turn(begin, mark.at))
        return found

    @functools.cache  # noqa: B019 as long as the format
    def _end(self, calls: bool) -> "_End":
        """Return how the template ends an answer, or a call of a tool."""
        messages = [_USER, _CALL, _RESULT] if calls else [_USER, _ANSWER, _USER]
        try:
            text, whole = (self._render(self._guard(_chat(*messages[:number]))) for number in (2, 3))
        except RefusedError:  # a template may refuse such a chat
            return _End()
        begin, found = text.rfind(_WORD) + len(_WORD), self._guarded.encode(text)
        inside = known = found.ids[found.special & (found.begins >= begin)].tolist()
        if calls:  # it may have special tokens after it that do not end it
            answer, eos = self._end(False), self._template.variables.get("eos_token") or ""
            known, inside = [answer.token, *self._guarded.encode(eos).ids.tolist()], [] if answer.closing else inside
        if inside:
            return _End(next((token for token in known if token in inside), inside[-1]))
        found = self._guarded.encode(whole)
        behind = np.flatnonzero(found.special & (found.begins >= len(text)))
        if not len(behind) or not whole.startswith(text) or whole[len(text) : found.begins[behind[0]]].strip():
            return _End()
        return _End(int(found.ids[behind[0]]), whole[len(text) : found.ends[behind[0]]])


class _End(NamedTuple):
    """The token that ends a turn; None where there is none. `closing` has it where it is the next message that writes
    it."""

    token: int | None = None
    closing: str = ""


def _chat(*messages: Message) -> Chat:
    return Chat([*messages], None, {})


def _in_form(message: Message, *, as_parts: bool) -> Message:
    """Return a message whose content is a list of parts, or a text."""
    if isinstance(content := message.get("content", []), str) == as_parts:
        content = [{"type": "text", "text": content}] if as_parts else "".join(part["text"] for part in content)
    return {**message, "content": content} if "content" in message else message


def _find_end(turn: Turn, closing: str | None, text: str, begins: np.ndarray, ends: np.ndarray) -> int:
    """Return where a turn ends for training: behind the special token that ends it, without white space after that.

    Special tokens are in the parts of the text from `begins` to `ends`.
    """
    # The first special token behind it, or the last one in it.
    at = int(np.searchsorted(begins, turn.end)) - (not closing)
    if closing is None or not 0 <= at < len(begins) or begins[at] < turn.begin:
        return turn.end
    between = text[turn.end : begins[at]] if closing else text[ends[at] : turn.end]
    return turn.end if between.strip() else int(ends[at])
