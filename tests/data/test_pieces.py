"""Texts in pieces, while tokens come, against the text of all tokens."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers_of_kinds import KINDS, TEXT

from moezoo.data.token_text import find_unsettled, pieces
from moezoo.data.tokenizer import Bytes, Numbers


@functools.cache
def library(kind):
    return KINDS[kind]()


def parts(kind):
    """Return the number of ids, the decoder with and without special tokens, the encoder, and what may change."""
    if kind in KINDS:
        made = library(kind)
        special = functools.partial(made.decode, skip_special_tokens=False)
        return made.get_vocab_size(), (made.decode, special), lambda text: made.encode(text).ids, find_unsettled(made)
    made = {"bytes": Bytes(), "numbers": Numbers(50)}[kind]
    return made.vocab, (made.decode,), made.encode, made.unsettled()


ALL = [*KINDS, "bytes", "numbers"]


@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_pieces_are_the_whole(kind, data):
    """Of any tokens, some at a time: parts of characters, special tokens, and runs of bytes that are no UTF-8."""
    vocab, decoders_of, _, unsettled = parts(kind)
    any_id = st.integers(0, vocab - 1)
    euro = list("€".encode()) if kind == "bytes" else [3 + byte for byte in "€".encode()]  # SentencePiece has 3 before
    runs = st.sampled_from([euro, euro[:2], euro[2:], [1], [13], [vocab - 1]])
    known = st.lists(runs, max_size=6).map(lambda lists: [i for some in lists for i in some if i < vocab])
    batches = data.draw(st.lists(st.one_of(st.lists(any_id, max_size=3), known), max_size=8))
    for decode in decoders_of:
        whole = decode([i for batch in batches for i in batch])
        assert "".join(pieces(batches, decode, unsettled)) == whole


@pytest.mark.parametrize("kind", ALL)
def test_a_piece_comes_with_its_last_token(kind):
    """No character waits longer than it must: that of a run of bytes for the token after it, any other for none."""
    _, (decode, *_), encode, unsettled = parts(kind)
    ids, found = encode("3 14 15 9" if kind == "numbers" else TEXT[:90]), []

    def feed():
        for count, number in enumerate(ids, 1):
            yield [number]
            now = decode(ids[:count])
            if number not in unsettled and not now.endswith("\ufffd"):
                assert "".join(found) == now

    for piece in pieces(feed(), decode, unsettled):
        found.append(piece)
    assert len(found) > 3


@pytest.mark.parametrize(
    "decoder",
    [decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])],
    ids=["CTC", "Strip at the end"],
)
def test_a_decoder_that_may_change_what_it_wrote(decoder):
    """The text comes at the end, and whole."""
    made = Tokenizer(models.WordLevel({"a": 0, " ": 1}, unk_token="a"))
    made.decoder = decoder
    assert find_unsettled(made) is None
    assert [*pieces([[0], [1], [0]], lambda ids: "".join("ab"[i] for i in ids), None)] == ["aba"]
