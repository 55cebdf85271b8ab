"""Where the assistant's turns stand in a rendered chat: found by rendering it again with other texts.

Templates do not say what the assistant has written, unless they have blocks `{% generation %}`. A turn is what its
message adds to the messages before it, without its *header*, which is the template's own:

- where the finished turn begins with the generation prompt (`add_generation_prompt`), that is the header;
- otherwise it is what turns of stand-ins share, of texts, thoughts and calls of tools that have nothing in common, and
  what the generation prompt has there too. It never depends on the answer itself.

Rendering the beginning of the chat anew for each turn would take the square of its length. So `Turns` renders the chat
once more, with a mark in each message, and finds the pattern of each turn in a chat of a few stand-ins. Only a turn
that the text does not have in this pattern is looked for in renderings of the chat's beginning.
"""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from moezoo.data.chat_records import THOUGHTS, Chat
from moezoo.data.chat_renderer import RefusedError
from moezoo.errors import UserError
from moezoo.typed import show

Message = dict[str, Any]
# Returns the text of messages and, where it is set, of the beginning of an answer to them; raises `UserError`.
Render = Callable[[Sequence[Message], bool], str]


class RenderChat(Protocol):
    """Returns the text of a chat and, with `prompt`, of the beginning of an answer to it; raises `UserError`."""

    def __call__(self, chat: Chat, *, prompt: bool) -> str: ...


# The characters of marks: plane 16 has no text, and the stand-ins of `guarded` are behind these.
_MARK, _MOST_MARKS = 0x100000, 0xFF00
MARKS = re.compile(f"[{chr(_MARK)}-{chr(_MARK + _MOST_MARKS - 1)}]")
# How much of two texts that differ is shown, on each side of the first difference.
_AROUND = 30
_ID = "000000000"  # of a call of a tool, as Mistral's templates want it


class UnclearTurnError(UserError):
    """It cannot be told which part of a text is the assistant's."""


class Turn(NamedTuple):
    """The part [begin, end) of a text that the assistant has written."""

    begin: int
    end: int


class _Pattern(NamedTuple):
    """What a template writes around a turn, in a chat of stand-ins.

    - `header`: from the end of the text before it to the turn;
    - `lead`: from the beginning of the turn to its first text, which is of the kind `field`;
    - `tail`: from the end of the turn to the first text of the next message; None without one.
    """

    header: str
    lead: str
    field: int
    tail: str | None


class _Place(NamedTuple):
    """Where the first text of a message begins behind its white space `space`, and whether it is of thoughts (0),
    content (1) or a call (2)."""

    at: int
    field: int
    space: str

    def behind(self, before: str, text: str) -> int | None:
        """Return where `before` begins in `text`, if the message's text follows it, with its white space or trimmed."""
        for between in (before + self.space, before):
            if text.endswith(between, 0, self.at):
                return self.at - len(between)
        return None


class Turns:
    """The turns of chats in a template."""

    def __init__(self, render: RenderChat):
        self._render = render
        self._pattern = functools.lru_cache(maxsize=256)(self._find_pattern)

    def find(self, chat: Chat, numbers: Sequence[int], text: str) -> list[Turn]:
        """Return the turns of the messages `numbers`, from 0, of a chat whose text is `text`.

        Raises:
            UnclearTurnError: The text does not begin with that of the messages up to a turn; a turn has no header, or
                the text of another message.
            UserError: The template does not render the beginning of the chat.
        """
        if not numbers:
            return []
        messages, found, render = chat.messages, [], self._render_messages(chat)
        places, frame = _find_places(messages, text, render), json.dumps([chat.tools, chat.variables])
        for number in numbers:
            turn = None
            if number in places and (number + 1 == len(messages) or number + 1 in places):
                pattern = self._pattern(json.dumps(_window(messages, number)), frame)
                turn = _fit(pattern, number, places, text)
            turn = turn or _find_turn(messages, number, text, render)
            if turn.end == len(text):
                turn = turn._replace(end=len(text.removesuffix(self._always)))
            check_alone(number, turn.begin, turn.end, places)
            found.append(turn)
        return found

    @functools.cached_property
    def _always(self) -> str:
        """The beginning of an answer, of a template that writes it behind every chat, also where none is asked for."""
        user, answer = ({"role": role, "content": f"{role[0]}Zqj"} for role in ("user", "assistant"))
        try:
            texts = [self._render(Chat([user], None, {}), prompt=prompt) for prompt in (True, False)]
            texts.append(self._render(Chat([user, answer], None, {}), prompt=False))
            longer = self._render(Chat([user, answer, user], None, {}), prompt=False)
        except RefusedError:
            return ""
        behind = shared([text[::-1] for text in texts])[::-1]
        # Its first tag ends both turns; what follows gives way to the next message.
        found = re.search(r"<[^<>\s]+>|\[[^\[\]\s]+\]", behind)
        return behind[found.end() :] if found and not longer.startswith(texts[2]) else ""

    def of_other(self, chat: Chat, number: int, text: str) -> Turn:
        """Return the part of a text that a message of another role than the assistant adds. Raises as `find`."""
        render = self._render_messages(chat)
        before, after = (render(chat.messages[:until], False) if until else "" for until in (number, number + 1))
        if not (after.startswith(before) and text.startswith(after)):
            raise _unclear(f"the chat up to message {number + 1} ends with", after, "the whole has", text, " there")
        check_alone(number, len(before), len(after), _find_places(chat.messages, text, render))
        return Turn(len(before), len(after))

    def _render_messages(self, chat: Chat) -> Render:
        def render(messages: Sequence[Message], prompt: bool) -> str:
            text = self._render(chat._replace(messages=list(messages)), prompt=prompt)
            return text if prompt else text.removesuffix(self._always)

        return render

    def _find_pattern(self, window: str, frame: str) -> "_Pattern | None":
        (number, chat), (tools, variables) = json.loads(window), json.loads(frame)
        return _find_pattern(number, chat, self._render_messages(Chat([], tools, variables)))


