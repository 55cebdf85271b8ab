"""The loss of packed rows against that of each document alone."""

from pathlib import Path

import jax
import numpy as np
import pytest

import moezoo
from moezoo.data.corpus import Ids
from moezoo.data.token_files import write_token_files

SEQ, VOCAB = 16, 24
LENGTHS = [17, 3, 9, 1, 2, 16, 5, 5, 12, 7, 4, 11, 3, 8]


@pytest.fixture(scope="module")
def documents() -> list[Ids]:
    """Documents that fit into rows, in each of which some tokens are not predicted."""
    random = np.random.default_rng(0)
    return [Ids(random.integers(0, VOCAB, n).astype(np.uint16), random.random(n) < 0.7) for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory) -> Path:
    """A folder with token files to train on, which evaluations do not read, and to validate on."""
    folder = tmp_path_factory.mktemp("packed")
    for name in ("train.npy", "held_out.npy"):
        write_token_files(folder / name, documents, np.dtype(np.uint16), lambda: {"vocab": VOCAB, "unit": "token"})
    return folder


@pytest.mark.parametrize("layout", [("mesh=single",), ("mesh.context=2", "mesh.expert=2", "rules=cp_as_ep")])
def test_packed_rows_have_the_loss_of_each_document_alone(documents, folder, layout):
    """On one device, and with sequences split in balanced order, where labels move with their tokens."""
    sizes = ("model.layers=2", "model.embed=16", "model.head_dim=4", "model.expert_mlp=8", "model.init_std=0.3")
    paths = (f"data.path={folder}/train.npy", f"data.validation={folder}/held_out.npy")
    run = (f"model.vocab={VOCAB}", "batch_size=4", f"seq_len={SEQ}", "dispatch=gather")
    cfg = moezoo.compose(*sizes, "data=tokens", *paths, "data.packing=whole", *layout, *run)
    model = jax.jit(lambda: moezoo.build_model(cfg.model, key=jax.random.key(0)))()
    found = moezoo.evaluate(model, cfg)

    alone = np.zeros((len(documents), SEQ + 1), np.int32)
    for row, document in zip(alone, documents, strict=True):
        row[: len(document.ids)] = document.ids
    log_p = np.asarray(jax.nn.log_softmax(jax.jit(lambda model: model(alone).logits)(model)), np.float64)
    nats = [
        -log_p[i, j - 1, document.ids[j]]
        for i, document in enumerate(documents)
        for j in range(1, len(document.ids))
        if document.mask[j]
    ]
    assert found.tokens == len(nats)
    np.testing.assert_allclose(found.loss, np.mean(nats), rtol=1e-6)
