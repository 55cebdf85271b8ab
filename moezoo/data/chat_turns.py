"""Where the messages of a chat stand in its rendered text: found by rendering it again with other texts.

Templates do not say what the assistant has written, unless they have blocks `{% generation %}`. A turn is what its
message adds to the messages before it, without its *header*, which is the template's own:

- where the finished turn begins with the generation prompt (`add_generation_prompt`), that is the header;
- otherwise it is what turns of stand-ins share, of texts, thoughts and calls of tools that have nothing in common, and
  what the generation prompt has there too. It never depends on the answer itself.

Rendering the beginning of the chat anew for each turn would take the square of its length. So `Turns` does this in a
chat of a few stand-ins, the turn's *window*, and the text must have around each message what its window has. Where the
messages are, then follows from their texts; where these are not as the template writes them, the chat is rendered once
more, with a mark in each message. Only a turn that has another window is looked for in the beginning of the chat.
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
from moezoo.data.chat_template import RefusedError
from moezoo.errors import UserError
from moezoo.typed import show

# Returns the text of a chat, with further parts of the request by name; raises `UserError`.
Render = Callable[..., str]
# The characters of marks: plane 16 has no text, and the stand-ins of `guarded` are behind these. A message has one for
# each kind of text, and two stand around a block {% generation %}.
_KINDS = ("thoughts", "content", "name")
_MARK, _MOST_MARKS = 0x100000, 0xFF00
BLOCK = ("\U0010fffc", "\U0010fffd")
_MARKS = re.compile(f"([{chr(_MARK)}-{chr(_MARK + _MOST_MARKS - 1)}{BLOCK[0]}{BLOCK[1]}])")
# How much of two texts that differ is shown, on each side of the first difference.
_AROUND = 30
_ID = "000000000"  # of a call of a tool, as Mistral's templates want it
# Messages of the assistant that have little in common: a text, thoughts, and a call.
_ANSWER = {"role": "assistant", "content": "a"}
_CALL = {"type": "function", "function": {"name": "", "arguments": {}}}
_OTHERS = (_ANSWER, {**_ANSWER, **dict.fromkeys(THOUGHTS[:2], "")}, {**_ANSWER, "content": "", "tool_calls": [_CALL]})


class UnclearTurnError(UserError):
    """It cannot be told which part of a text is the assistant's."""


class Turn(NamedTuple):
    """The part [begin, end) of a text that a message has written."""

    begin: int
    end: int


class Mark(NamedTuple):
    """A mark, `char`: an edge of a block, or where a text of a message begins, behind its white space `space`.

    `at` is its index in the text of the chat without marks.
    """

    at: int
    char: str
    space: str

    @property
    def number(self) -> int:
        """The number of the message."""
        return (ord(self.char) - _MARK) // len(_KINDS)


