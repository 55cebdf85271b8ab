"""Where the messages of a chat stand in its rendered text: found by rendering it again with other texts.

Templates do not say what the assistant has written, unless they have blocks `{% generation %}`. A turn is what its
message adds to the messages before it, without its *header*, which is the template's own:

- where the finished turn begins with the generation prompt (`add_generation_prompt`), that is the header;
- otherwise it is what turns of stand-ins share, of texts, thoughts and calls of tools that have nothing in common, and
  what the generation prompt has there too. It never depends on the answer itself.

Rendering the beginning of the chat anew for each turn would take the square of its length. So `Turns` does this in a
chat of a few stand-ins, the turn's *window*, and renders the whole once more, with a mark in each message: around the
marks the text must have what the window has. Only a turn that is not so is looked for in the beginning of the chat.
"""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moezoo.data.chat_records import THOUGHTS, Chat, Message, map_message
from moezoo.data.chat_renderer import RefusedError
from moezoo.errors import UserError
from moezoo.typed import show

# Returns the text of a chat, with further parts of the request by name; raises `UserError`.
Render = Callable[..., str]
# The characters of marks: plane 16 has no text, and the stand-ins of `guarded` are behind these. One for each message,
# and two around a block {% generation %}.
_MARK, _MOST_MARKS = 0x100000, 0xFF00
BLOCK = ("\U0010fffc", "\U0010fffd")
_MARKS = re.compile(f"([{chr(_MARK)}-{chr(_MARK + _MOST_MARKS - 1)}{BLOCK[0]}{BLOCK[1]}])")
# How much of two texts that differ is shown, on each side of the first difference.
_AROUND = 30
_ID = "000000000"  # of a call of a tool, as Mistral's templates want it


class UnclearTurnError(UserError):
    """It cannot be told which part of a text is the assistant's."""


class Turn(NamedTuple):
    """The part [begin, end) of a text that a message has written."""

    begin: int
    end: int


class _Pattern(NamedTuple):
    """What a template writes around a turn, in a chat of stand-ins.

    - `before`: up to the first text of the turn; its last `inside` characters are of the turn;
    - `behind`: from the end of the turn to the first text of the next message, or to the end.
    """

    before: str
    inside: int
    behind: str


