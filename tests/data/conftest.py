"""A small tokenizer for the tests of data."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """Words `document`, 0 ... 39; a begin token before each text; a gap in the ids; truncation to 2 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "document": 1, **{str(i): i + 2 for i in range(40)}, "<unk>": 300}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Token ids that another version of the code has made are not read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
