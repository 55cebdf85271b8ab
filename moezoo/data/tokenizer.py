"""Convert text to token ids and back: raw bytes, a Hugging Face tokenizer, or one in which texts stay text, for chats.

Only this module uses the library of Hugging Face tokenizers.
"""

import copy
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64

from moezoo.data.token_text import TokenBytes, find_unsettled, measure_tokens
from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import convert, show

NO_TOKENS = "the tokenizer makes no token of this text; give another text or tokenizer"
# The characters of `Guarded`: codes, and behind them stand-ins.
_CODE, _STAND_IN, _END = 0x100000, 0x10FF00, 0x10FFF0
_NOT_TEXT = re.compile(f"[{chr(_CODE)}-{chr(_STAND_IN - 1)}{chr(_END)}-\U0010ffff]")


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back; `vocab` is the largest id plus 1.

    - `token_bytes` returns how many bytes of text each id stands for, and raises `UserError` where that is not known.
    - `unsettled` returns the ids whose text may be another once more ids follow; None where any may.
    """

    @property
    def vocab(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str: ...

    def token_bytes(self) -> TokenBytes: ...

    def unsettled(self) -> frozenset[int] | None: ...


class Encoded(NamedTuple):
    """Token ids [tokens], the part [begin, end) of the text that each is, and whether it is special in a template."""

    ids: Int64[np.ndarray, "tokens"]
    begins: Int64[np.ndarray, "tokens"]
    ends: Int64[np.ndarray, "tokens"]
    special: Bool[np.ndarray, "tokens"]


class Bytes:
    """Each byte of UTF-8 is a token."""

    vocab, shown = 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))  # arguments of a command need not be UTF-8

    def encode_places(self, text: str) -> Encoded:
        """Return the ids and their places, none of them special."""
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        begins = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return Encoded(ids, begins, begins + 1, np.zeros(len(ids), bool))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text; bytes that are not UTF-8, such as a part of a character, and ids over 255 become U+FFFD."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in map(int, ids)).decode(errors="replace")

    def token_bytes(self) -> TokenBytes:
        return TokenBytes(*np.ones((2, self.vocab), np.int64))

    def unsettled(self) -> frozenset[int]:
        return frozenset()


class Numbers:
    """Tokens without text: their ids as decimal numbers, separated by spaces."""

    def __init__(self, vocab: int, where: str = "this data"):
        self.vocab, self._where = vocab, where

    def encode(self, text: str) -> list[int]:
        """Return the ids. Raises `UserError` for anything except numbers below `vocab`."""
        words = text.split()
        for word in words:
            # Python converts texts of some thousand digits slowly or not at all.
            if not (word.isascii() and word.isdecimal() and len(word) < 20 and int(word) < self.vocab):
                raise UserError(
                    f"'{show(word)}' is not a token: {self._where} has no tokenizer; "
                    f"give numbers from 0 to {self.vocab - 1}, separated by spaces"
                )
        return [int(word) for word in words]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_bytes(self) -> TokenBytes:
        raise UserError(f"{self._where} has no tokenizer")

    def unsettled(self) -> frozenset[int]:
        return frozenset()


class HuggingFace:
    """A Hugging Face `tokenizer.json`, which adds the special tokens that the file defines; `shown` names it.

    Raises `UserError`, naming `key`, if there is no such file or it is not a tokenizer.
    """

    def __init__(self, path: Path, *, key: str):
        from tokenizers import Tokenizer as Library

        self._path, self.shown = path, show(f"{key}={path}")
        check_file(path, self.shown, f"give a Hugging Face tokenizer.json, or leave {key} out for bytes")
        try:
            self._library: Any = Library.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"{self.shown} is not a Hugging Face tokenizer.json: {one_line(error)}") from error
        # A file saved by a fine-tuning run may truncate every text to some length, or pad it.
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab:
            raise UserError(f"{self.shown} has an empty vocabulary; give another tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """Return the ids. Raises `UserError` for text that the tokenizer refuses, such as words unknown to it."""
        whole = whole_text(text)
        try:
            return self._library.encode(whole).ids
        except Exception as error:  # the library raises bare Exceptions
            raise self._refuse(error) from error

    def encode_places(self, text: str) -> Encoded:
        """Return the ids, without special tokens that the file adds, and their places. Raises as `encode` does."""
        try:
            found = self._library.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise self._refuse(error) from error
        begins, ends = np.fromiter(itertools.chain.from_iterable(found.offsets), np.int64).reshape(-1, 2).T
        return Encoded(np.array(found.ids, np.int64), begins, ends, np.zeros(len(found.ids), bool))

    def contents(self) -> dict[str, Any]:
        """Return what the file holds."""
        return json.loads(self._path.read_bytes())

    def changed(self, change: Callable[[dict[str, Any]], None]) -> "HuggingFace":
        """Return the tokenizer of the file's contents after `change`, which changes them in place."""
        contents, other = self.contents(), copy.copy(self)
        change(contents)
        other._library = type(self._library).from_str(json.dumps(contents))
        other._library.no_truncation()
        other._library.no_padding()
        return other

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        return self._library.token_to_id(token)

    def token_text(self, number: int) -> str | None:
        """Return the text of the token with this id; None if there is none."""
        return self._library.id_to_token(number) if 0 <= number < self.vocab else None

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return self._library.decode([int(i) for i in ids])

    def decode_special(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text with that of special tokens."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> TokenBytes:
        return measure_tokens(self._library, self.vocab, self.shown)

    def unsettled(self) -> frozenset[int] | None:
        return find_unsettled(self._library)

    def _refuse(self, error: Exception) -> UserError:
        return UserError(f"{self.shown} cannot encode the text ({one_line(error)}); give another text or tokenizer")


class Guarded:
    """The tokenizer of chats, which tells special tokens of a template from texts that look like them.

    A user's text may hold the text of a special token, such as <|im_end|>. It must stay text: otherwise a user could
    end his own turn. The same holds for other tokens that the template writes, such as <tool_response>. So two changes
    are made with characters of plane 16, which no text has:

    1. `guard` replaces, in a text of the user, the first character of each special token by a stand-in. Templates trim,
       split and compare the text as before, and no length changes.
    2. In the rendered text, what still looks like a special token was written by the template. There each is replaced
       by its code: a character of its own, as often as its text is long. Then stand-ins become what they stand for.

    The tokenizer that reads the result is the one of the file, except that each special token has its code as its text.
    So what the codes are not, is text to it, and all else is as it was.

    Args:
        tokenizer: The tokenizer; of bytes none is special.
        templates: The texts of templates. Tokens that were added to the tokenizer count as special if they are in one.

    Raises:
        UserError: A special token cannot be told from its text, or another token would get another id.
    """

    def __init__(self, tokenizer: Bytes | HuggingFace, templates: Iterable[str] = ()):
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
        self._tokenizer, self._library, self._unknown, self._ids = tokenizer, tokenizer, None, np.zeros(0, np.int64)
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
        ids, begins, ends, _ = self._library.encode_places(text)
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


def folder_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, its tokenizer.json.

    `encode(text)` returns a list of ids, with the special tokens that the file adds, `decode(ids)` the text, and
    `vocab` is the largest id plus 1.

    Raises `UserError` if the folder has no tokenizer.json, or a damaged one.
    """
    path = Path(os.path.expanduser(convert(str, folder, "folder"))) / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"folder={show(str(folder))} has no tokenizer.json; give token ids, or for a model of bytes take "
            "moezoo.data.tokenizer.Bytes()"
        )
    return HuggingFace(path, key="tokenizer")


def is_same_tokenizer(one: Path, other: Path) -> bool:
    """Return whether two files `tokenizer.json` make the same ids: they may truncate and pad differently."""

    def read(path: Path) -> Any:
        try:
            table = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{show(str(path))} cannot be read ({one_line(error)}); copy it again") from error
        return {key: value for key, value in table.items() if key not in ("truncation", "padding")}

    return read(one) == read(other)


def text_tokenizer(path: str | None, *, key: str) -> Bytes | HuggingFace:
    """Return the tokenizer in the file `path`, or raw bytes for None; `key` is the user's name of the setting."""
    return Bytes() if path is None else HuggingFace(Path(os.path.expanduser(path)), key=key)


def end_id(tokenizer: Tokenizer, token: str, *, key: str) -> int:
    """Return the id of the token that ends documents. Raises `UserError`, naming `key`, if there is no such token."""
    shown = show(f"{key}={token}")
    if not isinstance(tokenizer, HuggingFace):
        raise UserError(f"{shown} needs a tokenizer that has this token; set data.tokenizer, or leave {key} out")
    found = tokenizer.token_id(token)
    if found is None:
        raise UserError(f"{shown} is not a token of {tokenizer.shown}; give the text of one, such as </s>")
    return found


def document_ids(tokenizer: Tokenizer, text: bytes, dtype: np.dtype) -> np.ndarray:
    """Return the tokens [length] of one document of UTF-8 text, as `dtype`."""
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(text, np.uint8).astype(dtype, copy=False)
    return np.array(tokenizer.encode(text.decode()), dtype)


def whole_text(text: str) -> str:
    """Return a text in whose place Python has bytes of UTF-8, as in arguments where the locale has only ASCII.

    Raises `UserError` where the bytes are not UTF-8.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"the text is not UTF-8 ({error.reason} at {error.start}); give UTF-8, and set LC_ALL=C.UTF-8 where "
            "the terminal has another encoding"
        ) from None


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or of a long line its first 200 characters."""
    return show((str(error).strip() or type(error).__name__).splitlines()[0][:200])
