"""The tokens of a chat in its template, and which of them a model learns to predict."""

import collections
import contextlib
import functools
import itertools
import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from moezoo.data.chat_records import Chat
from moezoo.data.chat_renderer import RefusedError, Renderer, RenderError
from moezoo.data.chat_template import Template, missing_tokens
from moezoo.data.chat_turns import MARKS, Turns, UnclearTurnError, mark_messages, marked_message, shared
from moezoo.data.guarded import Encoded, Guarded
from moezoo.data.tokenizer import Bytes, HuggingFace
from moezoo.errors import UserError, nearest
from moezoo.typed import show

LossOn = Literal["assistant", "last", "each", "all"]
# Two characters for private use, which no text may have: they stand around a block {% generation %}.
_MARKS = ("\U0010fffc", "\U0010fffd")
_BLOCK = re.compile("({0}[^{0}{1}]*{1})".format(*_MARKS))
_WORD, _ID = "Zqj", "000000000"  # a text that no template has, and the id of a call, as Mistral's templates want it
_USER = {"role": "user", "content": "x"}
_FUNCTION = {"name": "f", "arguments": {"x": _WORD}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": _ID, "function": _FUNCTION}]}


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
        parts, inside = [], False
        ends = np.append(self.begins, len(self.text))[1:]
        for first, last, predicted in zip(self.begins, ends, self.mask.tolist(), strict=True):
            parts.append((begin if predicted else end) * (predicted != inside) + self.text[first:last])
            inside = predicted
        return "".join(parts) + end * inside


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
        self._takes = functools.lru_cache(maxsize=None)(self._find_taken)
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
        chat = self._guard(chat)
        try:
            chat, text = self._render_calls(chat)
            spans, closing = self._find_spans(chat, text, loss_on)
        except UnclearTurnError as error:
            instead = ", or set data.loss_on=each" if loss_on == "assistant" else ""
            raise UnclearTurnError(
                f"{self._template.shown} does not show which text is the assistant's: {error}; give a template that "
                f"has {{% generation %}} around it{instead}"
            ) from None
        found = self._guarded.encode(text + closing)
        text = self._guarded.restore(text + closing)
        mask = np.full(len(found.ids), loss_on == "all")
        for span in spans:
            begin, end = _extend(span, text, found)
            first, last = np.searchsorted(found.ends, begin, side="right"), np.searchsorted(found.begins, end)
            mask[first:last] = loss_on != "all"
        return EncodedChat(text, found.ids, found.begins, mask)

    def prompt(self, chat: Chat) -> EncodedChat:
        """Return the tokens of a chat and of the beginning of an answer to it. Raises `UserError` as `encode` does."""
        _, text = self._render_calls(self._guard(chat), prompt=True)
        found = self._guarded.encode(text)
        return EncodedChat(self._guarded.restore(text), found.ids, found.begins, np.zeros(len(found.ids), bool))

    def ends(self) -> tuple[int, ...]:
        """Return the tokens by which the template ends an answer and a call of a tool; none where it writes none."""
        found = [end.token for calls in (False, True) if (end := self._end(calls)).token is not None]
        return tuple(dict.fromkeys(found))

    def notes(self) -> list[str]:
        """Return what a user should know of the chats that were encoded, in lines."""
        lines, shown, written = [], self._template.shown, "".join(self._template.texts.values())
        for fact, number in sorted(self._seen.items()):
            if fact == "arguments":
                lines.append(
                    f"{_counted(number, 'example')} with the arguments of calls as text: {shown} fails with objects"
                )
            elif not re.search(rf"\b{re.escape(name := fact.removeprefix('key '))}\b", written):
                lines.append(
                    f"key {show(name)} in {_counted(number, 'message')} has no effect: {shown} does not read it"
                )
        missing = missing_tokens(self._template, self._renderer.about(tools=False).names)
        lines += [missing] if missing else []
        with contextlib.suppress(RefusedError):  # a template may refuse such a chat
            prompt, text = self._render(Chat([_USER], None, {}), prompt=True), self._render(self._probe(_WORD))
            if not text.startswith(prompt):
                rest = json.dumps(prompt[max(0, len(shared([prompt, text])) - 30) :], ensure_ascii=False)
                lines.append(f"generate begins an answer behind {show(rest)}, which finished turns do not have")
        if isinstance(self._tokenizer, HuggingFace) and not self.ends():
            lines.append(f"{shown} writes no special token after an answer, so answers do not end; write one there")
        return lines

    def _count(self, *facts: str) -> None:
        with self._lock:
            self._seen.update(facts)

    def _guard(self, chat: Chat) -> Chat:
        """Return a chat with contents of the form that the template takes, in which no text is a special token."""

        def form(role: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
            as_parts = self._takes(role, isinstance(content, list))
            if isinstance(content, str):
                return [{"type": "text", "text": content}] if as_parts else content
            return content if as_parts else "".join(part["text"] for part in content)

        def change(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**m, "content": form(m["role"], m["content"])} if "content" in m else m for m in messages]

        calls = None if chat.text_calls is None else change(chat.text_calls)
        return chat._replace(messages=change(chat.messages), text_calls=calls).guarded(self._guarded.guard)

    def _probe(self, word: str, *after: dict[str, Any]) -> Chat:
        """Return a chat in which the assistant has written a word, and the messages after it."""
        return self._guard(Chat([_USER, {"role": "assistant", "content": word}, *after], None, {}))

    def _find_taken(self, role: str, given_parts: bool) -> bool:
        """Return whether the template gets the content of a role as parts."""
        user, call = [_USER], [_USER, {**_CALL, "content": "x"}]
        before: dict[str, list[dict[str, Any]]] = {"assistant": user, "tool": call}
        after = user if role in ("system", "developer") else []

        def shows(content: Any) -> bool:
            message = {"role": role, "content": content, **({"tool_call_id": _ID} if role == "tool" else {})}
            for as_content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
                others = [{**each, "content": as_content(each["content"])} for each in before.get(role, [])]
                for system in ([], [{"role": "system", "content": as_content("x")}]):
                    with contextlib.suppress(RefusedError):  # a template may want the others so, or a system message
                        text = self._render(Chat([*system, *others, message, *after], None, {})).lower()
                        if _WORD.lower() in text and not re.search(f"text['\"]: ['\"]{_WORD.lower()}", text):
                            return True
            return False

        parts = [{"type": "text", "text": _WORD}]
        return shows(parts) or not shows(_WORD) if given_parts else not shows(_WORD) and shows(parts)

    def _render(self, chat: Chat, **how: Any) -> str:
        asked = {"messages": chat.messages, "tools": chat.tools, "variables": chat.variables}
        return self._renderer.render({**asked, "prompt": False, "marks": ("", ""), "within": False, **how})

    def _render_calls(self, chat: Chat, *, prompt: bool = False) -> tuple[Chat, str]:
        """Return a chat with the arguments of calls in the form, objects or texts, that renders, and its text."""
        try:
            return chat, self._render(chat, prompt=prompt)
        except RenderError as error:
            if chat.text_calls is None or error.fault not in ("failed", "raised"):
                raise
            try:
                other = chat._replace(messages=chat.text_calls)
                text = self._render(other, prompt=prompt)
            except RenderError:
                raise error from None
        self._count("arguments")
        return other, text

    def _find_spans(self, chat: Chat, text: str, loss_on: LossOn) -> tuple[list["_Span"], str]:
        """Return the parts of a text that are trained, or with `all` are not, and what is to be written after it."""
        if loss_on == "all":
            return [span for number in sorted(chat.excluded) for span in self._message_spans(chat, number, text)], ""
        wanted = chat.turns if loss_on == "assistant" else chat.turns[-1:]
        if self._renderer.about(tools=bool(chat.tools)).marked:
            every = loss_on == "assistant" and not chat.excluded
            found = self._find_blocks(chat, text, (None,) if every else (True, False))
            return [span for span, owner in found if every or owner in wanted], ""
        turns, spans, closing = self._turns.find(chat, wanted, text), [], ""
        for number, turn in zip(wanted, turns, strict=True):
            end = self._end("tool_calls" in chat.messages[number])
            spans.append(_Span(turn.begin, turn.end, True, bool(end.closing)))
            if number == len(chat.messages) - 1:
                closing = end.closing
        return spans, closing

    def _message_spans(self, chat: Chat, number: int, text: str) -> list["_Span"]:
        """Return the parts of a text that a message has."""
        if chat.messages[number]["role"] != "assistant":
            return [_Span(*self._turns.of_other(chat, number, text))]
        if self._renderer.about(tools=bool(chat.tools)).marked:
            return [span for span, owner in self._find_blocks(chat, text, (True, False)) if owner == number]
        return [_Span(turn.begin, turn.end, True) for turn in self._turns.find(chat, [number], text)]

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise `UserError` unless the template has every one of these words, which are its variables."""
        words = {*re.findall(r"\w+", " ".join(self._template.texts.values()))}
        for name in names:
            if name not in words:
                near = nearest(name, words)
                advice = near if near.startswith("did") else "leave it out"
                raise UserError(f"template.{name}: {self._template.shown} has no such variable; {advice}")

    def _find_blocks(self, chat: Chat, text: str, marking: Sequence[bool | None]) -> list[tuple["_Span", int]]:
        """Return the parts of a text that blocks `{% generation %}` have made, each with the number of its message.

        It is the message of which a block has a text, or else the one whose text stands before it. `marking` are ways
        to find out, as `empty` of `mark_messages`; None does not.
        """
        # A filter around a block may trim its white space, but no mark; some templates ask whether a content is empty.
        for within, empty in itertools.product((False, True), marking):
            marked = chat.messages if empty is None else mark_messages(chat.messages, empty=empty)
            found, plain, owner = [], "", 0
            for part in _BLOCK.split(self._render(chat._replace(messages=marked), marks=_MARKS, within=within)):
                numbers, bare = (
                    list(map(marked_message, MARKS.findall(part))),
                    MARKS.sub("", part.strip("".join(_MARKS))),
                )
                if _BLOCK.fullmatch(part) and bare:
                    found.append((_Span(len(plain), len(plain) + len(bare)), numbers[0] if numbers else owner))
                plain, owner = plain + bare, numbers[-1] if numbers else owner
            if plain == text:
                return found
        why = "a block {% generation %} is inside another, cut, or in a filter that changes more than white space"
        raise UserError(f"{self._template.shown} fails for this chat ({why}); correct one of them")

    @functools.lru_cache(maxsize=2)  # noqa: B019 as long as the format
    def _end(self, calls: bool) -> "_End":
        """Return how the template ends an answer, or a call of a tool."""
        chats = [self._probe(_WORD), self._probe(_WORD, _USER)]
        if calls:
            result = {"role": "tool", "content": "x", "tool_call_id": _ID}
            chats = [self._guard(Chat([_USER, _CALL, *after], None, {})) for after in ([], [result])]
        try:
            text, whole = map(self._render, chats)
        except RefusedError:  # a template may refuse such a chat
            return _End()
        begin, found = text.rfind(_WORD) + len(_WORD), self._guarded.encode(text)
        inside = found.ids[found.special & (found.begins >= begin)].tolist()
        if inside and not (calls and self._end(False).closing):
            if not calls:
                return _End(inside[0])
            # A call may have special tokens after it that do not end it.
            known = (self._end(False).token, self._token_id(self._template.variables.get("eos_token")))
            return _End(next((token for token in known if token in inside), inside[-1]))
        found = self._guarded.encode(whole)
        next_ones = np.flatnonzero(found.special & (found.begins >= len(text)))
        if whole.startswith(text) and len(next_ones) and not whole[len(text) : found.begins[next_ones[0]]].strip():
            return _End(int(found.ids[next_ones[0]]), whole[len(text) : found.ends[next_ones[0]]])
        return _End()

    def _token_id(self, token: str | None) -> int | None:
        return self._tokenizer.token_id(token) if token and isinstance(self._tokenizer, HuggingFace) else None


class _Span(NamedTuple):
    """The part [begin, end) of a text. White space after its last special token may be cut off (`trim`), or the token
    that ends it may belong to the next turn (`open`)."""

    begin: int
    end: int
    trim: bool = False
    open: bool = False


class _End(NamedTuple):
    """The token that ends a turn; None where there is none. `closing` has it where it is the next message that writes
    it."""

    token: int | None = None
    closing: str = ""


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _extend(span: _Span, text: str, found: Encoded) -> tuple[int, int]:
    """Return the part of a text that is trained of a turn."""
    begin, end = span.begin, span.end
    if span.open:
        after = int(np.searchsorted(found.begins, end))
        while after < len(found.ids) and not found.special[after] and text[end : found.ends[after]].isspace():
            after += 1
        return (begin, int(found.ends[after])) if after < len(found.ids) and found.special[after] else (begin, end)
    if not span.trim:
        return begin, end
    first, last = np.searchsorted(found.begins, (begin, end))
    special = np.flatnonzero(found.special[first:last])
    if not len(special):
        return begin, end
    after = int(np.append(found.begins, len(text))[first + special[-1] + 1])  # where the next token begins
    return (begin, after) if not text[after:end].strip() else (begin, end)
