"""`moezoo evaluate folder=...` against transformers on the same windows, which plain Python cuts."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peer_results import load, torch
from tiny_models import CONFIGS, random_model
from tokenizers_of_kinds import KINDS, TEXT, with_start

import moezoo
from moezoo.cli import evaluate

SEQ = 24
# Four documents: one that fills windows, some that share them.
TEXTS = [TEXT, "The cat 😀", TEXT[10:80], "süße Äpfel for 3 €", ""]
# name -> the model, its tokenizer, and what the command is given besides.
CASES = {
    "mixtral": ("mixtral", "SentencePiece", ("mesh=ep8", "dispatch=ring")),
    "v3": ("v3", "byte level", ("mesh=single", "data.eval_sequences=3")),
    "gpt_oss": ("gpt_oss", "byte level", ("mesh=single", "data.end_token=null")),
}


class Expected(NamedTuple):
    """The mean loss of `tokens` tokens, and the bytes that they stand for."""

    loss: float
    tokens: int
    bytes: int


def expect(theirs: Any, library: Any, texts: list[str], end: list[int], chosen: Any) -> Expected:
    """Return what transformers' model says of the windows that `chosen` takes of all, one document at a time."""
    documents = [library.encode(text).ids + end for text in texts]
    stream = [(number, token) for number, ids in enumerate(documents) for token in ids]
    windows = [stream[begin : begin + SEQ + 1] for begin in range(0, len(stream) - 1, SEQ)]
    nats, tokens, numbers = 0.0, 0, []
    for window in chosen(windows):
        for number in range(len(documents)):
            ids = [token for document, token in window if document == number]
            if len(ids) > 1:
                with torch.no_grad():
                    logits = theirs(torch.tensor([ids[:-1]])).logits[0].double()
                nats -= logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].sum().item()
                tokens += len(ids) - 1
                numbers += ids[1:]
    # Of byte-level pieces each character is a byte; of the others, the marks are spaces, one of them before each text.
    special = {token["id"] for token in json.loads(library.to_str())["added_tokens"] if token["special"]}
    pieces = [library.id_to_token(number) for number in numbers if number not in special]
    if "ByteLevel" in str(library.decoder):
        return Expected(nats / tokens, tokens, sum(map(len, pieces)))
    size = sum(1 if piece.startswith("<0x") else len(piece.replace("▁", " ").encode()) for piece in pieces)
    return Expected(nats / tokens, tokens, size - sum(map(bool, texts)))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder with a tokenizer and an end token, and files of text."""
    name, kind, words = CASES[request.param]
    path: Path = tmp_path_factory.mktemp("evaluation")
    library = with_start(KINDS[kind]())
    vocab = -(-library.get_vocab_size() // 8) * 8
    moezoo.save_pretrained(random_model(dataclasses.replace(CONFIGS[name], vocab=vocab, layers=2)), path / "m")
    library.save(str(path / "m/tokenizer.json"))
    (path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": library.token_to_id("</s>")}))
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path, library, words


def test_loss_tokens_and_bytes(case, capsys):
    path, library, words = case
    asked = (f"folder={path}/m", "data=jsonl", f"data.path={path}/texts.jsonl", f"seq_len={SEQ}", *words)
    limit = evaluate.configure(*asked).data.eval_sequences
    evaluate.main(list(asked))
    split, loss, bits, tokens = re.findall(
        r"(\w+) +([\d.]+) nats per token, .* ([\d.]+) bits per byte, over ([\d,]+) tokens", capsys.readouterr().out
    )[0]

    def chosen(windows: list[Any]) -> list[Any]:
        return windows if limit >= len(windows) else [windows[i * len(windows) // limit] for i in range(limit)]

    end = [] if "data.end_token=null" in words else [library.token_to_id("</s>")]
    wanted = expect(load(path / "m"), library, TEXTS, end, chosen)
    assert (split, int(tokens.replace(",", ""))) == ("all", wanted.tokens)
    assert wanted.tokens > SEQ
    assert float(loss) == pytest.approx(wanted.loss, abs=1e-4)
    # Six digits of both give the bytes.
    assert float(loss) * wanted.tokens / math.log(2) / float(bits) == pytest.approx(wanted.bytes, abs=0.01)
