"""Chats: the forms of records, and the messages in them, checked, as templates read them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
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
THEIRS = {"human": "user", "gpt": "assistant"}
# Optional keys of every form.
BESIDE = ("tools", "chat_template_kwargs")
_PREFERENCE = ("chosen", "rejected")
_LIST = "a list of messages"
_LIKE = '{"messages": [{"role": ..., "content": ...}, ...]}'
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a chat's own variables must not replace.
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")
# The names under which an assistant's thoughts are stored; templates read the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# The names under which records say whether a message is trained on: 0 or false for not.
_WEIGHTS = ("weight", "loss", "loss_weight", "train")
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS}
_DEEPEST = 100
# Halves of surrogate pairs, which no UTF-8 can hold, and plane 16, whose characters stand for special tokens here.
_NOT_TEXT = re.compile("[\ud800-\udfff\U00100000-\U0010ffff]")


Message = dict[str, Any]
Change = Callable[[str, Any], Any]


class Chat(NamedTuple):
    """A chat, checked.

    - `messages`: objects with `role`, `content` (where there is one, a text or a list of parts with `text`) and what
      else a template reads. The arguments of calls are as in the record, an object or text;
    - `tools`: descriptions of tools; None without any;
    - `variables`: further variables of the template;
    - `excluded`: the numbers, from 0, of messages that are not trained on;
    - `others`: the keys of messages that moezoo does not know, once for each message;
    - `form`: the name of the form of the record;
    - `unread`: the keys of the record that are not read.
    """

    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    excluded: frozenset[int] = frozenset()
    others: tuple[str, ...] = ()
    form: str = ""
    unread: tuple[str, ...] = ()

    @property
    def turns(self) -> list[int]:
        """The numbers, from 0, of the assistant's messages that are trained on."""
        roles = enumerate(message["role"] for message in self.messages)
        return [number for number, role in roles if role == "assistant" and number not in self.excluded]

    def until(self, number: int) -> "Chat":
        """Return the chat up to message `number`, from 0."""
        others = self.others if self.turns[:1] == [number] else ()  # of all examples of a chat in the first
        return self._replace(messages=self.messages[: number + 1], others=others)

    def with_arguments(self, *, as_text: bool) -> "Chat":
        """Return the chat with the arguments of calls as texts or, where they are JSON, as objects."""

        def change(what: str, value: Any) -> Any:
            if what != "arguments":
                return value
            if not as_text:
                return from_json(value, dict)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return self._replace(messages=[map_message(message, change) for message in self.messages])

    def guarded(self, guard: Callable[[str], str]) -> "Chat":
        """Return the chat with every text replaced by `guard(text)` that the assistant has not written."""

        def change(message: Message) -> Message:
            if message["role"] == "assistant":
                return message
            return {key: value if key == "role" else _map_texts(value, guard) for key, value in message.items()}

        tools, variables = _map_texts(self.tools, guard), _map_texts(self.variables, guard)
        return self._replace(messages=[change(each) for each in self.messages], tools=tools, variables=variables)


def columns(names: Sequence[str], field: str) -> list[str]:
    """Return the columns of a table that chats are read from. Raises `UserError` for a table without chats."""
    found = {key for keys in _forms(field) if all(key in names for key in keys) for key in keys}
    if not found and not all(key in names for key in _PREFERENCE):
        raise UserError(f"has no chats: {_describe_missing(field, names)}")
    inputs = INPUTS if "instruction" in found else ()
    return [name for name in names if name in {*found, *inputs, SYSTEM, *BESIDE, *_PREFERENCE}]


def find_messages(record: Any, field: str, roles: Mapping[str, str]) -> Chat:
    """Return the chat that a record holds, not yet checked.

    Args:
        record: A JSON value: an object of one of the forms, or a list of messages.
        field: The key of a list of messages, or two keys USER/ANSWER; other forms are known only to the default.
        roles: Roles of this project by other names, before those of `THEIRS`.

    Raises:
        UserError: The record has none of the forms, or is a pair of preference.
    """
    if not isinstance(record, dict | list):
        raise UserError(f"the record is {kind(record)}, not an object; write {_LIKE}")
    if isinstance(record, list):
        return _read({_LIST: record}, (_LIST,), roles)
    known = [keys for keys in _forms(field) if all(key in record for key in keys)]
    form = next((keys for keys in known if all(record[key] is not None for key in keys)), None)
    if form is None and all(key in record for key in _PREFERENCE):
        raise UserError("chosen and rejected are a preference pair, on which moezoo does not train yet; give chats")
    if not known:
        raise UserError(_describe_missing(field, record))
    return _read(record, form or known[0], roles)  # the latter is refused, as null


