"""Kimi Linear: which layers attend, documents that are packed, and what is refused."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused

from moezoo.models import KimiLinear, KimiLinearConfig
from moezoo.models.kimi_linear import kinds
from moezoo.nn.delta import DeltaSizes

SIZES: Any = {"vocab": 24, "embed": 16, "layers": 2, "heads": 2, "experts": 4, "experts_per_token": 2, "expert_mlp": 8}
CONFIG = KimiLinearConfig(
    **SIZES, kv_lora=5, nope_dim=4, rope_dim=2, value_dim=3, mlp=12, delta=DeltaSizes(2, 2, 4, 4, 3)
)


def chooses(**changes: Any) -> dict[str, Any]:
    """Return the setting of a router that chooses otherwise."""
    return {"router": dataclasses.replace(CONFIG.router, **changes)}


@pytest.mark.parametrize(
    ("layers", "named", "attends"), [(27, None, [3, 7, 11, 15, 19, 23, 26]), (4, None, [3]), (4, (0, 2), [0, 2])]
)
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
        return KimiLinear(CONFIG, key=key)(tokens, segments=segments, positions=positions).logits

    packed, *alone = read(jax.random.key(0))
    for found, document in zip(alone, (slice(0, 3), slice(3, 8)), strict=True):
        np.testing.assert_allclose(packed[document], found[document], rtol=0, atol=1e-5)


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
        (chooses(score="softmax"), "model.router.score=softmax: Kimi Linear in transformers has only sigmoid"),
        (chooses(choice_bias="none"), "model.router.choice_bias=none: Kimi Linear in transformers has only learned"),
        (chooses(groups=2, kept_groups=1, group_score="max"), "model.router.group_score=max: ... only sum_of_top2"),
        (chooses(added_to_sum=0.1), "model.router.added_to_sum=0.1: Kimi Linear in transformers has only 1e-20"),
        (chooses(least_sum=0.1), "model.router.least_sum=0.1: Kimi Linear in transformers has only 0.0"),
    ],
)
def test_no_folder_has(changes, line):
    with refused(line):
        KimiLinear.hub.write(dataclasses.replace(CONFIG, **changes))


def test_of_one_group_a_folder_has_any_score():
    """Nothing is chosen among groups, so their score is no part of what a folder describes."""
    config = dataclasses.replace(CONFIG, **chooses(group_score="max"))
    assert KimiLinear.hub.write(config) == KimiLinear.hub.write(CONFIG)
