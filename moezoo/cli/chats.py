"""The chats that `moezoo generate` answers, and the conversation in a terminal."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import moezoo.interrupts as interrupts
from moezoo.data.chat_format import ChatFormat
from moezoo.data.chat_records import Chat, read_chat
from moezoo.data.files import find_files
from moezoo.data.json_values import parse_record
from moezoo.data.records import SUFFIXES, read_records
from moezoo.data.tokenizer import whole_text
from moezoo.errors import UserError, locating
from moezoo.typed import show

_ASKING = ("user", "tool")  # whose messages an assistant answers
_SYSTEM = ("system", "developer")


def begin_chat(
    history: str | None, system: str | None, variables: Mapping[str, Any], *, field: str, roles: Mapping[str, str]
) -> Chat:
    """Return what stands before the messages of a user; it may have no message.

    Args:
        history: A file with one chat, as `data=chat` reads it.
        system: The text of a message of the system before it.
        variables: Further variables of the template, which go before those of the history.
        field: The key of its messages, as `data.field`.
        roles: Roles by other names, as `data.roles`.

    Raises:
        UserError: The file has no chat, or several; or both have a message of the system.
    """
    past = Chat([], None, {}) if history is None else _read_history(history, field, roles)
    if system is not None and past.messages and past.messages[0]["role"] in _SYSTEM:
        raise UserError(
            f"history={show(history)} begins with a message of the {past.messages[0]['role']}, and system= is another; "
            "leave one of them out"
        )
    given = read_chat({"messages": [_message("system", system or "")], "chat_template_kwargs": variables})
    first = given._replace(messages=[] if system is None else given.messages)
    return _join(first, past)._replace(tools=past.tools, variables={**past.variables, **variables})


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": whole_text(text)}


def _join(chat: Chat, more: Chat) -> Chat:
    """Return a chat with the messages of another behind its own."""
    return chat._replace(messages=[*chat.messages, *more.messages])


def _read_history(history: str, field: str, roles: Mapping[str, str]) -> Chat:
    found = find_files(history, key="history", suffixes=SUFFIXES)
    lines = [*itertools.islice(read_records(found, chats=True), 2)]
    if len(lines) != 1:
        what = "several chats" if lines else "no chat"
        raise UserError(f"{found.shown} has {what}; give a file with one, such as a JSON object in a line")
    record = parse_record(lines[0].text, lines[0].where)
    with locating(lines[0].where):
        return read_chat(record, field, roles)


def add_message(chat: Chat, role: str, text: str) -> Chat:
    """Return a chat with one more message. Raises `UserError` for a text that is not UTF-8."""
    return _join(chat, read_chat({"messages": [_message(role, text)]}))


def is_asked(chat: Chat) -> bool:
    """Return whether the last message waits for an answer."""
    return bool(chat.messages) and chat.messages[-1]["role"] in _ASKING


def tokens_of(chat: Chat, chats: ChatFormat) -> list[int]:
    """Return the tokens of a chat up to the beginning of an answer. Raises `UserError` where there are none."""
    ids = chats.prompt(chat).ids.tolist()
    if not ids:
        raise UserError("the chat template writes no text for this chat, so there is nothing to answer")
    return ids


def converse(chat: Chat, answer: Callable[[Chat], Iterator[str]]) -> None:
    """Answer the messages that a user types, one a line, and keep what was said, until the input ends.

    Args:
        chat: What was said before. If it ends with a message that waits for an answer, that comes first.
        answer: Returns the parts of the text of an answer to a chat.

    Raises:
        UserError: What was said before cannot be answered.
    """
    import termios

    with contextlib.suppress(ImportError):  # some Pythons are without it; then `input` has fewer keys
        import readline  # noqa: F401

    print("Each line is a message. Ctrl-D ends the conversation.", file=sys.stderr)
    # A signal may end the process while `input` has the terminal in another mode.
    as_before = termios.tcgetattr(sys.stdin)
    with interrupts.undoing(lambda: termios.tcsetattr(sys.stdin, termios.TCSANOW, as_before)):
        if is_asked(chat):
            chat = _answer(chat, answer)
        while True:
            try:
                message = input("> ")
            except EOFError:
                print()
                return
            if not message.strip():
                continue
            try:
                chat = _answer(add_message(chat, "user", message), answer)
            except UserError as error:
                print(f"error: {error}; this message is left out", file=sys.stderr)


def _answer(chat: Chat, answer: Callable[[Chat], Iterator[str]]) -> Chat:
    """Print the answer to a chat, and return the chat with it."""
    return add_message(chat, "assistant", print_pieces(answer(chat)))


def print_pieces(pieces: Iterator[str]) -> str:
    """Print a text as it comes, and return it."""
    whole = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        whole += piece
    print()
    return whole