def _find_turn(messages: Sequence[Message], number: int, text: str, render: Render) -> Turn:
    """Return the turn of a message from the renderings of the messages up to it."""
    with_turn = render(messages[: number + 1], False)
    if not text.startswith(with_turn):
        with_turn = with_turn.rstrip()  # some templates end a chat in white space
    if not text.startswith(with_turn):
        raise _unclear(f"the chat up to message {number + 1} ends with", with_turn, "the whole has", text, " there")
    return Turn(_find_begin(messages[:number], messages[number], with_turn, render), len(with_turn))


def _find_begin(before: Sequence[Message], message: Message, with_turn: str, render: Render) -> int:
    """Return where the turn of a message begins in its text."""
    try:
        prompted = render(before, True)
    except RefusedError:
        if before:
            raise
        raise UnclearTurnError(
            "the chat begins with a message of the assistant; leave it out, or set its weight to 0"
        ) from None
    if with_turn.startswith(prompted) and render([*before, _stand_in(message, "x")], False).startswith(prompted):
        return len(prompted)
    kinds = ({}, {name: "" for name in THOUGHTS[:2]}, {"tool_calls": [{"type": "function", "function": {"name": ""}}]})
    others = [{"role": "assistant", "content": "" if "tool_calls" in kind else "a", **kind} for kind in kinds]
    texts = []
    for other, word in itertools.product([message, *others], ("x", "y")):
        try:
            texts.append(render([*before, _stand_in(other, word, full=True)], False))
        except RefusedError:  # no template has all of these
            if other is message:
                raise
    header, same = _common(texts), _common([prompted, *texts[:2]])
    begin = max((len(part) for part in (header, same) if with_turn.startswith(part)), default=0)
    if not begin or not with_turn.startswith(header):
        number = len(before) + 1
        raise _unclear("the beginning of an answer is rendered as", prompted, f"message {number} as", with_turn)
    return begin


def _common(texts: Sequence[str]) -> str:
    """Return what texts begin with, without a tag that ends differently in some, such as <think> and </think>."""
    return re.sub(r"[<\[][^<>\[\]\s]*$", "", shared(texts))


def shared(texts: Sequence[str]) -> str:
    """Return what all texts begin with."""
    return os.path.commonprefix(list(texts))  # noqa: RUF071 of characters


def _find_places(messages: Sequence[Message], text: str, render: Render) -> dict[int, _Place]:
    """Return where messages have their first text; none where marks in the messages change what is written."""
    for empty in (True, False):
        with contextlib.suppress(RefusedError):
            if text.startswith(MARKS.sub("", marked := render(mark_messages(messages, empty=empty), False))):
                break
    else:
        return {}
    places: dict[int, _Place] = {}
    for before, mark in enumerate(MARKS.finditer(marked)):
        number, field = marked_message(mark[0]), (ord(mark[0]) - _MARK) % 3
        places.setdefault(number, _Place(mark.start() - before, field, _find_space(messages[number], field)))
    return places


def _find_space(message: Message, field: int) -> str:
    """Return the white space before the first text of a kind that a message has."""
    texts: list[str] = []
    _change_texts(message, lambda text, of: [text, texts.append(text)][0] if of == field else text)
    return texts[0][: len(texts[0]) - len(texts[0].lstrip())]


