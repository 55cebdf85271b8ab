"""Chats: the messages of a record, checked, as templates read them."""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moezoo.data.chat_forms import check_kind, find_messages
from moezoo.data.json_values import from_json, kind
from moezoo.errors import UserError
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
    - `form`: the form of the record, as `moezoo.data.chat_forms` names it.
    """

    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    excluded: frozenset[int] = frozenset()
    others: tuple[str, ...] = ()
    form: str = ""

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


def read_chat(record: Any, field: str = "messages", roles: Mapping[str, str] = MappingProxyType({})) -> Chat:
    """Return the chat that a JSON value holds.

    Args:
        record: It has one of the forms of `moezoo.data.chat_forms`. Messages have `role` and `content`: a text, a list
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
    form, messages, _ = find_messages(record, field, roles)
    record = record if isinstance(record, dict) else {}
    if not messages:
        raise UserError(f"{form} is empty; give at least one message, or leave the line out")
    checked = [_check_message(message, f"message {number}") for number, message in enumerate(messages, 1)]
    excluded = frozenset(
        number for number, message in enumerate(checked) if _is_excluded(message, f"message {number + 1}")
    )
    tools, variables = from_json(record.get("tools") or None, list), record.get("chat_template_kwargs")
    check_kind(tools, list | None, "tools", "not an array; write a list of objects, or null")
    check_kind(variables, dict | None, "chat_template_kwargs", "not an object; write names and values")
    if taken := [name for name in variables or {} if name in _TAKEN]:
        raise UserError(f"chat_template_kwargs has {taken[0]}, which every template has already; leave it out")
    others = tuple(name for message in checked for name in message if name not in _KNOWN)
    chat = Chat(checked, tools or None, variables or {}, excluded, others, form)
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
    check_kind(message, dict, where, 'not an object; write {"role": ..., "content": ...}')
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
        check_kind(function, dict, f"{where}: the function of a call", "expected an object; correct it")
    for name in THOUGHTS:
        check_kind(message.get(name, ""), str, f"{where}: {name}", "expected a string; correct it")
    check_kind(content, str | list, f"{where}: content", "expected a string; correct it")
    for number, part in enumerate(content if isinstance(content, list) else (), 1):
        named = f"{where}: part {number} of content"
        check_kind(part, dict, named, 'expected {"type": "text", "text": ...}')
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
