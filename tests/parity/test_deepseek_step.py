"""DeepSeek's training step on meshes, strategies and memory policies against the same step on one device.

What one device computes is compared with transformers in `tests/hub`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import Case, fits
from running import STEPS, Running

import moezoo
from moezoo.models import DeepSeekConfig, build

# As in test_step_parity: float32 sums of some hundred terms, against an error in what is summed.
TOLERANCE = 2e-5


@functools.cache
def model(dense_layers: int = 1):
    """Tiny, every array random, the choice biases large enough to change choices."""
    config = DeepSeekConfig(
        vocab=40,
        embed=16,
        layers=2,
        dense_layers=dense_layers,
        heads=4,
        q_lora=8,
        kv_lora=8,
        nope_dim=6,
        rope_dim=4,
        value_dim=5,
        mlp=24,
        expert_mlp=12,
        experts=8,
        experts_per_token=3,
        groups=4,
        kept_groups=2,
        bias_rate=0.25,
        yarn_factor=4.0,
        yarn_length=8,
        load_balance=0.3,
        z_loss=0.05,
        init_std=0.5,
    )
    fresh = build(config, key=jax.random.key(3))
    rng = np.random.default_rng(4)
    leaves, structure = jax.tree.flatten(fresh)
    noisy = [np.asarray(x) + 0.2 * rng.standard_normal(x.shape).astype(np.float32) * (x.ndim < 3) for x in leaves]
    return jax.tree.unflatten(structure, [jnp.asarray(x) for x in noisy])


def run(case: Case):
    """Metrics of every step, the last gradients, and the model after the last."""
    running = Running(case, start=model())
    metrics = [running(number) for number in range(STEPS)]
    return metrics, jax.device_get(running.state.optimizer), jax.device_get(running.state.model)


@functools.cache
def alone(microbatches: int):
    """On one device."""
    return run(Case("dense", "single", "fsdp_ep", "full", microbatches, "sequence"))


CASES = [
    Case("ring", "ep8", "fsdp_ep", "full", 1, "sequence"),
    Case("gather", "fsdp2_ep4", "fsdp_ep", "dots", 1, "sequence"),
    Case("dense", "fsdp4_ep2", "fsdp_ep", "none", 2, "sequence"),
    Case("ring", "fsdp2_ep2_context2", "fsdp_ep", "none", 1, "sequence"),
    Case("ring", "fsdp8", "pure_fsdp", "full", 2, "sequence"),
    Case("gather", "data2_fsdp2_ep2", "shard_exp_on_fsdp", "full", 1, "sequence"),
    Case("ring", "fsdp2_ep4", "replicated", "full", 1, "sequence"),
    Case("ring", "fsdp2_ep2_context2", "cp_as_ep", "full", 1, "sequence"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_device(case):
    assert fits(case.mesh, case.rules)
    metrics, gradients, after = run(case)
    wanted_metrics, wanted_gradients, wanted = alone(case.microbatches)
    for one, other in zip(metrics, wanted_metrics, strict=True):
        np.testing.assert_array_equal(one.load, other.load)
        for name in ("loss", "load_balance_loss", "z_loss", "gradient_norm", "max_violation"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=TOLERANCE, err_msg=name)
    for tree, other in ((gradients, wanted_gradients), (after, wanted)):
        assert jax.tree.structure(tree) == jax.tree.structure(other)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True):
            where = jax.tree_util.keystr(path)
            assert abs(y).max() > 0, where
            np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE * abs(y).max(), err_msg=where)
    # Whole quarters: the same to the bit on every mesh.
    bias = after.stacks[1].layer.moe.router.bias
    np.testing.assert_array_equal(bias, wanted.stacks[1].layer.moe.router.bias)
    assert bias.dtype == np.float32


def test_the_bias_is_moved_by_counts_and_by_nothing_else():
    metrics, _, after = alone(1)
    moved = np.asarray(model().stacks[1].layer.moe.router.bias)
    for one in metrics:
        load = np.asarray(one.load, np.int64)
        moved = moved + np.float32(0.25) * np.sign(load.sum(1, keepdims=True) - 8 * load).astype(np.float32)
    np.testing.assert_array_equal(after.stacks[1].layer.moe.router.bias, moved)


def test_gradients_are_of_everything_but_the_bias():
    _, gradients, after = alone(1)
    paths = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(gradients)}
    everything = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)}
    assert everything - paths == {".stacks[1].layer.moe.router.bias"}


def test_trains_from_the_command_line():
    small = ("model=deepseek", "model.layers=2", "model.embed=32", "model.vocab=32", "seq_len=16")
    small += ("data=synthetic", "data.vocab=32", "data.eval_sequences=16", "optimizer.learning_rate=0.01")
    run = moezoo.train(moezoo.compose(*small, "mesh=fsdp2_ep4", "steps=12", "log_every=1"))
    assert run.history[-1]["val_loss"] < run.history[0]["loss"] - 0.1
    again, cfg = moezoo.load_run(run.folder)
    bias = np.asarray(run.model.stacks[1].layer.moe.router.bias)  # type: ignore[attr-defined]
    assert bias.any()
    np.testing.assert_array_equal(again.stacks[1].layer.moe.router.bias, bias)  # type: ignore[attr-defined]
    assert moezoo.evaluate(again, cfg).loss == pytest.approx(run.evaluation.loss, rel=1e-6)