def mark_messages(messages: Sequence[Message], *, empty: bool) -> list[Message]:
    """Return messages with a mark before the first character of each text that is no white space.

    With `empty`, contents of white space alone have one too. A chat of more messages than there are marks has none.
    """

    def mark(number: int, message: Message) -> Message:
        def change(text: str, field: int) -> str:
            at = len(text) - len(text.lstrip())
            if at == len(text) and not (empty and field == 1):
                return text
            return f"{text[:at]}{chr(_MARK + 3 * number + field)}{text[at:]}"

        return _change_texts(message, change)

    few = 3 * len(messages) <= _MOST_MARKS
    return [mark(number, message) if few else message for number, message in enumerate(messages)]


def marked_message(mark: str) -> int:
    """Return the number of the message that a mark is in."""
    return (ord(mark) - _MARK) // 3


def check_alone(number: int, begin: int, end: int, places: Mapping[int, _Place]) -> None:
    """Raise `UnclearTurnError` if the part [begin, end) of a text, of message `number`, has the text of another one."""
    for other, place in places.items():
        if (inside := begin <= place.at < end) != (other == number):
            found = f"that of message {other + 1}" if inside else "not its own text"
            raise UnclearTurnError(f"what message {number + 1} adds has {found}")


def _stand_in(message: Message, word: str, *, full: bool = False) -> Message:
    """Return a message with `word` for each text; where `full`, for empty ones too."""
    changed = _change_texts(message, lambda text, field: word if full or text.strip() else text)
    if isinstance(changed.get("content"), list):
        changed["content"] = changed["content"][:1]
    if "tool_call_id" in changed:
        changed["tool_call_id"] = _ID
    for call in changed.get("tool_calls", []):
        function = call.get("function", call)
        call |= {"id": _ID} if "id" in call else {}
        function["arguments"] = json.dumps({word: word}) if isinstance(function.get("arguments"), str) else {word: word}
    return changed


def _change_texts(message: Message, change: Callable[[str, int], str]) -> Message:
    """Return a message with other thoughts (field 0), content (1), and names of called functions (2)."""
    changed = {**message, **{name: change(message[name], 0) for name in THOUGHTS if name in message}}
    if isinstance(content := message.get("content"), str):
        changed["content"] = change(content, 1)
    elif content is not None:
        changed["content"] = [{**part, "text": change(part["text"], 1)} for part in content]
    if "tool_calls" in message:
        changed["tool_calls"] = [_change_call(call, change) for call in message["tool_calls"]]
    return changed


def _change_call(call: Message, change: Callable[[str, int], str]) -> Message:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _change_call(call["function"], change)}
    return {**call, "name": change(str(call.get("name", "")), 2)}


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


def _find_pattern(number: int, chat: Sequence[Message], render: Render) -> _Pattern | None:
    """Return what a template writes around message `number` of a chat of stand-ins; None where that is not clear."""
    try:
        text = render(chat[: number + 1], False)
        places = _find_places(chat[: number + 1], text, render)
        begin = _find_begin(chat[:number], chat[number], text, render)
        tail = None
        if len(chat) > number + 1:
            whole = render(chat, False)
            after = _find_places(chat, whole, render).get(number + 1)
            turn = text if whole.startswith(text) else text.rstrip()  # some templates end a chat in white space
            if after is None or not whole.startswith(turn):
                return None
            tail = whole[len(turn) : after.at]
    except (RefusedError, UnclearTurnError):
        return None
    place = places.get(number)
    if place is None or place.at < begin:
        return None
    ended = places[number - 1].at + 1 if number - 1 in places and chat[number - 1]["role"] != "assistant" else begin
    return _Pattern(text[ended:begin], text[begin : place.at], place.field, tail)


def _fit(pattern: _Pattern | None, number: int, places: dict[int, _Place], text: str) -> Turn | None:
    """Return the turn of a message, by the pattern of such turns; None where the text does not have it there."""
    if pattern is None or pattern.field != places[number].field:
        return None
    header = places[number].behind(pattern.header + pattern.lead, text)
    end = len(text) if pattern.tail is None else places[number + 1].behind(pattern.tail, text)
    if header is None or end is None or end <= places[number].at:
        return None
    return Turn(header + len(pattern.header), end)


def _unclear(what: str, first: str, what_else: str, second: str, end: str = "") -> UnclearTurnError:
    at = len(shared([first, second]))
    around = slice(max(0, at - _AROUND), at + _AROUND)
    one, other = (show(json.dumps(text[around])) for text in (first, second))
    return UnclearTurnError(f"{what} {one}, and {what_else} {other}{end}")
