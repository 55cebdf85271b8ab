"""The sample of a run on data with a mask: a held-out question, and an answer up to its end."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moezoo.data.corpus import concatenate
from moezoo.data.held_out import Split
from moezoo.data.source import make_source
from moezoo.data.tokenizer import Numbers
from moezoo.training import sample as module


@pytest.mark.parametrize(("ends", "answer"), [((), "4 9 5 9 9"), ((9,), "4"), ((7, 5), "4 9")])
def test_a_question_is_answered(monkeypatch, ends, answer):
    documents = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 6])]
    masks = [np.array([True, False, False, False, False]), np.array([True, False, False, True])]
    corpus = concatenate(documents, np.dtype(np.uint8), masks)
    source = make_source("any", Split(corpus, corpus, ""), Numbers(10), vocab=10)
    asked: dict[str, Any] = {}

    def generate(model, ids, **options):
        asked.update(options, ids=ids.tolist())
        return np.array([[1, 2, 3, 4, 9, 5, 9, 9]])

    monkeypatch.setattr(module, "generate", generate)
    cfg: Any = SimpleNamespace(seq_len=8, seed=0)
    found = module.sample(None, dataclasses.replace(source, ends=ends), cfg, None)  # pyright: ignore
    assert (found.prompt, found.continuation) == ("1 2 3", answer)
    assert (asked["ids"], asked["max_new_tokens"], asked["eos_token_id"]) == ([[1, 2, 3]], 5, list(ends) or None)
