"""JSON values: of a text, and of a file that has several, one at a time in bounded memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from moezoo.errors import UserError
from moezoo.host.files import load_json

MOST_VALUE = 2**28  # characters
_CHUNK = 2**20  # bytes to read at once
_SPACE = re.compile(r"[ \t\r\n]*")
# What a value may lack at the end of what is read: a part of an escape or of a literal.
_CUT = 16


class Value(NamedTuple):
    """A value: its JSON text, and the line of the file, from 1, on which it begins."""

    text: str
    line: int


def read_values(file: BinaryIO, shown: str, *, array: bool) -> Iterator[Value]:
    """Yield the values of JSON text one after another or, with `array`, the items of the array that it holds.

    Args:
        file: The text.
        shown: Begins messages.
        array: Whether it holds one array, as `is_array` finds out.

    Raises:
        UserError: The text is not JSON, or not UTF-8, or a value has more than `MOST_VALUE` characters.
    """
    text = _Text(file, shown)
    if not array:
        while text.next():
            yield text.value()
        return
    text.take("[", "an array")
    if text.next() != "]":
        yield text.value()
        while text.next() == ",":
            text.take(",", "','")
            yield text.value()
    text.take("]", "',' or ']'")
    if text.next():
        text.refuse(text.at, "the array has ended")


def is_array(file: BinaryIO, shown: str, *, chats: bool) -> bool:
    """Return whether JSON text holds an array of records; of `chats`, one of messages is a record.

    Raises as `read_values`.
    """
    text = _Text(file, shown)
    if text.next() != "[":
        return False
    text.take("[", "an array")
    return text.next() in ("]", "") or not (chats and is_message(json.loads(text.value().text)))


def is_message(value: object) -> bool:
    """Return whether a JSON value is a message of a chat, by its keys."""
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())


def from_json(value: Any, expected: type) -> Any:
    """Return what a text holds as JSON if it is an `expected`, otherwise the value as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = load_json(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, expected) else value


def parse_record(line: bytes, where: str) -> Any:
    """Return the JSON value in the text of a record. Raises `UserError`, led by `where`, if there is none."""
    try:
        return load_json(line.decode())
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{line[error.start]:02x}"
        raise UserError(f"{where} is not UTF-8: {byte}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        # The library counts the line as the first one.
        reason = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where} is not JSON ({reason}); write one object per line") from error


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that are null or NaN, which JSON has not.

    A column of a table has each key of any of its rows in all of them.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None and item == item}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def kind(value: object) -> str:
    """Return what JSON calls a value."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


class _Text:
    """The text of a file, of which `at` is the next character; what was taken is forgotten."""

    def __init__(self, file: BinaryIO, shown: str):
        self._file, self._shown = file, shown
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self.at = "", 0
        self._line, self._counted = 1, 0  # the line of character `_counted`
        self._before = 0  # characters that are gone of the line that the text begins in

    def next(self) -> str:
        """Pass over white space, and return the character behind it; empty at the end."""
        while True:
            self.at = _SPACE.match(self._text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self.at < len(self._text) or not self._more():
                return self._text[self.at : self.at + 1]

    def take(self, char: str, expected: str) -> None:
        if self.next() != char:
            self.refuse(self.at, f"Expecting {expected}")
        self.at += 1

    def value(self) -> Value:
        self.next()
        while True:
            try:
                end = self._scan(self._text, self.at)[1]
                break
            except json.JSONDecodeError as error:
                # An end of what is read inside a value is an error there, or at the beginning of a text.
                cut = len(self._text) - error.pos <= _CUT or error.msg.startswith("Unterminated")
                if not (cut and self._more()):
                    self.refuse(error.pos, error.msg)
            except (ValueError, RecursionError) as error:
                self.refuse(self.at, f"{error}")
            if len(self._text) > MOST_VALUE:
                self.refuse(self.at, f"a value has more than {MOST_VALUE:,} characters")
        found = Value(self._text[self.at : end], self._line_of(self.at))
        self.at = end
        return found

    def refuse(self, at: int, why: str) -> None:
        """Raise `UserError` for what is at an index of the text that is kept."""
        begin = self._text.rfind("\n", 0, at)
        column = at - begin + (self._before if begin < 0 else 0)
        raise UserError(
            f"{self._shown} line {self._line_of(at)} is not JSON (column {column}: {why}); write objects or one array"
        )

    def _line_of(self, at: int) -> int:
        """Return the line of a character, which is not before the one that was asked for last."""
        self._line += self._text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def _more(self) -> bool:
        """Read on, and return whether there was more; the text before `at` is then forgotten."""
        # As much as is kept, so that a long value is looked at few times.
        part = self._file.read(max(_CHUNK, len(self._text) - self.at))
        try:
            more = self._decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            byte = f"0x{error.object[error.start]:02x}"
            line = self._line_of(len(self._text))
            raise UserError(f"{self._shown} is not UTF-8: byte {byte} from line {line} on; convert the file") from error
        if part:
            self._line_of(self.at)
            begin = self._text.rfind("\n", 0, self.at)
            self._before = self.at - begin - 1 + (self._before if begin < 0 else 0)
            self._text, self.at, self._counted = self._text[self.at :] + more, 0, 0
        return bool(part)