class _Pattern(NamedTuple):
    """What a template writes around a turn, in a chat of stand-ins.

    - `before`: up to the first text of the turn; its last `inside` characters are of the turn;
    - `ending`: from the end of this text to the end of the turn;
    - `behind`: from the end of the turn to the first text of the next message, or to the end.
    """

    before: str
    inside: int
    ending: str
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
        found, frame = [], json.dumps([chat.tools, chat.variables])
        places = self._find_texts(chat, text, frame) or self._places(chat, text)
        for number in numbers:
            turn, here, after = None, places.get(number), places.get(number + 1)
            if here and after and (pattern := self._pattern(_window(chat.messages, number), frame)):
                turn = _fit(pattern, here, after, text)
            begin, end = turn or self._find_turn(chat, number, text)
            for other, place in places.items():
                if (inside := begin <= place.at < end) != (other == number):
                    what = f"that of message {other + 1}" if inside else "not its own text"
                    raise UnclearTurnError(f"what message {number + 1} adds has {what}")
            found.append(Turn(begin, end))
        return found

    def _find_texts(self, chat: Chat, text: str, frame: str) -> dict[int, Mark]:
        """Return what `_places` does, if a chat is texts alone, and its text is these within their patterns."""
        if chat.tools or any(message.keys() != {"role", "content"} for message in chat.messages):
            return {}
        found, at = {}, 0
        for number, message in enumerate(chat.messages):
            pattern, own = self._pattern(_window(chat.messages, number), frame), message["content"]
            if pattern is None or not isinstance(own, str) or not own.strip():
                return {}
            if number == 0 and text.startswith(pattern.before):
                at = len(pattern.before)
            behind = pattern.ending + pattern.behind
            written = (each + behind for each in (own, own.strip(), own.lstrip(), own.rstrip()))
            if not at or (part := next((each for each in written if text.startswith(each, at)), None)) is None:
                return {}
            space = part[: len(part) - len(part.lstrip())]
            found[number], at = Mark(at + len(space), "", space), at + len(part)
        return {**found, len(found): Mark(at, "", "")} if at == len(text) else {}

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
        here, after = places.get(number), places.get(number + 1)
        if not (here and after and begin <= here.at < end <= after.at):
            return None
        first = begin
        if number - 1 in places and messages[number - 1]["role"] != "assistant":  # it has one text alone
            first = min(begin, places[number - 1].at + 1)
        return _Pattern(text[first : here.at], here.at - begin, text[here.at + 1 : end], text[end : after.at])

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
        texts = []
        for other, word in itertools.product([message, *_OTHERS], "xy"):
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

    def _places(self, chat: Chat, text: str) -> dict[int, Mark]:
        """Return the first mark of each message, and one at the end; none where marks change what is written."""
        marks = self.marks(chat, text, [(True, {}), (False, {})])
        if marks is None:
            return {}
        return {**{mark.number: mark for mark in reversed(marks)}, len(chat.messages): Mark(len(text), "", "")}

    def marks(self, chat: Chat, text: str, ways: Sequence[tuple[bool | None, dict[str, Any]]]) -> list[Mark] | None:
        """Return the marks of a chat; None if no way of marking it leaves its text.

        A message has its mark before the first character of each of its texts that is no white space. None is in chats
        of more messages than there are marks.

        Args:
            chat: The chat.
            text: Its text.
            ways: Pairs of how messages are marked (where true, contents of white space alone too; where None, none is)
                and further parts of the request, which may be other marks.
        """
        for empty, how in ways:
            spaces: dict[str, str] = {}
            few = empty is not None and len(_KINDS) * len(chat.messages) <= _MOST_MARKS
            marked = [_mark(each, n, empty, spaces) if few else each for n, each in enumerate(chat.messages)]
            with contextlib.suppress(RefusedError):
                parts = _MARKS.split(self._render(chat._replace(messages=marked), **how))
                if "".join(parts[::2]) == text:
                    found = zip(itertools.accumulate(map(len, parts[::2])), parts[1::2], strict=False)
                    return [Mark(at, char, spaces.get(char, "")) for at, char in found]
        return None


def _mark(message: Message, number: int, empty: bool | None, spaces: dict[str, str]) -> Message:
    """Return a message with marks, and note the white space before each."""

    def change(what: str, value: Any) -> Any:
        text = str(value)
        at = len(text) - len(text.lstrip())
        if what not in _KINDS or (at == len(text) and not (empty and what == "content")):
            return value
        char = chr(_MARK + len(_KINDS) * number + _KINDS.index(what))
        spaces.setdefault(char, text[:at])
        return f"{text[:at]}{char}{text[at:]}"

    return map_message(message, change)


def _window(messages: Sequence[Message], number: int) -> str:
    """Return a chat of stand-ins that has a message between its neighbours, behind the message's number, as JSON.

    Behind the next message it has another, since templates write the last one differently.
    """
    first = max(number - 1, 0)
    while first and messages[first]["role"] == "tool":
        first -= 1
    before = [messages[0]] if first and messages[0]["role"] in ("system", "developer") else []
    if first < number and messages[first]["role"] == "assistant":  # most templates want a user first
        before.append({"role": "user", "content": "x"})
    window = [_stand_in(message, "x") for message in (*before, *messages[first : number + 3])]
    return json.dumps([len(before) + number - first, window])


def _stand_in(message: Message, word: str, *, full: bool = False) -> Message:
    """Return a message with `word` for each text; where `full`, for empty ones too."""

    def change(what: str, value: Any) -> Any:
        if what == "arguments":
            return json.dumps({word: word}) if isinstance(value, str) else {word: word}
        return _ID if what == "id" else word if full or str(value).strip() else value

    changed = map_message(message, change)
    return {**changed, "content": changed["content"][:1]} if isinstance(changed.get("content"), list) else changed


def _fit(pattern: _Pattern, here: Mark, after: Mark, text: str) -> Turn | None:
    """Return the turn of a message with the mark `here`, by the pattern of such turns; None where it does not fit."""
    before, end = _find_before(pattern.before, here, text), _find_before(pattern.behind, after, text)
    if before is None or end is None or end <= here.at:
        return None
    return Turn(before + len(pattern.before) - pattern.inside, end)


def _find_before(part: str, mark: Mark, text: str) -> int | None:
    """Return where `part` begins before a mark. The white space of the marked text is between them, unless trimmed."""
    for between in (part + mark.space, part):
        if text.endswith(between, 0, mark.at):
            return mark.at - len(between)
    return None


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
