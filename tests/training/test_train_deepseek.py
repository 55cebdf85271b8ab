"""A whole run of a family with buffers: the choice bias is moved, saved and loaded."""

import numpy as np
import pytest

import moezoo


def test_trains_from_the_command_line(tiny):
    small = tuple(override for override in tiny if "head_dim" not in override and "warmup" not in override)
    cfg = moezoo.compose("model=deepseek", *small, "mesh=fsdp2_ep4", "steps=12", "eval_every=0")
    run = moezoo.train(cfg)
    assert run.history[-1]["val_loss"] < run.history[0]["loss"] - 0.1
    again, cfg = moezoo.load_run(run.folder)
    bias = np.asarray(run.model.stacks[1].layer.moe.router.choice_bias)  # type: ignore[attr-defined]
    assert bias.any()
    np.testing.assert_array_equal(again.stacks[1].layer.moe.router.choice_bias, bias)  # type: ignore[attr-defined]
    assert moezoo.evaluate(again, cfg).loss == pytest.approx(run.evaluation.loss, rel=1e-6)
