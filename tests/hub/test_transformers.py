"""Both families against transformers, on random tiny models: logits, loss, every gradient, and folders both ways."""

import json

import jax
import numpy as np
import pytest
from against import agree, load, results, results_of_transformers
from tiny import CONFIGS, random_model

import moezoo

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 16)).astype(np.int32)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """Our model, and what transformers makes of the folder we write."""
    model = random_model(CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(model, folder)
    return model, load(folder), folder


def test_logits_loss_and_gradients(case):
    model, theirs, _ = case
    agree(results(model, TOKENS, moezoo.Execution()), results_of_transformers(theirs, TOKENS))


def test_round_trip_is_bit_equal(case):
    model, _, folder = case
    again = moezoo.from_pretrained(folder)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_reads_what_transformers_writes(case, tmp_path):
    model, theirs, _ = case
    theirs.save_pretrained(tmp_path / "theirs")
    assert "rope_parameters" in json.loads((tmp_path / "theirs" / "config.json").read_text())
    again = moezoo.from_pretrained(tmp_path / "theirs")
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
