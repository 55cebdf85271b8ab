"""The initial values of every family: their size as documented, and independent draws for every matrix."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import moezoo
from moezoo.models import FAMILIES
from moezoo.parallel.axes import Role, parameter_table

# A normal distribution truncated at two standard deviations has this standard deviation.
TRUNCATED = 0.8796


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values(family):
    """`ModelConfig` documents the sizes. Each layer and expert has draws of its own, and so has each array."""
    kind: Any = FAMILIES[family].config
    config = kind(layers=3, vocab=200, init_std=0.03, tied_embeddings=family == "olmoe")
    model = jax.jit(lambda: moezoo.build_model(config, key=jax.random.key(0)))()
    first_numbers = []
    for (path, axes, shape), array in zip(parameter_table(model), jax.tree.leaves(model), strict=True):
        if axes.role not in (Role.WEIGHT, Role.EMBEDDING):
            assert np.unique(array).tolist() == [float(axes.role is Role.SCALE)], path
            continue
        stacked = len(axes.stacked)
        inputs = math.prod(shape[stacked : stacked + len(axes.inputs)])
        writes_to_stream = path.endswith((".attention.out", ".down"))
        std = inputs**-0.5 * (2 * config.layers) ** (-0.5 * writes_to_stream)
        if "embedding.weight" in path:  # also the unembedding
            std = config.init_std
        for matrix in np.asarray(array).reshape(-1, math.prod(shape[stacked:])):
            # The standard deviation of n draws is off by 1 / sqrt(2 n), relatively; five times that is rare.
            assert abs(matrix.std() / (TRUNCATED * std) - 1) < 5 / math.sqrt(2 * matrix.size), path
            first_numbers.append(tuple(np.round(matrix[:4] / std, 3).tolist()))
    assert len(set(first_numbers)) == len(first_numbers)
