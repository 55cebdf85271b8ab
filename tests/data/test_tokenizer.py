"""Bytes and Hugging Face tokenizers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from moezoo.data.tokenizer import Bytes, HuggingFace, Numbers, Tokenizer, document_ids, one_line
from moezoo.errors import UserError


@given(st.text("aä€😀\0\n"))  # characters of one to four bytes
def test_bytes_round_trip(text):
    assert Bytes().decode(Bytes().encode(text)) == text


def test_bytes_that_are_not_text():
    assert Bytes().encode("a\udcffb") == [97, 255, 98]  # so Python reads an argument that is not UTF-8
    assert Bytes().decode(np.array([97, 0xC3, 98])) == "a\ufffdb"
    assert Bytes().decode([97, 256, 98]) == "a\ufffdb"  # a model may have more tokens than there are bytes


def test_hugging_face_neither_truncates_nor_pads(tokenizer_file):
    tokenizer = HuggingFace(tokenizer_file, key="data.tokenizer")
    assert tokenizer.vocab == 301  # ids have a gap
    assert tokenizer.encode("document 1 2 3 other") == [0, 1, 3, 4, 5, 300]
    assert tokenizer.decode(np.array([0, 1, 3], np.int32)) == "document 1"


def test_texts_of_a_locale_of_ascii(tokenizer_file):
    """Python has a surrogate for each byte of an argument that is not ASCII."""
    tokenizer = HuggingFace(tokenizer_file, key="tokenizer")
    for text in ("é 7", "document 日"):
        assert tokenizer.encode(text.encode().decode("ascii", "surrogateescape")) == tokenizer.encode(text)
    for text in ("7 \udcc3", "\ud800"):
        with refused("the text is not UTF-8 (", "LC_ALL=C.UTF-8"):
            tokenizer.encode(text)


def test_numbers_of_any_length():
    for text in ("9" * 5000, "0" * 5000, "9" * 25):
        with pytest.raises(UserError, match=r"is not a token: this data has no tokenizer"):
            Numbers(5).encode(text)


def test_all_are_tokenizers(tokenizer_file):
    for tokenizer in (Bytes(), Numbers(5), HuggingFace(tokenizer_file, key="data.tokenizer")):
        assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_document_ids(tokenizer_file, dtype):
    dtype = np.dtype(dtype)
    for tokenizer, expected in ((Bytes(), [195, 164]), (Numbers(9), [])):
        ids = document_ids(tokenizer, "ä".encode() if expected else b"", dtype)
        assert (ids.tolist(), ids.dtype) == (expected, dtype)


def test_one_line():
    assert one_line(ValueError("first\nsecond")) == "first"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("x" * 999)) == "x" * 200
