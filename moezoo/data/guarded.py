"""A tokenizer that tells special tokens of a template from texts that look like them.

A user's text may hold the text of a special token, such as <|im_end|>. It must stay text: otherwise a user could end
his own turn. The same holds for other tokens that the template writes, such as <tool_response>. So two changes are made
with characters of plane 16, which no text has:

1. `guard` replaces, in a text of the user, the first character of each special token by a stand-in. Templates trim,
   split and compare the text as before, and no length changes.
2. In the rendered text, what still looks like a special token was written by the template. There each is replaced by
   its code: a character of its own, as often as its text is long. Then stand-ins become what they stand for.

The tokenizer that reads the result is the one of the file, except that each special token has its code as its text. So
what the codes are not, is text to it, and all else is as it was.
"""

import itertools
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from moezoo.data.tokenizer import Bytes, HuggingFace
from moezoo.errors import UserError
from moezoo.typed import show

_CODE, _STAND_IN, _END = 0x100000, 0x10FF00, 0x10FFF0
_NOT_TEXT = re.compile(f"[{chr(_CODE)}-{chr(_STAND_IN - 1)}{chr(_END)}-\U0010ffff]")


class Encoded(NamedTuple):
    """Token ids [tokens], the part [begin, end) of the text that each is, and whether it is special in a template."""

    ids: Int64[np.ndarray, "tokens"]
    begins: Int64[np.ndarray, "tokens"]
    ends: Int64[np.ndarray, "tokens"]
    special: Bool[np.ndarray, "tokens"]


