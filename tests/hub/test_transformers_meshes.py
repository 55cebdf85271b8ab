"""All families against transformers, split over eight devices: the same numbers under every strategy."""

import dataclasses
import itertools

import numpy as np
import pytest
from against import agree, load, results, results_of_transformers
from tiny import CONFIGS, random_model

import moezoo
from moezoo.models import DeepSeekConfig
from moezoo.moe.dispatch import STRATEGIES

MESHES = {"ep8": moezoo.MeshShape(expert=8), "fsdp2_ep4": moezoo.MeshShape(fsdp=2, expert=4)}
WAYS = tuple(itertools.product(MESHES, STRATEGIES))
# A family's main configuration goes every way, the others one each by turns.
MAIN = ("mixtral", "v3")
TURNS = [(name, *WAYS[number % len(WAYS)]) for number, name in enumerate(CONFIGS) if name not in MAIN]
DEFAULT = [(name, *way) for name in MAIN for way in WAYS] + TURNS
PRODUCT = [(name, *way) for name in CONFIGS for way in WAYS]
TOKENS = np.random.default_rng(3).integers(0, 40, (8, 8)).astype(np.int32)


def make_execution(mesh, strategy):
    """How a case runs: nothing is dropped."""
    rules = moezoo.compose("rules=fsdp_ep").rules
    return moezoo.Execution(moezoo.make_mesh(MESHES[mesh]), rules, STRATEGIES[strategy]().exact)


def split_evenly(config):
    """With latents that eight devices can store."""
    if isinstance(config, DeepSeekConfig):
        return dataclasses.replace(config, kv_lora=32, q_lora=config.q_lora and 24)
    return config


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """Our model of a configuration, and what transformers finds."""
    model = random_model(split_evenly(CONFIGS[request.param]))
    folder = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(model, folder)
    return model, results_of_transformers(load(folder), TOKENS)


@pytest.mark.parametrize(
    ("case", "mesh", "strategy"),
    [pytest.param(*one, marks=[] if one in DEFAULT else pytest.mark.full) for one in PRODUCT],
    indirect=["case"],
)
def test_logits_loss_and_gradients(case, mesh, strategy):
    model, theirs = case
    agree(results(model, TOKENS, make_execution(mesh, strategy)), theirs)
