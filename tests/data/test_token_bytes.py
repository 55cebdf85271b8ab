"""Bytes of tokens against texts, and against what the library decodes."""

from typing import Any

import numpy as np
import pytest
from refusals import refused
from tokenizers import Tokenizer, decoders, models
from tokenizers_of_kinds import KINDS, TEXT, with_start

from moezoo.data.corpus import concatenate
from moezoo.data.packing import fit, pack
from moezoo.data.rows import Windows
from moezoo.data.token_text import count_bytes, measure_tokens
from moezoo.data.tokenizer import Bytes, HuggingFace, Numbers

SEQ = 5
TEXTS = [TEXT[:90], "Bär", "", "😀😀 <think>x</think>", " two  spaces", TEXT[20:200]]


def size(text: str) -> int:
    return len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [True, False], ids=["start", "no start"])
def test_all_windows_hold_the_text(kind, starts):
    """With a start token every byte of what the library decodes is predicted, else those of the first token are not."""
    library: Any = with_start(KINDS[kind]()) if starts else KINDS[kind]()
    end, vocab = library.token_to_id("</s>"), library.get_vocab_size()
    documents = [[*library.encode(text).ids, end] for text in TEXTS]
    corpus = concatenate([np.array(ids) for ids in documents], np.dtype(np.uint16))
    table = measure_tokens(library, vocab, "it")
    decoded = [library.decode(ids) for ids in documents]
    if kind != "Metaspace":
        assert decoded == TEXTS
    first = 0 if starts else sum(table.first[ids[0]] for ids in documents)
    windows = np.arange(-(-(len(corpus) - 1) // SEQ))
    rows = Windows(corpus, SEQ)
    assert count_bytes(rows, corpus, windows, table) == sum(map(size, decoded)) - first
    assert (first == 0) == starts
    parts = [count_bytes(rows, corpus, windows[i::3], table) for i in range(3)]
    assert sum(parts) == count_bytes(rows, corpus, windows, table)


@pytest.mark.parametrize("kind", KINDS)
def test_each_window_holds_what_decoding_adds(kind):
    """Of a text without a character in several tokens. The oracle decodes what is before and up to each token."""
    library: Any = with_start(KINDS[kind]())
    end, texts = library.token_to_id("</s>"), ["The cat sat on", "", "the mat. print", "on the mat. "]
    documents = [[*library.encode(text).ids, end] for text in texts]
    adds = [  # of each token of the stream; None for the first of a document
        None if not k else size(library.decode(ids[: k + 1])) - size(library.decode(ids[:k]))
        for ids in documents
        for k in range(len(ids))
    ]
    assert 0 in adds[1:-1]
    corpus = concatenate([np.array(ids) for ids in documents], np.dtype(np.uint16))
    table = measure_tokens(library, library.get_vocab_size(), "it")
    for window in range(-(-(len(adds) - 1) // SEQ)):
        labels = adds[window * SEQ + 1 : (window + 1) * SEQ + 1]
        assert count_bytes(Windows(corpus, SEQ), corpus, np.array([window]), table) == sum(filter(None, labels))


@pytest.mark.parametrize("too_long", ["parts", "cut", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_documents_with_a_mask(kind, too_long):
    """Packed. The oracle decodes what is before and up to each token that is predicted."""
    library: Any = with_start(KINDS[kind]())
    texts = ["The cat sat on", "", "the mat. print", "on the mat. ", "The", "a mat on the cat sat on the mat"]
    documents = [[*library.encode(text).ids, library.token_to_id("</s>")] for text in texts]
    masks = [[(3 * number + place) % 4 > 0 for place in range(len(ids))] for number, ids in enumerate(documents)]
    longest = {"parts": 1000, "cut": SEQ + 1, "drop": SEQ + 1}[too_long]  # of which tokens are predicted
    predicted = [
        size(library.decode(ids[: k + 1])) - size(library.decode(ids[:k]))
        for ids, mask in zip(documents, masks, strict=True)
        for k in range(1, min(len(ids), longest))
        if mask[k] and not (too_long == "drop" and len(ids) > longest)
    ]
    assert 0 < sum(predicted) < sum(map(size, texts))
    arrays = [np.array(ids) for ids in documents], np.dtype(np.uint16), [np.array(mask, bool) for mask in masks]
    corpus = concatenate(*arrays)
    rows = pack(fit(corpus, SEQ, too_long).inputs, SEQ)
    table = measure_tokens(library, library.get_vocab_size(), "it")
    assert count_bytes(rows, corpus, np.arange(len(rows)), table) == sum(predicted)
    assert sum(count_bytes(rows, corpus, np.array([row]), table) for row in range(len(rows))) == sum(predicted)


def test_several_special_tokens_before_a_text():
    """The space that the tokenizer has added is that of the first token that is text."""
    library: Any = KINDS["SentencePiece"]()
    start, end = (library.token_to_id(token) for token in ("<s>", "</s>"))
    documents = [[start, start, *library.encode("The cat").ids, end], [start, start, end], [start]]
    corpus = concatenate([np.array(ids) for ids in documents], np.dtype(np.uint16))
    table = measure_tokens(library, library.get_vocab_size(), "it")
    assert count_bytes(Windows(corpus, 1), corpus, np.arange(len(corpus)), table) == size("The cat")


def test_tokens_without_text(tmp_path):
    assert Bytes().token_bytes().inside.tolist() == [1] * 256
    with refused("data.path=a.npy has no tokenizer"):
        Numbers(9, "data.path=a.npy").token_bytes()
    library: Any = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    file = tmp_path / "tokenizer.json"
    for decoder, kind in ((None, ""), (decoders.WordPiece(), "WordPiece"), (decoders.Strip(" ", 1, 0), "Strip")):
        if decoder is not None:
            library.decoder = decoder
        library.save(str(file))
        shown = f"key={file}"
        message = f"{shown}: the bytes of a token do not follow from its decoder ({kind})"
        with refused(message if kind else f"{shown} has no decoder, so it does not give the text"):
            HuggingFace(file, key="key").token_bytes()
