"""A run may start from the folder of a dense model: the same arrays as `from_pretrained` gives, also after a resume."""

import jax
import numpy as np
import pytest
from dense_folders import write_dense
from refusals import refused

import moezoo
from moezoo.training.initial import load_elsewhere, load_initial

NOISY = moezoo.Upcycle(experts=8, per_token=2, noise=0.1, seed=3)
KEYS = ("upcycle.experts=8", "upcycle.noise=0.1", "upcycle.seed=3", "data=synthetic", "seq_len=16", "mesh=ep8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("dense") / "m", "llama").folder


def test_a_run_begins_with_the_arrays_of_from_pretrained(folder):
    cfg = moezoo.compose(f"init_from={folder}", *KEYS, "checkpoint_frozen=false", "frozen=[*.experts.*, *.router.*]")
    assert cfg.upcycle == NOISY
    assert (cfg.model.experts, cfg.model.experts_per_token, cfg.model.load_balance) == (8, 2, 0)
    wanted = moezoo.from_pretrained(folder, upcycle=NOISY)
    execution = moezoo.execution(cfg)
    run = load_initial(cfg, execution)
    elsewhere = load_elsewhere(cfg)  # what a checkpoint leaves to the folder, on one device
    assert len(jax.tree.leaves(elsewhere)) == 4
    for arrays in (run, elsewhere):
        for path, array in jax.tree_util.tree_leaves_with_path(arrays):
            name = jax.tree_util.keystr(path)
            whole = dict(jax.tree_util.tree_leaves_with_path(wanted))[path]
            np.testing.assert_array_equal(array, whole, err_msg=name)


def test_settings_of_a_run_that_contradict_upcycling_are_refused(folder):
    start = f"init_from={folder}"
    with refused(f"{folder}/config.json: model_type=llama is a dense model", "upcycle.experts=8 upcycle.per_token=2"):
        moezoo.compose(start, "data=synthetic")
    with refused("model.experts=4 but the weights of init_from=", "model.experts=8; leave it out"):
        moezoo.compose(start, *KEYS, "model.experts=4")
    with refused("upcycle.experts=8 copies the MLPs of a dense model; name the folder of these weights as init_from"):
        moezoo.compose("model=mixtral", "upcycle.experts=8")
    with refused("upcycle.noise=0.1 but upcycle.experts=0"):
        moezoo.compose("upcycle.noise=0.1")
    with refused("upcycle.per_token=9 exceeds upcycle.experts=8"):
        moezoo.compose(start, *KEYS, "upcycle.per_token=9")
    with refused("mesh.expert=8 splits experts 8 ways but model.experts=6"):
        moezoo.execution(moezoo.compose(start, *KEYS, "upcycle.experts=6"))
