"""The forms of records of chats: which keys hold the messages."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from moezoo.data.json_values import from_json, kind
from moezoo.errors import UserError, nearest
from moezoo.typed import show

# Keys that hold a list of messages, in the order in which they are looked for.
LISTS = ("messages", "conversations", "conversation")
# Keys of the user's and of the assistant's part: texts, or lists of messages.
PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("question", "answer"),
    ("prompt", "completion"),
)
# What may stand beside: a text behind an instruction, and a text of the system.
INPUTS, SYSTEM = ("input", "context"), "system"
# Keys of a message, in the order in which they are looked for, and roles by the names that others give them.
ROLE, CONTENT = ("role", "from"), ("content", "value")
ROLES = {"human": "user", "gpt": "assistant"}
# Optional keys of every form.
BESIDE = ("tools", "chat_template_kwargs")
_PREFERENCE = ("chosen", "rejected")
_LIST = "a list of messages"
_LIKE = '{"messages": [{"role": ..., "content": ...}, ...]}'


class Found(NamedTuple):
    """What a record holds.

    - `form`: the name of its form;
    - `messages`: not yet checked;
    - `unread`: its other keys.
    """

    form: str
    messages: list[Any]
    unread: list[str]


def columns(names: Sequence[str], field: str) -> list[str]:
    """Return the columns of a table that chats are read from. Raises `UserError` for a table without chats."""
    found = {key for keys in _forms(field) if all(key in names for key in keys) for key in keys}
    if not found and not all(key in names for key in _PREFERENCE):
        raise UserError(f"has no chats: {_describe_missing(field, names)}")
    inputs = INPUTS if "instruction" in found else ()
    return [name for name in names if name in {*found, *inputs, SYSTEM, *BESIDE, *_PREFERENCE}]


def find_messages(record: Any, field: str, roles: Mapping[str, str]) -> Found:
    """Return the messages of a record.

    Args:
        record: A JSON value: an object of one of the forms, or a list of messages.
        field: The key of a list of messages, or two keys USER/ANSWER; other forms are known only to the default.
        roles: Roles of this project by other names, before those of `ROLES`.

    Raises:
        UserError: The record has none of the forms, or is a pair of preference.
    """
    if not isinstance(record, dict | list):
        raise UserError(f"the record is {kind(record)}, not an object; write {_LIKE}")
    if isinstance(record, list):
        return Found(_LIST, [_rename(message, roles) for message in record], [])
    if form := next((keys for keys in _forms(field) if all(record.get(key) is not None for key in keys)), None):
        return _read(record, form, roles)
    if all(key in record for key in _PREFERENCE):
        raise UserError("chosen and rejected are a preference pair, on which moezoo does not train yet; give chats")
    if form := next((keys for keys in _forms(field) if all(key in record for key in keys)), None):
        return _read(record, form, roles)  # which is refused, as null
    raise UserError(_describe_missing(field, record))


def _describe_missing(field: str, names: Collection[str]) -> str:
    near = nearest(field, names) if names else "the object is empty"
    missing = "neither messages nor another known form is" if field == LISTS[0] else f"{show(field)} is not"
    return f"{missing} there; {near}; set data.field=KEY or USER/ANSWER"


def _forms(field: str) -> list[tuple[str, ...]]:
    """Return the keys of each form, in the order in which they are looked for."""
    own = tuple(field.split("/"))
    return [*((key,) for key in LISTS), *PAIRS] if field == LISTS[0] else [own]


def _read(record: Mapping[str, Any], form: tuple[str, ...], roles: Mapping[str, str]) -> Found:
    name, messages, beside = "/".join(form), [], None
    if len(form) == 1:
        check_kind(
            messages := from_json(record[name], list), list, show(name), "not an array of messages; set data.field"
        )
    else:
        beside = next((key for key in INPUTS if form[0] == "instruction" and record.get(key)), None)
        for key, role in zip(form, ("user", "assistant"), strict=True):
            check_kind(part := record[key], str | list, key, "neither a string nor an array of messages; correct it")
            if beside and role == "user":
                check_kind(part, str, key, f"not a string, next to {beside}; correct it")
                check_kind(record[beside], str, beside, "not a string; correct it")
                part = f"{part}\n\n{record[beside]}"
            messages = [*messages, *([{"role": role, "content": part}] if isinstance(part, str) else part)]
    messages = [_rename(message, roles) for message in messages]
    if system := record.get(SYSTEM):
        check_kind(system, str, SYSTEM, "not a string; correct it")
        first = {"role": "system", "content": system}
        if messages[:1] != [first]:
            if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
                raise UserError(f"{SYSTEM} is beside messages of the system, and differs; leave one of them out")
            messages = [first, *messages]
    read = {*form, beside, SYSTEM, *BESIDE}
    return Found(name, messages, [key for key, value in record.items() if key not in read and value not in (None, "")])


def _rename(message: Any, roles: Mapping[str, str]) -> Any:
    """Return a message with this project's names of its keys and of its role."""
    if not isinstance(message := from_json(message, dict), dict):
        return message
    names = {next((key for key in keys if key in message), keys[0]): keys[0] for keys in (ROLE, CONTENT)}
    renamed = {names.get(key, key): value for key, value in message.items()}
    if isinstance(role := renamed.get("role"), str):
        renamed["role"] = {**ROLES, **roles}.get(role, role)
    return renamed


def check_kind(value: Any, expected: Any, what: str, advice: str) -> None:
    """Raise `UserError` unless a JSON value is of a Python type."""
    if not isinstance(value, expected):
        raise UserError(f"{what} is {kind(value)}, {advice}")
