"""The text of tokens while they come: in pieces that together are the text of all of them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# Steps of decoders that join texts of tokens from left to right.
_JOINING = ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


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


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder; none of no decoder, which puts spaces between tokens."""
    if decoder is None:
        return []
    return [step for each in decoder["decoders"] for step in _steps(each)] if "decoders" in decoder else [decoder]


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
