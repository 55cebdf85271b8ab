"""Greedy tokens with a cache against transformers': every configuration, padded prompts, an end; and on meshes."""

import warnings

import numpy as np
import pytest
from against import load, torch
from test_transformers_meshes import DEFAULT, PRODUCT, make_execution, split_evenly
from tiny import CONFIGS, random_model

import moezoo

# Prompts of seven tokens or fewer, padded on the left, and more new ones than any window holds.
IDS = np.random.default_rng(1).integers(0, 40, (4, 7)).astype(np.int32)
MASK = np.arange(7)[None] >= np.array([0, 6, 2, 0])[:, None]
NEW = 12


def continued(theirs, eos=None):
    """What transformers writes after the prompts."""
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


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """Our model of a configuration, and transformers' of the folder we write."""
    name, even = request.param
    model = random_model(split_evenly(CONFIGS[name]) if even else CONFIGS[name])
    folder = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(model, folder)
    return model, load(folder)


@pytest.mark.parametrize("case", [(name, False) for name in CONFIGS], indirect=True, ids=CONFIGS)
def test_greedy_tokens(case):
    model, theirs = case
    wanted = continued(theirs)
    np.testing.assert_array_equal(moezoo.generate(model, IDS, mask=MASK, max_new_tokens=NEW), wanted)
    # The last row's fourth new token ends a text: others go on, or have ended before.
    end = int(wanted[3, 7 + 3])
    wanted = continued(theirs, end)
    found = moezoo.generate(model, IDS, mask=MASK, max_new_tokens=NEW, eos_token_id=end)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("case", "mesh", "strategy"),
    [
        pytest.param((name, True), mesh, strategy, marks=[] if (name, mesh, strategy) in DEFAULT else pytest.mark.full)
        for name, mesh, strategy in PRODUCT
    ],
    indirect=["case"],
)
def test_greedy_tokens_on_a_mesh(case, mesh, strategy):
    model, theirs = case
    found = moezoo.generate(model, IDS, mask=MASK, max_new_tokens=NEW, execution=make_execution(mesh, strategy))
    np.testing.assert_array_equal(found, continued(theirs))