def _describe_missing(field: str, names: Collection[str]) -> str:
    near = nearest(field, names) if names else "the object is empty"
    missing = "neither messages nor another known form is" if field == LISTS[0] else f"{show(field)} is not"
    return f"{missing} there; {near}; set data.field=KEY or USER/ANSWER"


def _forms(field: str) -> list[tuple[str, ...]]:
    """Return the keys of each form, in the order in which they are looked for."""
    own = tuple(field.split("/"))
    return [*((key,) for key in LISTS), *PAIRS] if field == LISTS[0] else [own]


def _read(record: Mapping[str, Any], form: tuple[str, ...], roles: Mapping[str, str]) -> Chat:
    name, messages, beside = "/".join(form), [], None
    if len(form) == 1:
        _check_kind(
            messages := from_json(record[name], list), list, show(name), "not an array of messages; set data.field"
        )
    else:
        beside = next((key for key in INPUTS if form[0] == "instruction" and record.get(key)), None)
        for key, role in zip(form, ("user", "assistant"), strict=True):
            _check_kind(part := record[key], str | list, key, "neither a string nor an array of messages; correct it")
            if beside and role == "user":
                _check_kind(part, str, key, f"not a string, next to {beside}; correct it")
                _check_kind(record[beside], str, beside, "not a string; correct it")
                part = f"{part}\n\n{record[beside]}"
            messages = [*messages, *([{"role": role, "content": part}] if isinstance(part, str) else part)]
    messages = [_rename(message, roles) for message in messages]
    if system := record.get(SYSTEM):
        _check_kind(system, str, SYSTEM, "not a string; correct it")
        first = {"role": "system", "content": system}
        if messages[:1] != [first]:
            if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
                raise UserError(f"{SYSTEM} is beside messages of the system, and differs; leave one of them out")
            messages = [first, *messages]
    read = {*form, beside, SYSTEM, *BESIDE}
    unread = tuple(key for key, value in record.items() if key not in read and value not in (None, ""))
    tools, variables = (record.get(key) for key in BESIDE)
    return Chat(messages, tools, {} if variables is None else variables, form=name, unread=unread)


def _rename(message: Any, roles: Mapping[str, str]) -> Any:
    """Return a message with this project's names of its keys and of its role."""
    if not isinstance(message := from_json(message, dict), dict):
        return message
    names = {next((key for key in keys if key in message), keys[0]): keys[0] for keys in (ROLE, CONTENT)}
    renamed = {names.get(key, key): value for key, value in message.items()}
    if isinstance(role := renamed.get("role"), str):
        renamed["role"] = {**THEIRS, **roles}.get(role, role)
    return renamed


def read_chat(record: Any, field: str = "messages", roles: Mapping[str, str] = MappingProxyType({})) -> Chat:
    """Return the chat that a JSON value holds.

    Args:
        record: It has one of the forms of `find_messages`. Messages have `role` and `content`: a text, a list
            of parts such as {"type": "text", "text": ...}, or null next to `tool_calls`. Null keys are left out, and
            thoughts get both names that templates have for them, as in transformers. A message whose `weight`,
            `loss`, `loss_weight` or `train` is 0 or false is not trained on. Optional are `tools` and
            `chat_template_kwargs`, an object of variables for the template. A list of tools and the arguments of a call
            may also be JSON text. Other keys have no effect.
        field: The key of the messages, or two keys USER/ANSWER.
        roles: Roles by other names: theirs -> one of `ROLES`.

    Raises:
        UserError: The value is not so.
    """
    found = find_messages(record, field, roles)
    if not found.messages:
        raise UserError(f"{found.form} is empty; give at least one message, or leave the line out")
    checked = [_check_message(message, f"message {number}") for number, message in enumerate(found.messages, 1)]
    excluded = frozenset(
        number for number, message in enumerate(checked) if _is_excluded(message, f"message {number + 1}")
    )
    tools, variables = from_json(found.tools or None, list), found.variables
    _check_kind(tools, list | None, "tools", "not an array; write a list of objects, or null")
    _check_kind(variables, dict, "chat_template_kwargs", "not an object; write names and values")
    if taken := [name for name in variables if name in _TAKEN]:
        raise UserError(f"chat_template_kwargs has {taken[0]}, which every template has already; leave it out")
    others = tuple(name for message in checked for name in message if name not in _KNOWN)
    chat = found._replace(messages=checked, tools=tools or None, excluded=excluded, others=others)
    for messages in (chat.messages, chat.with_arguments(as_text=False).messages):
        _map_texts([messages, chat.tools, chat.variables], _check_text)
    return chat


