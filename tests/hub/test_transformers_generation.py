"""Greedy tokens with a cache against transformers: every kind of cache, padded prompts, end tokens, and meshes."""

import warnings

import numpy as np
import pytest
from mesh_cases import make_execution, mark_full, split_evenly
from peer_results import torch
from tiny_models import CONFIGS

import moezoo

# Prompts of at most seven tokens, padded on the left; more new tokens than any window holds.
IDS = np.random.default_rng(1).integers(0, 40, (4, 7)).astype(np.int32)
MASK = np.arange(7)[None] >= np.array([0, 6, 2, 0])[:, None]
NEW = 12


# One configuration of each kind; tests/generation proves more cases for Mixtral and DeepSeek without transformers.
DEFAULT = [
    ("mixtral window", "ep8", "dense"),
    ("v3", "fsdp2_ep4", "ring"),
    ("qwen3", "fsdp2_ep4", "ragged"),
    ("olmoe", "fsdp2_ep4", "gather"),
    ("v2 groups", "fsdp2_ep4", "capacity"),
]
EACH_WEEK = [("qwen3 every other", "ep8", "ring"), ("minimax", "ep8", "ring"), ("gpt_oss layers", "ep8", "ring")]


def continue_prompts(theirs, eos=None):
    """Return the prompts and transformers' continuations."""
    theirs.generation_config.eos_token_id = eos
    theirs.generation_config.pad_token_id = 0 if eos is None else eos
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        ids = theirs.generate(
            torch.tensor(IDS.astype(np.int64)),
            attention_mask=torch.tensor(MASK.astype(np.int64)),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
        )
    return ids.numpy()


# What a cache holds, and where its tokens stand, follows from attention's kind, window, sparse index, rotary pairs and
# scales: CI has a configuration of each. These differ from one of them in what a cache does not touch, such as experts,
# the router, tied embeddings and dense layers, of which CI compares logits and gradients in test_transformers.py.
MORE = (
    "mixtral",
    "mixtral all experts, tied",
    "qwen3 mscales, tied",
    "glm plain",
    "hy",
    "dots plain",
    "ernie every other",
    "olmoe shared heads, tied",
    "v3 two mscales",
    "v3 no mscale",
    "v3 two dense",
    "v3 none dense, tied",
    "v3 all experts",
    "v2",
    "mistral 4 plain",
    "v2 lite, tied",
    "lfm2 two dense",
    "solar plain",
    "mimo plain, tied",
    "exaone groups, tied",
    "afmoe plain, tied",
    "sarvam",
)
# More of a kind, in which sizes or the layers' order differ; some run on a mesh below.
WEEKLY = (
    "qwen3 every other",
    "dots",
    "olmoe",
    "gpt_oss layers",
    "gpt_oss no window",
    "v2 groups",
    "kimi linear none dense",
    "kimi linear two dense",
    "gemma4 no cap",
    "qwen3.5 attention first, tied",
    "qwen3.5 biases",
    "qwen3.5 attention alone",
    "next four heads, tied",
    "next equal heads",
    "next plain",
    "qwen2",
    "qwen2 window, tied",
    "lfm2 biases, untied",
    "llama4 two experts",
    "llama4 no stretches",
)
MARKS = dict.fromkeys(MORE, pytest.mark.full) | dict.fromkeys(WEEKLY, pytest.mark.weekly)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CONFIGS])
def test_greedy_tokens(save, peer, name):
    model, theirs = save(name).model, peer(name)
    greedy = continue_prompts(theirs)
    # The last row's fourth new token ends a row: other rows continue, or have ended before. The absent token ends none.
    end, absent = int(greedy[3, 7 + 3]), int(np.setdiff1d(np.arange(40), greedy[:, 7:])[0])
    for eos, wanted in ((absent, greedy), (end, continue_prompts(theirs, end))):
        found = moezoo.generate(model, IDS, mask=MASK, max_new_tokens=NEW, eos_token_id=eos)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("name", "mesh", "strategy"), mark_full(DEFAULT, EACH_WEEK))
def test_greedy_tokens_on_a_mesh(save, peer, name, mesh, strategy):
    config = split_evenly(CONFIGS[name])
    execution = make_execution(mesh, strategy)
    found = moezoo.generate(save(config).model, IDS, mask=MASK, max_new_tokens=NEW, execution=execution)
    np.testing.assert_array_equal(found, continue_prompts(peer(config)))