class Turns:
    """The turns of chats in a template."""

    def __init__(self, render: Render):
        self._render = render
        self._pattern = functools.lru_cache(maxsize=256)(self._find_pattern)

    def find(self, chat: Chat, numbers: Sequence[int], text: str) -> list[Turn]:
        """Return the turns of the messages `numbers`, from 0, of a chat whose text is `text`.

        That of a message of another role than the assistant has its header too.

        Raises:
            UnclearTurnError: The text does not begin with that of the messages up to a turn; a turn has no header, or
                the text of another message.
            UserError: The template does not render the beginning of the chat.
        """
        if not numbers:
            return []
        found, places, frame = [], self._places(chat, text), json.dumps([chat.tools, chat.variables])
        for number in numbers:
            turn = None
            if number in places and number + 1 in places:
                pattern = self._pattern(json.dumps(_window(chat.messages, number)), frame)
                turn = pattern and _fit(pattern, [*chat.messages, {}], number, places, text)
            begin, end = turn or self._find_turn(chat, number, text)
            for other, place in places.items():
                if (inside := begin <= place < end) != (other == number):
                    what = f"that of message {other + 1}" if inside else "not its own text"
                    raise UnclearTurnError(f"what message {number + 1} adds has {what}")
            found.append(Turn(begin, end))
        return found

    def _find_pattern(self, window: str, frame: str) -> _Pattern | None:
        """Return what stands around message `number` of a chat of stand-ins; None where that is not clear."""
        (number, messages), (tools, variables) = json.loads(window), json.loads(frame)
        chat = Chat(messages, tools, variables)
        try:
            text = self._render(chat)
            places = self._places(chat, text)
            begin, end = self._find_turn(chat, number, text)
        except (RefusedError, UnclearTurnError):
            return None
        at, behind = places.get(number, -1), places.get(number + 1, -1)
        if not begin <= at < end <= behind:
            return None
        first = begin
        if number and messages[number - 1]["role"] != "assistant":  # it has one text alone
            first = min(begin, places.get(number - 1, begin) + 1)
        return _Pattern(text[first:at], at - begin, text[end:behind])

    def _find_turn(self, chat: Chat, number: int, text: str) -> Turn:
        """Return the turn of a message from the renderings of the messages up to it."""
        with_turn = self._beginning(chat, chat.messages[: number + 1])
        if not text.startswith(with_turn):
            with_turn = with_turn.rstrip()  # some templates end a chat in white space
        if not text.startswith(with_turn):
            raise _unclear(f"the chat up to message {number + 1} ends with", with_turn, "the whole has", text, " there")
        return Turn(self._find_begin(chat, number, with_turn), len(with_turn))

    def _find_begin(self, chat: Chat, number: int, with_turn: str) -> int:
        """Return where the turn of a message begins in the text of the messages up to it."""
        before, message = chat.messages[:number], chat.messages[number]
        if message["role"] != "assistant":
            header = self._beginning(chat, before) if before else ""
            if not with_turn.startswith(header):
                what = f"message {number + 1} is rendered as"
                raise _unclear("the chat before", header, what, with_turn)
            return len(header)
        try:
            prompted = self._render(chat._replace(messages=before), prompt=True)
        except RefusedError:
            if before:
                raise
            raise UnclearTurnError(
                "the chat begins with a message of the assistant; leave it out, or set its weight to 0"
            ) from None
        short = [*before, _stand_in(message, "x")]
        if with_turn.startswith(prompted) and self._beginning(chat, short).startswith(prompted):
            return len(prompted)
        kinds = (
            {},
            {name: "" for name in THOUGHTS[:2]},
            {"tool_calls": [{"type": "function", "function": {"name": "", "arguments": {}}}]},
        )
        others = [{"role": "assistant", "content": "" if "tool_calls" in kind else "a", **kind} for kind in kinds]
        texts = []
        for other, word in itertools.product([message, *others], "xy"):
            try:
                texts.append(self._beginning(chat, [*before, _stand_in(other, word, full=True)]))
            except RefusedError:  # no template has all of these
                if other is message:
                    raise
        header, same = _common(texts), _common([prompted, *texts[:2]])
        begin = max((len(part) for part in (header, same) if with_turn.startswith(part)), default=0)
        if not begin or not with_turn.startswith(header):
            what = f"message {number + 1} as"
            raise _unclear("the beginning of an answer is rendered as", prompted, what, with_turn)
        return begin

    def _beginning(self, chat: Chat, messages: list[Message]) -> str:
        return self._render(chat._replace(messages=messages)).removesuffix(self._always)

    @functools.cached_property
    def _always(self) -> str:
        """The beginning of an answer, of a template that writes it behind every chat, also where none is asked for."""
        user, answer = ({"role": role, "content": f"{role[0]}Zqj"} for role in ("user", "assistant"))
        asked, answered, longer = (Chat(m, None, {}) for m in ([user], [user, answer], [user, answer, user]))
        try:
            texts = [self._render(asked, prompt=True), self._render(asked), self._render(answered)]
            gives_way = not self._render(longer).startswith(texts[2])
        except RefusedError:
            return ""
        behind = shared([text[::-1] for text in texts])[::-1]
        # Its first tag ends both turns; what follows gives way to the next message.
        found = re.search(r"<[^<>\s]+>|\[[^\[\]\s]+\]", behind)
        return behind[found.end() :] if found and gives_way else ""

    def _places(self, chat: Chat, text: str) -> dict[int, int]:
        """Return where messages have their first text, and the end; nothing where marks change what is written."""
        marks = self.marks(chat, text, [(True, {}), (False, {})])
        if marks is None:
            return {}
        return {len(chat.messages): len(text), **{owner(mark): at for at, mark in reversed(marks)}}

    def marks(
        self, chat: Chat, text: str, ways: Sequence[tuple[bool | None, dict[str, Any]]]
    ) -> list[tuple[int, str]] | None:
        """Return the marks of a chat, with their indices in its text; None if no way of marking it leaves this text.

        A message has its mark before the first character of each of its texts that is no white space. None is in chats
        of more messages than there are marks.

        Args:
            chat: The chat.
            text: Its text.
            ways: Pairs of how messages are marked (where true, contents of white space alone too; where None, none is)
                and further parts of the request, which may be other marks.
        """
        for empty, how in ways:
            few = empty is not None and len(chat.messages) <= _MOST_MARKS
            marked = [_mark(each, chr(_MARK + n) * few, empty) for n, each in enumerate(chat.messages)]
            with contextlib.suppress(RefusedError):
                parts = _MARKS.split(self._render(chat._replace(messages=marked), **how))
                if "".join(parts[::2]) == text:
                    return [*zip(itertools.accumulate(map(len, parts[::2])), parts[1::2], strict=False)]
        return None


