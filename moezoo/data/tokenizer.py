"""Convert text to token ids and back: raw bytes, or a Hugging Face tokenizer. Only this module uses that library."""

import copy
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np

from moezoo.data.pieces import find_unsettled
from moezoo.data.token_bytes import TokenBytes, measure_tokens
from moezoo.errors import UserError
from moezoo.host import check_file
from moezoo.typed import convert, show

NO_TOKENS = "the tokenizer makes no token of this text; give another text or tokenizer"


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


class Bytes:
    """Each byte of UTF-8 is a token."""

    vocab = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))  # arguments of a command need not be UTF-8

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


class Places(NamedTuple):
    """Token ids, and the part of the text that each stands for, as indices of characters."""

    ids: list[int]
    spans: list[tuple[int, int]]


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

    def encode_places(self, text: str) -> "Places":
        """Return the ids, without special tokens that the file adds, and their places. Raises as `encode` does."""
        try:
            found = self._library.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise self._refuse(error) from error
        return Places(found.ids, found.offsets)

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
