"""An evaluation against a loop over its windows, and of models that a configuration does not describe."""

import dataclasses

import jax
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.data import load
from moezoo.data.rows import Windows

DEEPSEEK = moezoo.models.DeepSeekConfig(vocab=24, embed=8, layers=2, heads=2, mlp=6, expert_mlp=6)


def test_the_mean_over_predicted_tokens_of_all_windows():
    """Seven windows in batches of four, with documents that end inside windows."""
    sizes = ("model.layers=1", "model.embed=16", "model.head_dim=4", "model.expert_mlp=8", "model.init_std=0.5")
    data = ("data=synthetic", "data.document_length=7", "data.documents=400", "data.eval_sequences=7")
    cfg = moezoo.compose(*sizes, *data, "mesh=single", "batch_size=4", "seq_len=16", "dispatch=gather")
    model = jax.jit(lambda: moezoo.build_model(cfg.model, key=jax.random.key(0)))()
    found = moezoo.evaluate(model, cfg)

    corpus = load(cfg.data, seq_len=16, seed=cfg.seed, vocab=cfg.model.vocab).validation
    windows = -(-(len(corpus) - 1) // 16)
    assert windows > 7
    batch = Windows(corpus, 16).read(np.array([i * windows // 7 for i in range(7)]))
    read = jax.jit(lambda model: model(batch.tokens, segments=batch.segments, positions=batch.positions).logits)
    log_p = np.asarray(jax.nn.log_softmax(read(model)), np.float64)
    nats = [-log_p[i, j, label] for (i, j), label in np.ndenumerate(batch.labels) if label >= 0]
    assert 0 < len(nats) < batch.labels.size
    assert found.tokens == len(nats)
    np.testing.assert_allclose(found.loss, np.mean(nats), rtol=1e-6)
    assert (found.dropped, found.unit) == (0, "token")


def test_a_model_of_a_folder(tmp_path):
    """`cfg` has the default model; the refusal describes how to get one with the folder's."""
    config = moezoo.models.MixtralConfig(
        vocab=40, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=12, experts=4, z_loss=0.0
    )
    built = moezoo.build_model(config, key=jax.random.key(0), dtype="bfloat16")
    moezoo.save_pretrained(built, tmp_path / "folder")
    model = moezoo.from_pretrained(tmp_path / "folder")
    data = ("data=synthetic", "data.vocab=32", "data.documents=100", "data.document_length=20", "data.eval_sequences=4")
    cfg = moezoo.compose(*data, "mesh=single", "batch_size=4", "seq_len=16", "dispatch=gather")
    advice = "dataclasses.replace(cfg, model=model.config)"
    with refused("evaluate: ", "model.vocab=40 in the model, 256 in cfg", "model.experts=4", advice):
        moezoo.evaluate(model, cfg)
    cfg = dataclasses.replace(cfg, model=model.config)
    found = moezoo.evaluate(model, cfg)
    assert 3 < found.loss < 5  # an untrained model is near ln 40 = 3.7
    assert found.perplexity == pytest.approx(np.exp(found.loss))
    assert found.bits == pytest.approx(np.log2(found.perplexity))
    assert found._replace(loss=1e4).perplexity == np.inf
    with refused("evaluate: ", "has a DeepSeekConfig, cfg.model is a MixtralConfig", advice):
        moezoo.evaluate(jax.eval_shape(lambda: moezoo.build_model(DEEPSEEK, key=jax.random.key(0))), cfg)
