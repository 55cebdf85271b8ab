"""Settings of data that are refused: one line with the key, whatever the source."""

import gzip
import os
from pathlib import Path

import pytest
from refusals import by_table, refused

import moezoo
from moezoo.data import load

FILES = {
    "ok.txt": b"forty letters are enough for a test, oh.",
    "some.txt": b"abcdefghi" * 3,
    "void.txt": b"",
    "bad.txt": b"ab\xffcd",
    "spaces.txt": b" \n",
    "pictures/a.png": b"\x89PNG",
    "good.jsonl": b'{"text": "good"}\n',
    "void.jsonl": b"",
    "cut/a.jsonl.gz": gzip.compress(b'{"text": "good"}\n', mtime=0)[:-2],
}


@pytest.fixture
def _files(tokenizer_file):
    from tokenizers import Tokenizer, models, pre_tokenizers

    for folder in ("empty", "pipes", "pictures", "cut"):
        Path(folder).mkdir()
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name in ("pipe", "pipes/pipe"):
        os.mkfifo(name)
    for name, words in (("no_words", {}), ("one_word", {"word": 0})):  # without a token for other words
        tokenizer = Tokenizer(models.WordLevel(words))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(name)
    Path("words").write_bytes(tokenizer_file.read_bytes())


# The name of a source, and words without `data.` in front.
@by_table(
    """
    words => line
    text => data.path is required for data=text; pass data.path=FILE_OR_FOLDER
    text path=none => data.path=none does not exist; give a text file or a folder of them
    text path=empty => data.path=empty is a folder without files; give a text file or a folder of them
    text path=pictures => data.path=pictures holds no UTF-8 text (files read: 1); give a text file or a
    text path=bad.txt => data.path=bad.txt is not UTF-8 text: byte 2 is 0xff; convert it to UTF-8
    text path=void.txt => data.path=void.txt is an empty file; give a text file or a folder of them
    text path=pipe => data.path=pipe is a pipe, not a file; give a text file or a folder of them
    text path=pipes => data.path=pipes is a folder without files; give a text file or a folder of them
    text path=/dev/zero => data.path=/dev/zero is a device, not a file; give a text file or a folder of them
    text path=LONG => data.path=xxx
    text path=ok.txt validation=none => data.validation=none does not exist; give a text file
    text path=ok.txt validation=ok.txt => data.validation=ok.txt holds every file of data.path=ok.txt; give different
    text path=ok.txt tokenizer=none => data.tokenizer=none does not exist; give a Hugging Face tokenizer.json
    text path=ok.txt tokenizer=ok.txt => data.tokenizer=ok.txt is not a Hugging Face tokenizer
    text path=ok.txt tokenizer=pipe => data.tokenizer=pipe is a pipe, not a file; give a Huggi
    text path=ok.txt tokenizer=no_words => data.tokenizer=no_words has an empty vocabulary; give
    text path=ok.txt tokenizer=one_word => data.path=ok.txt: data.tokenizer=one_word cannot encode the text (Word
    text path=spaces.txt tokenizer=one_word => data.path=spaces.txt: the tokenizer makes no token of
    text path=ok.txt => data=text leaves 2 bytes for validation, but seq_len=4 needs 5 for one window; give more data or
    text path=ok.txt model.vocab=100
        => data=text without data.tokenizer has 256 byte values but model.vocab=100; set model.vocab=256
    text path=ok.txt tokenizer=words model.vocab=100
        => data.tokenizer has 301 tokens but model.vocab=100; set model.vocab=301
    python_stdlib model.vocab=100
        => data=python_stdlib has 256 byte values but model.vocab=100; set model.vocab=256
    jsonl => data.path is required for data=jsonl; pass data.path=FILE_OR_FOLDER
    jsonl path=pictures => data.path=pictures is a folder without .jsonl files; give a .jsonl file or a folder of them
    jsonl path=void.jsonl => data.path=void.jsonl: there is no document; name files that have some
    jsonl path=cut/a.jsonl.gz => data.path=cut/a.jsonl.gz is damaged (Compressed file ended before the end-of-stream
    jsonl path=cut => data.path=cut: cut/a.jsonl.gz is damaged (Compressed file ended before the end-of-stream
    jsonl path=good.jsonl field=txt => data.path=good.jsonl line 1 has no field txt; did you mean 'text'?; set data.
    jsonl path=good.jsonl tokenizer=none => data.tokenizer=none does not exist; give a Hugging Face
    jsonl path=good.jsonl end_token=end => data.end_token=end needs a tokenizer that has this token; set
    jsonl path=good.jsonl tokenizer=words end_token=end model.vocab=301 => data.end_token=end is not a token of data.tok
    jsonl path=good.jsonl tokenizer=words model.vocab=300
        => data.tokenizer has 301 tokens but model.vocab=300; set model.vocab=301
    tokens => data.path is required for data=tokens; pass data.path=FILE.npy
    synthetic successors=0 => data.successors=0 must be at least 1
    synthetic documents=0 => data.documents=0 must be at least 1
    synthetic documents=100000000000 => data.documents=100000000000 must be at most 2147483647
    synthetic document_length=1 => data.document_length=1 must be at least 2 and at most 1048576
    synthetic document_length=1048577 => data.document_length=1048577 must be ... at most 1048576
    synthetic vocab=1048577 => data.vocab=1048577 must be ... at most 1048576
    synthetic vocab=3
        => data.successors=4 must be at most data.vocab=3
    synthetic documents=2000000000 => data.documents=2000000000 x data.document_length=1000 ... 1,892.4 GiB ... fewer
    synthetic vocab=1048576 successors=1048576 model.vocab=2000000
        => data.vocab=1048576 x data.successors=1048576 ... 8,192.0 GiB
    synthetic model.vocab=128 => data.vocab=256 ... model.vocab=128; set
    mixture => data.sources is required for data=mixture; write data.sources.NAME.name=text
    mixture held_out=0.1 => data.held_out: there is no key 'held_out' in data mixture
    mixture weight=2 => data.weight: there is no key 'weight' in data mixture; write data.sources.NAME.weight
    mixture weights.a=2 => data.weights.a: there is no key 'weights' in data mixture; write data.sources.NAME.weight
    mixture source.a=text => data.source.a: there is no key 'source' in data mixture; did you mean 'sources'?
    mixture sources.a=text => data.sources.a=text: expected a section with keys, found text
    mixture sources.a.weight=1 => data.sources.a.name is missing; set it to one of python_stdlib, text, jsonl
    mixture sources.a.name=txt => data.sources.a.name=txt: no such data.sources.a; did you mean 'text'?
    mixture sources.a.name=mixture => data.sources.a is a mixture in a mixture; write its sources beside the others
    mixture sources.a.name=text sources.a.weight=-1 => data.sources.a.weight=-1 must be at least 0
    mixture sources.a.name=text sources.a.weight=nan
        => data.sources.a.weight=nan: expected a number such as 0.5, found no finite
    mixture sources.a.name=text sources.a.weight=0 => data.sources: the weight of each of a is 0; give one above 0
    mixture sources.a.name=text sources.a.weight=1e308 sources.b.name=text sources.b.weight=1e308
        => data.sources: the sum of all weig
    mixture sources.a.name=text sources.a.eval_sequences=9
        => data.sources.a.eval_sequences=9 cannot differ among the sources of
    mixture sources.a.name=text sources.a.pth=b
        => data.sources.a.pth: there is no key 'pth' in data.sources.a text; did you mean
    mixture sources.a.name=text sources.a.weigth=2
        => data.sources.a.weigth: there is no key 'weigth' in data.sources.a text; did you mean 'weight'?
    mixture sources.a.name=text => data.sources.a: data.path is required for data=text
    mixture sources.a.name=text sources.a.path=void.txt => data.sources.a: data.path=void.txt is an empty file; give
    mixture sources.a.name=text sources.a.validation=some.txt
        => data.sources.a: data.path is required to train with data=text
    mixture sources.a.name=text sources.a.path=some.txt
        => data.sources.a: data=text leaves 1 bytes for validation, but seq_len=4
    """
)
@pytest.mark.usefixtures("_files")
def test_settings(words, line):
    name, *keys = words.replace("LONG", "x" * 300).split()
    with refused(line):
        cfg = moezoo.compose(
            f"data={name}", "seq_len=4", *(key if key.startswith("model.") else f"data.{key}" for key in keys)
        )
        load(cfg.data, seq_len=cfg.seq_len, seed=0, vocab=cfg.model.vocab)
    assert name != "jsonl" or not list(Path().glob("caches/moezoo/tokens/*"))
