"""Kimi Linear: which layers attend, documents that are packed, and tokens behind a prompt."""

import dataclasses

import jax
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.models import KimiLinear, KimiLinearConfig
from moezoo.models.kimi_linear import kinds
from moezoo.nn.delta import DeltaSizes

SIZES = {"vocab": 24, "embed": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_mlp": 8}
CONFIG = KimiLinearConfig(
    **SIZES, kv_lora=5, nope_dim=4, rope_dim=2, value_dim=3, mlp=12, delta=DeltaSizes(2, 2, 4, 4, 3)
)


@pytest.mark.parametrize(
    ("layers", "named", "attends"), [(27, None, [3, 7, 11, 15, 19, 23, 26]), (4, None, [3]), (4, (0, 2), [0, 2])]
)
def test_which_layers_attend_and_which_have_experts(layers, named, attends):
    found = kinds(dataclasses.replace(CONFIG, layers=layers, attention_layers=named, dense_layers=2))
    assert [len(run) for run in found] == [2, layers - 2]
    mixers, feed_forward = zip(*(kind for run in found for kind in run), strict=True)
    assert [i for i, mixer in enumerate(mixers) if mixer == "attention"] == attends
    assert feed_forward == ("dense",) * 2 + ("moe",) * (layers - 2)


def test_documents_and_tokens_behind_a_prompt():
    """Packed documents have the logits that each has alone, and a cache those of the whole text."""
    model = jax.jit(lambda: KimiLinear(CONFIG, key=jax.random.key(0)))()
    tokens = np.random.default_rng(0).integers(0, 24, (1, 8)).astype(np.int32)
    read = jax.jit(lambda tokens, segments, positions: model(tokens, segments=segments, positions=positions).logits)
    segments, positions = np.array([[1, 1, 1, 2, 2, 2, 2, 2]]), np.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = read(tokens, segments, positions)
    for document in (slice(0, 3), slice(3, 8)):
        alone = model(tokens[:, document]).logits
        np.testing.assert_allclose(packed[:, document], alone, rtol=0, atol=1e-5)
    text = moezoo.generate(model, tokens[:, :3], max_new_tokens=5)
    whole = read(text, np.ones_like(text), np.arange(8)[None])
    np.testing.assert_array_equal(np.asarray(whole).argmax(-1)[:, 2:-1], text[:, 3:])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_layers": (1, 2)}, "model.attention_layers names layer 2, but model.layers=2 has layers 0 to 1"),
        ({"dense_layers": 2}, "model.dense_layers=2 must be below model.layers=2"),
        ({"mlp": 0}, "model.mlp=0 must be greater than 0 with model.dense_layers=1"),
    ],
)
def test_refused(changes, line):
    with refused(line):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tied_embeddings": True}, "model.tied_embeddings=true: Kimi Linear in transformers has only false"),
        ({"delta": DeltaSizes(1, 2, 4, 4)}, "model.delta.key_heads=1: Kimi Linear in transformers has only 2"),
        ({"delta": DeltaSizes(2, 2, 4, 3)}, "model.delta.key_dim=4: Kimi Linear in transformers has only 3"),
    ],
)
def test_no_folder_has(changes, line):
    with refused(line):
        KimiLinear.hub.write(dataclasses.replace(CONFIG, **changes))
