"""The tokens of a chat in its template, and which of them a model learns to predict."""

import functools
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from moezoo.data.chat_records import Chat
from moezoo.data.chat_renderer import Renderer
from moezoo.data.chat_template import Template
from moezoo.data.guarded import Encoded, Guarded
from moezoo.data.tokenizer import Bytes, HuggingFace

LossOn = Literal["assistant", "last", "all"]


class EncodedChat(NamedTuple):
    """A chat as tokens.

    - `text`: as the template writes it;
    - `ids`: the tokens of the text;
    - `begins`: the index in the text of the first character of each token;
    - `mask`: whether a token is predicted: whether its first character is the assistant's.
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
        self._make = lambda: Guarded(tokenizer, template.texts.values())
        self._renderer = Renderer(template, date)

    @functools.cached_property
    def _guarded(self) -> Guarded:
        return self._make()  # takes a moment, and data may be in the cache

    def __enter__(self) -> "ChatFormat":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    def encode(self, chat: Chat, loss_on: LossOn) -> EncodedChat:
        """Return the tokens of a chat.

        Args:
            chat: The chat.
            loss_on: Which tokens are predicted: those that the assistant has written, with the token that ends each of
                its turns; those of its last turn; or all. What the assistant has written is what stands in the
                template's blocks `{% generation %}`, or else what each of its messages adds to the beginning of an
                answer to the messages before it, without white space after the token that ends it.

        Raises:
            UserError: The template cannot render the chat, or the tokenizer cannot read the text or has a special token
                that cannot be told from its text.
        """
        rendered = self._renderer.render(self._request(chat, loss_on))
        found = self._guarded.encode(rendered.text)
        text = self._guarded.restore(rendered.text)
        spans = rendered.spans if rendered.marked else [_trim(*each, text, found) for each in rendered.spans]
        mask = np.full(len(found.ids), loss_on == "all")
        for begin, end in spans:
            mask |= (begin <= found.begins) & (found.begins < end)
        return EncodedChat(text, found.ids, found.begins, mask)

    def prompt(self, chat: Chat) -> EncodedChat:
        """Return the tokens of a chat and of the beginning of an answer to it. Raises `UserError` as `encode` does."""
        rendered = self._renderer.render(self._request(chat, "prompt"))
        found = self._guarded.encode(rendered.text)
        return EncodedChat(
            self._guarded.restore(rendered.text), found.ids, found.begins, np.zeros(len(found.ids), bool)
        )

    def _request(self, chat: Chat, task: str) -> dict[str, object]:
        return {**chat.guarded(self._guarded.guard)._asdict(), "task": task}


def _trim(begin: int, end: int, text: str, found: Encoded) -> tuple[int, int]:
    """Return the part [begin, end) of a text up to its last special token, if only white space follows that."""
    inside = found.special & (begin <= found.begins) & (found.begins < end)
    if not inside.any():
        return begin, end
    after = np.append(found.begins, len(text))[1:][inside][-1]  # where the next token begins
    return (begin, int(after)) if not text[after:end].strip() else (begin, end)