class Guarded:
    """The tokenizer of chats.

    Args:
        tokenizer: The tokenizer; of bytes none is special.
        templates: The texts of templates. Tokens that were added to the tokenizer count as special if they are in one.

    Raises:
        UserError: A special token cannot be told from its text, or another token would get another id.
    """

    def __init__(self, tokenizer: Bytes | HuggingFace, templates: Iterable[str] = ()):
        self._tokenizer = tokenizer
        contents: dict[str, Any] = tokenizer.contents() if isinstance(tokenizer, HuggingFace) else {"added_tokens": []}
        added = {token["content"]: token["special"] for token in contents["added_tokens"] if token["content"]}
        written = "\n".join(templates)
        special = [text for text in added if added[text] or (text in written and not text.isspace())]
        self._codes = {text: chr(_CODE + number) for number, text in enumerate(special)}
        firsts = {first: chr(_STAND_IN + number) for number, first in enumerate(dict.fromkeys(t[0] for t in special))}
        if len(special) > _STAND_IN - _CODE or len(firsts) > _END - _STAND_IN:
            raise UserError(f"the tokenizer has {len(special)} special tokens, too many to guard; give another")
        self._stand_ins = firsts
        self._back = str.maketrans({stand_in: first for first, stand_in in firsts.items()})
        rests = {first: "|".join(re.escape(text[1:]) for text in special if text[0] == first) for first in firsts}
        self._looks = _pattern(f"{re.escape(first)}(?={rest})" for first, rest in rests.items())
        self._beginnings = {text[:length] for text in special for length in range(1, len(text))}
        self._longest = max(map(len, special), default=0)
        # As the library: the leftmost, and of those the longest. Tokens that are not special hide those inside them.
        self._written = _pattern(map(re.escape, sorted(added, key=len, reverse=True)))
        if isinstance(tokenizer, HuggingFace):
            self._unknown = tokenizer.token_id(_unknown(contents["model"]) or "")
            self._ids = np.array([tokenizer.token_id(text) for text in special], np.int64)
            self._library = tokenizer.changed(self._replace)
            for text in sorted(added, key=lambda text: text in self._codes):
                own, code = tokenizer.token_id(text), self._codes.get(text, "") * len(text)
                if code and self._encode(code).ids.tolist() != [own]:
                    raise UserError(f"{tokenizer.shown}: its special token {show(text)} is not read as one; correct it")
                if not code and (found := self._library.token_id(text)) != own:
                    raise UserError(
                        f"{tokenizer.shown}: its added token {show(text)} is {own}, but {found} where texts of special "
                        "tokens stay text; give another tokenizer"
                    )

    def guard(self, text: str) -> str:
        """Return a text, of anybody but the template, in which nothing looks like a special token."""
        text = self._looks.sub(lambda found: self._stand_ins[found[0]], text)
        # Its end must not become one together with what the template writes after it.
        end = len(text.rstrip())
        for length in range(min(self._longest, end), 0, -1):
            if text[end - length : end] in self._beginnings:
                at = end - length
                return f"{text[:at]}{self._stand_ins[text[at]]}{self.guard(text[at + 1 :])}"
        return text

    def restore(self, text: str) -> str:
        """Return a rendered text as a user reads it, of the same length."""
        return text.translate(self._back)

    def encode(self, text: str) -> Encoded:
        """Return the tokens of a rendered text, whose own texts were guarded; none is added.

        Raises `UserError` for text that the tokenizer refuses, or reads as a special token.
        """
        if found := _NOT_TEXT.search(text):
            raise UserError(f"the template writes the private character U+{ord(found[0]):04X}; give another template")
        coded = self._written.sub(lambda found: self._codes.get(found[0], "") * len(found[0]) or found[0], text)
        return self._encode(self.restore(coded))

    def _encode(self, text: str) -> Encoded:
        if isinstance(self._tokenizer, Bytes):
            lengths = [len(character.encode()) for character in text]
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
            begins = np.repeat(np.arange(len(text)), lengths)
            return Encoded(ids, begins, begins + 1, np.zeros(len(ids), bool))
        places = self._library.encode_places(text)
        ids = np.array(places.ids, np.int64)
        begins, ends = np.fromiter(itertools.chain.from_iterable(places.spans), np.int64).reshape(-1, 2).T
        # The token of a code may begin or end with white space that it takes in.
        characters = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64) - _CODE
        coded = np.flatnonzero(characters >= 0)
        first = np.append(coded, len(text))[np.searchsorted(coded, begins)]  # of each token, or of one behind it
        special = first < ends
        ids[special] = self._ids[characters[first[special]]]
        wrong = np.isin(ids, self._ids) & ~special & (ids != (-1 if self._unknown is None else self._unknown))
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{self._tokenizer.shown} reads the text {show(text[begins[at] : ends[at]])} as a special token, "
                "also where it is a user's; give another tokenizer"
            )
        return Encoded(ids, begins, ends, special)

    def _replace(self, contents: dict[str, Any]) -> None:
        """Give each special token in a tokenizer.json its code as its text."""
        contents["post_processor"] = None  # it adds tokens, and leaves the spaces around words out of their places
        model, added = contents["model"], contents["added_tokens"]
        codes = {text: code * len(text) for text, code in self._codes.items()}
        parts = _parts(model, codes)
        for token in added:
            token["content"] = codes.get(token["content"], token["content"])
        # The library gives an added token the id of the model's token with its text, or else the next id. So that all
        # have their own, the model's token gets the code too: then no text is read as one. Where the model needs its
        # text, the code has a new id, the last, so that no id of another token changes.
        last = {codes[text] for text in parts}
        added.sort(key=lambda token: token["content"] in last)
        codes = {text: code for text, code in codes.items() if text not in parts}
        if isinstance(model["vocab"], list):
            model["vocab"] = [[codes.get(text, text), score] for text, score in model["vocab"]]
        else:
            model["vocab"] = {codes.get(text, text): number for text, number in model["vocab"].items()}
        if model.get("unk_token") in codes:
            model["unk_token"] = codes[model["unk_token"]]


def _parts(model: dict[str, Any], special: Collection[str]) -> set[str]:
    """Return which special tokens a model of a tokenizer.json makes other tokens of, or of other tokens."""
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else dict(model["vocab"])
    held = {text for text in special if text in vocab}
    found = {text for text in held if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text)}
    if held and "merges" in model:
        found |= {text for text in held if len(text) == 1}  # what is merged begins as single characters
        beginning = model.get("continuing_subword_prefix") or ""
        for merge in model["merges"]:
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            found |= held & {first, second, first + second.removeprefix(beginning)}
    return found


def _unknown(model: dict[str, Any]) -> str | None:
    """Return the text of the token for what a model of a tokenizer.json does not know, if it has one."""
    if isinstance(model["vocab"], list):
        return None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _pattern(choices: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of what one of the choices matches; of none, nothing."""
    return re.compile("|".join(choices) or r"(?!)")