def map_message(message: Message, change: Change) -> Message:
    """Return a message with `change(what, value)` in place of some of its values.

    `what` is "thoughts"; "content", for its text or the text of each of its parts; "id", of a call; "name" or
    "arguments", of a called function.
    """

    def change_call(call: Message) -> Message:
        changed = {key: change(key, call[key]) for key in ("id", "name", "arguments") if key in call}
        return {**call, **changed, **({"function": change_call(call["function"])} if "function" in call else {})}

    changed = {name: change("thoughts", message[name]) for name in THOUGHTS if name in message}
    if "tool_call_id" in message:
        changed["tool_call_id"] = change("id", message["tool_call_id"])
    if isinstance(content := message.get("content"), str):
        changed["content"] = change("content", content)
    elif content is not None:
        changed["content"] = [{**part, "text": change("content", part["text"])} for part in content]
    if "tool_calls" in message:
        changed["tool_calls"] = [change_call(call) for call in message["tool_calls"]]
    return {**message, **changed}


def _check_message(message: Any, where: str) -> Message:
    """Return a message as templates read it."""
    _check_kind(message, dict, where, 'not an object; write {"role": ..., "content": ...}')
    message = {key: value for key, value in message.items() if value is not None}
    role, calls, content = message.get("role"), message.get("tool_calls", []), message.get("content", "")
    if role not in ROLES:
        found = "no role" if role is None else f"role {show(json.dumps(role))}"
        name = f"; or name it with data.roles.{role}=ROLE" if isinstance(role, str) and role.isidentifier() else ""
        raise UserError(f"{where} has {found}; valid: {', '.join(ROLES)}{name}")
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where}: tool_calls is {kind(calls)}, expected an array of objects; correct it")
    for call in calls:
        function = call.get("function", {})
        _check_kind(function, dict, f"{where}: the function of a call", "expected an object; correct it")
    for name in THOUGHTS:
        _check_kind(message.get(name, ""), str, f"{where}: {name}", "expected a string; correct it")
    _check_kind(content, str | list, f"{where}: content", "expected a string; correct it")
    for number, part in enumerate(content if isinstance(content, list) else (), 1):
        named = f"{where}: part {number} of content"
        _check_kind(part, dict, named, 'expected {"type": "text", "text": ...}')
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{named} has type {show(json.dumps(part.get('type')))} and no text; only text is read")
    thoughts = next((message[name] for name in THOUGHTS if name in message), None)
    if "content" not in message and (role != "assistant" or not (calls or thoughts)):
        raise UserError(f"{where} has no content; only an assistant's message with tool_calls may have none")
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _is_excluded(message: Message, where: str) -> bool:
    """Take the keys out of a message that say whether it is trained on, and return whether it is not."""
    found = {name: message.pop(name) for name in _WEIGHTS if name in message}
    for name, value in found.items():
        if value not in (0, 1):
            raise UserError(f"{where}: {name} is {show(json.dumps(value))}, expected 0 or 1; correct it")
    return not all(found.values())


def _map_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return a JSON value with all texts changed, those of keys too. Raises `UserError` if it is nested deeply."""
    if depth > _DEEPEST:
        raise UserError(f"objects and arrays are more than {_DEEPEST} deep; correct it")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change, depth + 1) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change, depth + 1) for key, item in value.items()}
    return value


def _check_text(text: str) -> str:
    if found := _NOT_TEXT.search(text):
        what = f"U+{ord(found[0]):04X}"
        if ord(found[0]) < 0x10000:
            raise UserError(f"a text has {what}, half of a surrogate pair, which no UTF-8 can hold; correct it")
        raise UserError(f"a text has the private character {what}, which moezoo needs for itself; replace it")
    return text


def _check_kind(value: Any, expected: Any, what: str, advice: str) -> None:
    """Raise `UserError` unless a JSON value is of a Python type."""
    if not isinstance(value, expected):
        raise UserError(f"{what} is {kind(value)}, {advice}")
