"""Runs over pipeline stages."""

import numpy as np
import pytest
from refusals import refused
from training_runs import read_rows, steps_only

import moezoo


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_with_other_stages(tiny, here):
    """A run on a mesh with stages, a run without that continues it, and one that was never on stages."""
    common = (*tiny, "model.layers=5", "log_every=1", "checkpoint_every=2", "eval_every=2")
    whole = ("mesh.expert=2", "execution.microbatches=2")
    stages = ("mesh.stage=2", "mesh.expert=2", "execution.pipeline.microbatches=2")
    with steps_only():
        moezoo.train(moezoo.compose(*common, *whole, "steps=4", "run_dir=whole"))
        moezoo.train(moezoo.compose(*common, *stages, "steps=4", "run_dir=staged"))
        back = ("resume=staged/checkpoints/2", "run_dir=back", "mesh.stage=1", "execution.microbatches=2")
        moezoo.train(moezoo.compose(*back))
        with refused(
            "execution.microbatches=1 but the run at resume=staged has execution.microbatches=1 x "
            "execution.pipeline.microbatches=2",
            "set execution.microbatches=2",
        ):
            moezoo.train(moezoo.compose("resume=staged", "run_dir=other", "mesh.stage=1", "steps=6"))
    expected = read_rows(here / "whole")
    for name in ("staged", "back"):
        for row, wanted in zip(read_rows(here / name), expected, strict=True):
            assert row.keys() == wanted.keys()
            for key, value in row.items():
                np.testing.assert_allclose(value, wanted[key], rtol=1e-4, err_msg=f"{name} {row['step']} {key}")
