"""Chats as users write them: JSON objects with `messages`, or with `prompt` and `completion`."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moezoo.data.jsonl import kind
from moezoo.errors import UserError, nearest
from moezoo.typed import show

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


class Chat(NamedTuple):
    """A chat, checked.

    - `messages`: objects with `role`, `content` (where there is one, a text or a list of parts with `text`) and what
      else a template reads. The arguments of calls are objects, where they are JSON;
    - `tools`: descriptions of tools; None without any;
    - `variables`: further variables of the template;
    - `excluded`: the numbers, from 0, of messages that are not trained on;
    - `others`: the keys of messages that moezoo does not know, once for each message;
    - `text_calls`: the messages with the arguments of calls as texts; None without any.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    excluded: frozenset[int] = frozenset()
    others: tuple[str, ...] = ()
    text_calls: list[dict[str, Any]] | None = None

    @property
    def turns(self) -> list[int]:
        """The numbers, from 0, of the assistant's messages that are trained on."""
        roles = enumerate(message["role"] for message in self.messages)
        return [number for number, role in roles if role == "assistant" and number not in self.excluded]

    def until(self, number: int) -> "Chat":
        """Return the chat up to message `number`, from 0."""
        calls = None if self.text_calls is None else self.text_calls[: number + 1]
        others = self.others if self.turns[:1] == [number] else ()  # of all examples of a chat in the first
        return self._replace(messages=self.messages[: number + 1], others=others, text_calls=calls)

    def guarded(self, guard: Callable[[str], str]) -> "Chat":
        """Return the chat with every text replaced by `guard(text)` that the assistant has not written."""
        messages = [
            {key: value if key == "role" else _map_texts(value, guard) for key, value in message.items()}
            if message["role"] != "assistant"
            else message
            for message in self.messages
        ]
        calls = self.text_calls and [
            with_calls if with_calls["role"] == "assistant" else message
            for message, with_calls in zip(messages, self.text_calls, strict=True)
        ]
        tools, variables = _map_texts(self.tools, guard), _map_texts(self.variables, guard)
        return self._replace(messages=messages, tools=tools, variables=variables, text_calls=calls)


def read_chat(record: Mapping[str, Any], field: str = "messages") -> Chat:
    """Return the chat that a JSON object holds.

    Args:
        record: The object. `field` is a list of messages, which have `role` and `content`: a text, a list of parts such
            as {"type": "text", "text": ...}, or null next to `tool_calls`. Keys that are null are left out, and
            thoughts get both names that templates have for them, as in transformers. A message whose `weight`, `loss`,
            `loss_weight` or `train` is 0 or false is not trained on. Instead of `field` there may be `prompt` and
            `completion`: lists of messages, or the texts of one of the user and one of the assistant.
            Optional are `tools` and `chat_template_kwargs`, an object of variables for the template. A list of tools
            and the arguments of a call may also be JSON text. Other keys have no effect.
        field: The key of the messages.

    Raises:
        UserError: The object is not so.
    """
    messages = _find_messages(record, field)
    if not messages:
        raise UserError(f"{show(field)} is empty; give at least one message, or leave the line out")
    checked = [_check_message(message, f"message {number}") for number, message in enumerate(messages, 1)]
    excluded = frozenset(
        number for number, message in enumerate(checked) if _is_excluded(message, f"message {number + 1}")
    )
    tools = _from_json(record.get("tools"), list)
    if not (tools is None or isinstance(tools, list)):
        raise UserError(f"tools is {kind(tools)}, not an array; write a list of objects, or null")
    variables = record.get("chat_template_kwargs")
    if not (variables is None or isinstance(variables, dict)):
        raise UserError(f"chat_template_kwargs is {kind(variables)}, not an object; write names and values")
    if taken := [name for name in variables or {} if name in _TAKEN]:
        raise UserError(f"chat_template_kwargs has {taken[0]}, which every template has already; leave it out")
    others = tuple(name for message in checked for name in message if name not in _KNOWN)
    calls = None
    if any("tool_calls" in message for message in checked):
        calls = [_map_arguments(message, _to_text) for message in checked]
    objects = [_map_arguments(message, lambda value: _from_json(value, dict)) for message in checked]
    chat = Chat(objects, tools or None, variables or {}, excluded, others, calls)
    _map_texts([chat.messages, chat.tools, chat.variables, calls], _check_text)
    return chat


