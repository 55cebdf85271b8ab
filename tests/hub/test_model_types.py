"""The page of model types has the packages of transformers; missing keys of types have the values of its classes."""

from pathlib import Path

import pytest
from model_types_page import MISSING, TRANSFORMERS, packages
from peer_results import transformers
from tiny_models import PLAIN, keys_of

from moezoo.errors import UserError
from moezoo.models import family_of


def test_every_package_with_experts_has_a_row():
    assert transformers.__version__.startswith(f"{TRANSFORMERS}.")
    assert list(packages(Path(transformers.__file__).parent / "models")) == list(MISSING)


NAMES = ("qwen2", "sarvam", "solar", "qwen3.5", "next", "kimi linear", "lfm2", "gemma4")
NAMES += ("llama4", "mimo", "exaone", "afmoe")


@pytest.mark.parametrize("name", NAMES)
def test_missing_keys_have_the_values_of_transformers(name):
    """Where a key may be missing at all."""
    keys, changed = keys_of(name), 0
    hub, kind = family_of(PLAIN[name]).hub, type(PLAIN[name])
    theirs = transformers.AutoConfig.for_model(keys["model_type"]).to_dict()
    for key in keys.keys() & theirs.keys() - {"model_type"}:
        try:
            found = hub.read(kind, {other: value for other, value in keys.items() if other != key})
            wanted = hub.read(kind, keys | {key: theirs[key]})
        except UserError:  # required, or a value that only other sizes have
            continue
        assert found == wanted, key
        changed += found != PLAIN[name]
    assert changed > 2


@pytest.mark.parametrize("name", ["qwen3.5", "next"])
def test_all_missing_keys_have_the_values_of_transformers(name):
    """Together, so that values are there which no tiny model can have."""
    keys, kind = keys_of(name), type(PLAIN[name])
    theirs = transformers.AutoConfig.for_model(keys["model_type"]).to_dict()
    known = {key: theirs[key] for key in keys.keys() & theirs.keys()}
    required = "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_experts num_experts_per_tok"
    few, read = {key: known[key] for key in required.split()}, family_of(PLAIN[name]).hub.read
    assert len(known) > 3 * len(few)
    assert read(kind, few) == read(kind, known)
