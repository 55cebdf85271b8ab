"""A small tokenizer."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """Words `document`, 0 ... 39; a begin token before each text; ids with a gap; asks for texts to be cut at 2."""
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
