"""The initial values of every family: their size as documented, and independent draws for every matrix."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import moezoo
from moezoo.models import FAMILIES, MixtralConfig
from moezoo.parallel.axes import Role, parameter_table

# A normal distribution truncated at two standard deviations has this standard deviation.
TRUNCATED = 0.8796


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values(family):
    """`ModelConfig` documents the sizes. Each layer and expert has draws of its own, and so has each array."""
    kind: Any = FAMILIES[family].config
    both = {"attention_every": 3} if family == "qwen3_5" else {}  # both mixers
    config = kind(layers=3, vocab=200, init_std=0.03, tied_embeddings=family == "olmoe", **both)
    model = jax.jit(lambda: moezoo.build_model(config, key=jax.random.key(0)))()
    first_numbers = []
    for (path, axes, shape), array in zip(parameter_table(model), jax.tree.leaves(model), strict=True):
        if path.endswith((".decay.rate", ".decay.bias", ".attention.rate", ".step_bias")):  # tests/nn/test_delta.py
            continue
        is_filter = (".convolutions" in path and path.endswith(".weight")) or path.endswith(".filters")
        if axes.role not in (Role.WEIGHT, Role.EMBEDDING) and not is_filter:
            starts = axes.role is Role.SCALE and (".attention.norm" in path or not config.norms_around_one)
            starts |= path.endswith((".decay.bias", "].scale"))
            assert np.unique(array).tolist() == [float(starts)], path
            continue
        stacked = len(axes.stacked)
        inputs = shape[stacked] if is_filter else math.prod(shape[stacked : stacked + len(axes.inputs)])
        low_rank = path.endswith((".decay.down", ".attention.gate.down"))
        writes_to_stream = path.endswith((".attention.out", ".down")) and not low_rank
        std = inputs**-0.5 * (2 * config.layers) ** (-0.5 * writes_to_stream)
        if "embedding.weight" in path:  # also the unembedding, of which 0.03 is below the limit for this width
            std = config.init_std
        for matrix in np.asarray(array).reshape(-1, math.prod(shape[stacked:])):
            # The standard deviation of n draws is off by 1 / sqrt(2 n), relatively; five times that is rare.
            assert abs(matrix.std() / (TRUNCATED * std) - 1) < 5 / math.sqrt(2 * matrix.size), path
            first_numbers.append(tuple(np.round(matrix[:4] / std, 3).tolist()))
    assert len(set(first_numbers)) == len(first_numbers)


@pytest.mark.parametrize(
    ("settings", "deviation"),
    [
        ({"embed": 32}, TRUNCATED * 0.1 * math.sqrt(32)),
        ({"embed": 512}, 1.0),  # would be 2, and the first loss 2 above ln(vocab), with a deviation of 0.1
        ({"embed": 512, "unembedding_std": 0.02}, TRUNCATED * 0.02 * math.sqrt(512)),
        ({"embed": 32, "unembedding_std": 0.0}, 0.0),
    ],
    ids=str,
)
def test_the_first_loss_is_near_the_logarithm_of_the_vocabulary(settings, deviation):
    """Logits are normal with variance d s^2, s the deviation of the unembedding; half of that is added to the loss."""
    config = MixtralConfig(vocab=8192, layers=1, head_dim=8, expert_mlp=16, experts=2, **settings)
    tokens = jax.random.randint(jax.random.key(1), (4, 65), 0, config.vocab)
    model = jax.jit(lambda: moezoo.build_model(config, key=jax.random.key(0)))()
    logits = np.asarray(model(tokens[:, :-1]).logits, np.float64)
    # Activations lie along some directions. With only eight, 8,192 columns give it within 0.3%; 1% is three times that.
    assert abs(logits.std() - deviation) <= 0.01 * deviation
    labels = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    loss = np.mean(np.log(np.exp(logits).sum(-1)) - labels)
    # 256 labels: their mean logit has an error of deviation / 16, of which five are rare.
    assert abs(loss - math.log(config.vocab) - deviation**2 / 2) <= 5 * deviation / 16 + 1e-6
