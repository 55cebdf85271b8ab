"""LFM2 with experts: which layers attend, documents that are packed, and what is refused."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused

from moezoo.models import Lfm2Moe, Lfm2MoeConfig
from moezoo.models.lfm2_moe import kinds
from moezoo.moe.router import Choice

SIZES: Any = {"vocab": 24, "embed": 16, "layers": 3, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_mlp": 8}
CONFIG = Lfm2MoeConfig(**SIZES, head_dim=8, mlp=12)


@pytest.mark.parametrize(("layers", "named", "attends"), [(24, None, [2, 6, 10, 14, 18, 22]), (4, (0, 3), [0, 3])])
def test_which_layers_attend_and_which_have_experts(layers, named, attends):
    found = kinds(dataclasses.replace(CONFIG, layers=layers, attention_layers=named, dense_layers=2))
    assert [len(run) for run in found] == [2, layers - 2]
    mixers, feed_forward = zip(*(kind for run in found for kind in run), strict=True)
    assert [i for i, mixer in enumerate(mixers) if mixer == "attention"] == attends
    assert feed_forward == ("dense",) * 2 + ("moe",) * (layers - 2)


def test_packed_documents_have_the_logits_that_each_has_alone():
    rng, tokens = np.random.default_rng(0), np.zeros((3, 8), np.int32)
    first, second = rng.integers(0, 24, 3), rng.integers(0, 24, 5)
    tokens[0], tokens[1, :3], tokens[2, 3:] = (*first, *second), first, second
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]])
    positions = np.tile([0, 1, 2, 0, 1, 2, 3, 4], (3, 1))

    @jax.jit
    def read(key):
        return Lfm2Moe(CONFIG, key=key)(tokens, segments=segments, positions=positions).logits

    packed, *alone = read(jax.random.key(0))
    for found, document in zip(alone, (slice(0, 3), slice(3, 8)), strict=True):
        np.testing.assert_allclose(packed[document], found[document], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_layers": (1, 3)}, "model.attention_layers names layer 3, but model.layers=3 has layers 0 to 2"),
        ({"dense_layers": 3}, "model.dense_layers=3 must be below model.layers=3"),
        ({"mlp": 0}, "model.mlp=0 must be greater than 0 with model.dense_layers=1"),
    ],
)
def test_refused(changes, line):
    with refused(line):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("router", "line"),
    [
        (Choice(), "model.router.score=softmax: LFM2 in transformers has only sigmoid"),
        (Choice("sigmoid"), "model.router.added_to_sum=1e-20: LFM2 in transformers has only 1e-06"),
        (Choice("sigmoid", groups=2, gates="scores"), "model.router.groups=2: LFM2 in transformers has only 1"),
        (Choice("sigmoid", least_sum=0.5), "model.router.least_sum=0.5: LFM2 in transformers has only 0"),
    ],
)
def test_no_folder_has(router, line):
    with refused(line):
        Lfm2Moe.hub.write(dataclasses.replace(CONFIG, router=router))
