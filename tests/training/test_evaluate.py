"""An evaluation against a loop over its windows."""

import jax
import numpy as np

import moezoo
from moezoo.data import load
from moezoo.data.windows import read_windows


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
    batch = read_windows(corpus, np.array([i * windows // 7 for i in range(7)]), 16)
    read = jax.jit(lambda model: model(batch.tokens, segments=batch.segments, positions=batch.positions).logits)
    log_p = np.asarray(jax.nn.log_softmax(read(model)), np.float64)
    nats = [-log_p[i, j, label] for (i, j), label in np.ndenumerate(batch.labels) if label >= 0]
    assert 0 < len(nats) < batch.labels.size
    assert found.tokens == len(nats)
    np.testing.assert_allclose(found.loss, np.mean(nats), rtol=1e-6)
    assert (found.dropped, found.unit) == (0, "token")
