"""The text that tokens stand for: the bytes of each, which bits per byte divide by, and pieces of it while tokens come.

All follows from the decoder of a `tokenizer.json`. Byte-level and SentencePiece decoders join the pieces of tokens, so
each token has a fixed number of bytes; only at the start of a text some drop a space that `encode` has added. A special
token stands for no text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from moezoo.data.corpus import Corpus
from moezoo.data.rows import Rows
from moezoo.errors import UserError

_ROWS = 2**10  # to have in memory at once
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Steps of decoders that join texts of tokens from left to right.
_JOINING = ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


class TokenBytes(NamedTuple):
    """The bytes of UTF-8 that each token stands for, by its id.

    - `inside`: after other text;
    - `first`: as the first token of a text, special tokens apart.
    """

    inside: Int64[np.ndarray, "vocab"]
    first: Int64[np.ndarray, "vocab"]


def measure_tokens(library: Any, vocab: int, shown: str) -> TokenBytes:
    """Return the bytes of the tokens of a `tokenizers.Tokenizer`, whose ids are below `vocab`.

    Raises `UserError`, which begins with `shown`, where its decoder is not a sum over tokens, or is not known.
    """
    described = json.loads(library.to_str())
    measure = _measurer(described["decoder"], shown)
    special = {token["id"] for token in described["added_tokens"] if token["special"]}
    found = np.zeros((2, vocab), np.int64)
    for token, number in library.get_vocab(with_added_tokens=True).items():
        if number not in special:
            found[:, number] = measure(token)
    return TokenBytes(*found)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder; none of no decoder, which puts spaces between tokens."""
    if decoder is None:
        return []
    return [step for each in decoder["decoders"] for step in _steps(each)] if "decoders" in decoder else [decoder]


def _measurer(decoder: dict[str, Any] | None, shown: str) -> Callable[[str], tuple[int, int]]:
    """Return a function from a token to its bytes inside a text and at its start."""
    changes: list[Callable[[str, bool], str]] = []  # from a token, and whether it is the first, to its text
    joined = False
    if decoder is None:
        raise UserError(f"{shown} has no decoder, so it does not give the text of its tokens back")
    for step in _steps(decoder):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
                changes.append(lambda text, first, old=old, new=new: text.replace(old, new))
            case {"type": "ByteFallback"} if not joined:
                changes.append(lambda text, first: _one_byte(int(m[1], 16)) if (m := _BYTE.fullmatch(text)) else text)
            case {"type": "ByteLevel"} if not joined:
                bytes_of, joined = _byte_level(), True
                changes.append(
                    lambda text, first, of=bytes_of: (
                        "".join(_one_byte(of[c]) for c in text) if of.keys() >= set(text) else text
                    )
                )
            case {"type": "Metaspace", "replacement": str(mark)} if not joined:
                drops = step.get("prepend_scheme", "always") != "never"
                changes.append(
                    lambda text, first, mark=mark, drops=drops: text.replace(mark, "" if first and drops else " ")
                )
            case {"type": "Fuse"}:
                joined = True
            case {"type": "Strip", "content": str(what), "start": 0 | 1 as start, "stop": 0} if joined:
                changes.append(
                    lambda text, first, what=what, start=start: text.removeprefix(what) if first and start else text
                )
            case _:
                raise UserError(f"{shown}: the bytes of a token do not follow from its decoder ({step.get('type')})")

    def measure(token: str) -> tuple[int, int]:
        sizes = []
        for is_first in (False, True):
            text = token
            for change in changes:
                text = change(text, is_first)
            sizes.append(len(text.encode(errors="surrogateescape")))
        return sizes[0], sizes[1]

    return measure


def _one_byte(value: int) -> str:
    """Return a character of one byte in UTF-8 that stands for a byte, which may be a part of a character."""
    return chr(value) if value < 128 else "?"


def _byte_level() -> dict[str, int]:
    """Return the byte of each character in which byte-level tokens are written (Radford et al., 2019).

    Printable characters of Latin-1 are themselves; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def count_bytes(rows: Rows, corpus: Corpus, indices: Integer[np.ndarray, "chosen"], table: TokenBytes) -> int:
    """Return the bytes of text that the tokens predicted in the rows `indices`, made of `corpus`, stand for."""
    inside, change = (np.append(sizes, 0) for sizes in (table.inside, table.first - table.inside))
    beyond = len(table.inside)  # an id that the tokenizer does not have decodes to nothing
    first = _first_texts(corpus, inside == 0) if change.any() else np.zeros(0, np.int64)
    total = 0
    for begin in range(0, len(indices), _ROWS):
        some = indices[begin : begin + _ROWS]
        batch = rows.read(some)
        predicted = batch.labels >= 0
        labels = batch.labels[predicted]
        total += int(inside[np.minimum(labels, beyond)].sum())
        if len(first):
            is_first = np.isin(rows.locate(some)[predicted] + 1, first)
            total += int(change[np.minimum(labels[is_first], beyond)].sum())
    return total


def _first_texts(corpus: Corpus, is_silent: np.ndarray) -> Int64[np.ndarray, "found"]:
    """Return the index in the stored tokens at which the text of each document begins; some have no text.

    `is_silent` says of each id, and last of all ids beyond them, whether it is no text.
    """
    begin, end, found = corpus.starts, corpus.starts + np.diff(corpus.offsets), []
    while len(begin := begin[looking := begin < end]):
        end = end[looking]
        silent = is_silent[np.minimum(corpus.tokens[begin], len(is_silent) - 1)]
        found.append(begin[~silent])
        begin, end = begin[silent] + 1, end[silent]
    return np.concatenate([np.zeros(0, np.int64), *found])


def find_unsettled(library: Any) -> frozenset[int] | None:
    """Return the tokens of a `tokenizers.Tokenizer` whose text may be another once more tokens follow.

    Where a decoder has tokens for single bytes, it writes U+FFFD for each byte of a run of them that is not UTF-8. A
    special token, which has no text, may stand in such a run.

    None stands for all tokens, where the decoder is not known to join them from left to right.
    """
    described = json.loads(library.to_str())
    steps = _steps(described["decoder"])
    if not {step["type"] for step in steps} <= {*_JOINING} or any(step.get("stop", 0) for step in steps):
        return None
    if not any(step["type"] == "ByteFallback" for step in steps):
        return frozenset()
    special = [token["id"] for token in described["added_tokens"] if token["special"]]
    found = (library.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return frozenset([*special, *(number for number in found if number is not None)])


def pieces(
    tokens: Iterable[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    unsettled: frozenset[int] | None,
) -> Iterator[str]:
    """Yield the text of tokens as they come, each piece as soon as no later token can change it.

    Args:
        tokens: The tokens, some at a time.
        decode: Returns the text of tokens; U+FFFD at its end may be an unfinished character.
        unsettled: The tokens whose text may be another once more follow; None for all.
    """
    ids, written = [], ""
    for some in tokens:
        ids += some
        settled = len(ids)
        while settled and (unsettled is None or ids[settled - 1] in unsettled):
            settled -= 1
        text = decode(ids[:settled]).rstrip("\ufffd")
        if len(text) > len(written):
            yield text[len(written) :]
            written = text
    yield decode(ids)[len(written) :]
