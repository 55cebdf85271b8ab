"""All families against transformers on eight devices: logits, loss and every gradient, with every strategy."""

import itertools

import numpy as np
import pytest
from mesh_cases import MESHES, make_execution, mark_full, split_evenly
from peer_results import assert_agreement, results, results_of_transformers
from tiny_models import CONFIGS

from moezoo.moe.dispatch import STRATEGIES

# Three kinds of layers and strategies; each week others, and DeepSeek-V3 with every second pair of mesh and strategy
# left. tests/parity has all against the oracle, which test_oracle_transformers.py compares with transformers.
OTHERS = [
    ("qwen3 every other", "fsdp2_ep4", "ring"),
    ("v2 groups", "ep8", "capacity"),
    ("gpt_oss", "fsdp2_ep4", "ragged"),
]
EACH_WEEK = [("qwen3", "ep8", "ragged"), ("olmoe", "fsdp2_ep4", "gather"), ("glm", "fsdp2_ep4", "ragged")]
LEFT = [pair for pair in itertools.product(MESHES, STRATEGIES) if pair not in {case[1:] for case in OTHERS}]
EACH_WEEK += [("v3", *pair) for pair in LEFT[1::2]]
TOKENS = np.random.default_rng(3).integers(0, 40, (8, 8)).astype(np.int32)


@pytest.mark.parametrize(("name", "mesh", "strategy"), mark_full(OTHERS, EACH_WEEK))
def test_logits_loss_and_gradients(save, peer, name, mesh, strategy):
    config = split_evenly(CONFIGS[name])
    ours = results(save(config).model, TOKENS, make_execution(mesh, strategy))
    assert_agreement(ours, results_of_transformers(peer(config), TOKENS))