def _find_messages(record: Mapping[str, Any], field: str) -> list[Any]:
    """Return the messages of a record, not yet checked."""
    pair = all(record.get(name) is not None for name in ("prompt", "completion"))
    if field in record and not (record[field] is None and pair):  # files of both kinds have all keys in each line
        messages = record[field]
        if not isinstance(messages, list):
            raise UserError(f"{show(field)} is {kind(messages)}, not an array of messages; set data.field")
        return messages
    if not ("prompt" in record and "completion" in record):
        near = nearest(field, record) if record else "the object is empty"
        raise UserError(f"neither {show(field)} nor prompt and completion is there; {near}; set data.field")
    found = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        part = record[name]
        if not isinstance(part, str | list):
            raise UserError(f"{name} is {kind(part)}, neither a string nor an array of messages; correct it")
        found += [{"role": role, "content": part}] if isinstance(part, str) else part
    return found


def _check_message(message: Any, where: str) -> dict[str, Any]:
    """Return a message as templates read it."""
    if not isinstance(message, dict):
        raise UserError(f'{where} is {kind(message)}, not an object; write {{"role": ..., "content": ...}}')
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        found = "no role" if role is None else f"role {show(json.dumps(role))}"
        raise UserError(f"{where} has {found}; valid: {', '.join(ROLES)}")
    calls = message.get("tool_calls", [])
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where}: tool_calls is {kind(calls)}, expected an array of objects; correct it")
    for name in THOUGHTS:
        if not isinstance(message.get(name, ""), str):
            raise UserError(f"{where}: {name} is {kind(message[name])}, expected a string; correct it")
    if wrong := [call for call in calls if not isinstance(call.get("function", {}), dict)]:
        raise UserError(
            f"{where}: the function of a call is {kind(wrong[0]['function'])}, expected an object; correct it"
        )
    thoughts = next((message[name] for name in THOUGHTS if name in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    if "content" not in message:
        if role != "assistant" or not (calls or thoughts):
            raise UserError(f"{where} has no content; only an assistant's message with tool_calls may have none")
        return message
    content = message["content"]
    if isinstance(content, list):
        for number, part in enumerate(content, 1):
            _check_part(part, f"{where}: part {number}")
    elif not isinstance(content, str):
        raise UserError(f"{where}: content is {kind(content)}, expected a string; correct it")
    return message


def _is_excluded(message: dict[str, Any], where: str) -> bool:
    """Take the keys out of a message that say whether it is trained on, and return whether it is not."""
    found = {name: message.pop(name) for name in _WEIGHTS if name in message}
    for name, value in found.items():
        if value not in (0, 1):
            raise UserError(f"{where}: {name} is {show(json.dumps(value))}, expected 0 or 1; correct it")
    return not all(found.values())


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise UserError(f'{where} of content is {kind(part)}, expected {{"type": "text", "text": ...}}')
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise UserError(
            f"{where} of content has type {show(json.dumps(part.get('type')))} and no text; only text is read"
        )


def _map_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message in which the arguments of calls are changed."""

    def call(found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(found.get("function"), dict):
            return {**found, "function": call(found["function"])}
        return {**found, "arguments": change(found["arguments"])} if "arguments" in found else found

    return (
        {**message, "tool_calls": [call(found) for found in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
    )


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _from_json(value: Any, expected: type) -> Any:
    """Return what a text holds as JSON if it is an `expected`, otherwise the value as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, expected) else value


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
