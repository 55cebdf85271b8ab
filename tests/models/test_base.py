"""Embedding and unembedding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.models import FAMILIES, DeepSeekConfig
from moezoo.models.base import TokenEmbedding, Unembedding
from moezoo.models.blueprint import Blueprint
from moezoo.parallel.axes import count_parameters, parameter_table


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_are_one_table(family):
    """A tied model has every array except the second matrix; a token uses the first one all the same."""
    kind: Any = FAMILIES[family].config
    own, tied = (Blueprint(kind(tied_embeddings=tied)).shapes for tied in (False, True))
    assert parameter_table(tied) == [row for row in parameter_table(own) if row[0] != ".unembedding.weight"]
    c = tied.config
    counts = zip(*(count_parameters(model, c.experts_per_token) for model in (own, tied)), strict=True)
    assert [more - less for more, less in counts] == [c.vocab * c.embed] * 2


def test_logits_are_not_rounded_to_bfloat16():
    """The products of bfloat16 numbers are summed in float32, of rows of tokens and of sequences."""
    unembedding = Unembedding(64, 50, epsilon=1e-3, std=1.0, dtype=jnp.dtype("bfloat16"), key=jax.random.key(0))
    rows = jax.random.normal(jax.random.key(1), (6, 64), jnp.bfloat16)
    for hidden in (rows, rows.reshape(2, 3, 64)):
        logits = unembedding(hidden)
        factors = (np.asarray(x, np.float64) for x in (unembedding.norm(hidden), unembedding.weight))
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, np.matmul(*factors), rtol=0, atol=1e-5 * np.abs(logits).max())


def test_a_cap_of_logits_and_a_factor_of_embeddings():
    options: Any = {"std": 1.0, "dtype": jnp.dtype("bfloat16"), "key": jax.random.key(0)}
    plain, capped = (Unembedding(64, 50, epsilon=1e-3, cap=cap, **options) for cap in (None, 3.0))
    rows = jax.random.normal(jax.random.key(1), (6, 64), jnp.bfloat16)
    for hidden in (rows, rows.reshape(2, 3, 64)):
        wanted = 3 * np.tanh(np.asarray(plain(hidden), np.float64) / 3)
        np.testing.assert_allclose(capped(hidden), wanted, rtol=0, atol=1e-5)
    # The factor is rounded to the dtype of embeddings: the root of 65 is 8.0623, and 8.0625 in bfloat16.
    table = TokenEmbedding(50, 64, factor=65**0.5, **options)
    found = table(jnp.asarray([[3]]))[0, 0]
    np.testing.assert_array_equal(found, table.weight[3] * jnp.asarray(8.0625, jnp.bfloat16))


def test_texts_that_sparse_attention_would_cut_are_refused():
    sizes: dict[str, Any] = {"vocab": 8, "embed": 8, "layers": 2, "heads": 1, "mlp": 8, "expert_mlp": 8, "experts": 8}
    model = moezoo.build_model(DeepSeekConfig(**sizes, index_topk=4), key=jax.random.key(0))
    four, why = np.ones((1, 4), np.int32), "model.index_topk=4 (beyond it DeepSeek's sparse attention would select"
    with refused("tokens are [1, 5], longer than " + why, "shorten the rows"):
        model(np.ones((1, 5), np.int32))
    with refused("positions contains 4, expected 0 to 3 (" + why):
        model(four, positions=four + 3)
    with refused("a prompt of 4 tokens plus max_new_tokens=1 exceeds " + why, "shorten the prompt"):
        moezoo.generate(model, four, max_new_tokens=1)
    with refused("a prompt of 3 tokens plus max_new_tokens=2 exceeds " + why, "at most 1"):
        moezoo.generate(model, four[:, 1:], max_new_tokens=2)
    with refused("model.index_topk=4 needs model.q_lora"):
        DeepSeekConfig(index_topk=4, q_lora=None)
    assert DeepSeekConfig(index_topk=4096).longest == ("model.max_length", 4096, "")