def owner(mark: str) -> int:
    """Return the number of the message that a mark is in."""
    return ord(mark) - _MARK


def _mark(message: Message, mark: str, empty: bool | None) -> Message:
    def change(what: str, text: Any) -> Any:
        if what not in ("thoughts", "content", "name") or not isinstance(text, str):
            return text
        at = len(text) - len(text.lstrip())
        return f"{text[:at]}{mark}{text[at:]}" if at < len(text) or (empty and what == "content") else text

    return map_message(message, change)


def _window(messages: Sequence[Message], number: int) -> tuple[int, list[Message]]:
    """Return a chat of stand-ins that has a message between its neighbours, and the number of the message there.

    Behind the next message it has another, since templates write the last one differently.
    """
    first = max(number - 1, 0)
    while first and messages[first]["role"] == "tool":
        first -= 1
    before = [messages[0]] if first and messages[0]["role"] in ("system", "developer") else []
    if first < number and messages[first]["role"] == "assistant":  # most templates want a user first
        before.append({"role": "user", "content": "x"})
    chat = [_stand_in(message, "x") for message in (*before, *messages[first : number + 3])]
    return len(before) + number - first, chat


def _stand_in(message: Message, word: str, *, full: bool = False) -> Message:
    """Return a message with `word` for each text; where `full`, for empty ones too."""

    def change(what: str, value: Any) -> Any:
        if what == "arguments":
            return json.dumps({word: word}) if isinstance(value, str) else {word: word}
        return _ID if what == "id" else word if full or str(value).strip() else value

    changed = map_message(message, change)
    return {**changed, "content": changed["content"][:1]} if isinstance(changed.get("content"), list) else changed


def _fit(pattern: _Pattern, messages: list[Message], number: int, places: dict[int, int], text: str) -> Turn | None:
    """Return the turn of a message, by the pattern of such turns; None where the text does not have it there."""
    before = _find_before(pattern.before, messages[number], places[number], text)
    end = _find_before(pattern.behind, messages[number + 1], places[number + 1], text)
    if before is None or end is None or end <= places[number]:
        return None
    return Turn(before + len(pattern.before) - pattern.inside, end)


def _find_before(part: str, message: Message, place: int, text: str) -> int | None:
    """Return where `part` begins in `text`, if it stands before a message whose first text is at `place`.

    Between them is the white space with which a text of the message begins, unless the template trims it.
    """
    spaces = {""}
    map_message(message, lambda _, value: spaces.add(str(value)[: len(str(value)) - len(str(value).lstrip())]))
    return min((place - len(part + s) for s in spaces if text.endswith(part + s, 0, place)), default=None)


def _common(texts: Sequence[str]) -> str:
    """Return what texts begin with, without a tag that ends differently in some, such as <think> and </think>."""
    return re.sub(r"[<\[][^<>\[\]\s]*$", "", shared(texts))


def shared(texts: Sequence[str]) -> str:
    """Return what all texts begin with."""
    return os.path.commonprefix(list(texts))  # noqa: RUF071 of characters


def _unclear(what: str, first: str, what_else: str, second: str, end: str = "") -> UnclearTurnError:
    at = len(shared([first, second]))
    around = slice(max(0, at - _AROUND), at + _AROUND)
    one, other = (show(json.dumps(text[around])) for text in (first, second))
    return UnclearTurnError(f"{what} {one}, and {what_else} {other}{end}")
