"""Skipped steps change nothing, to the bit, and are reported."""

import json
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import moezoo
from moezoo.config.build import build_execution
from moezoo.config.run_folders import steps
from moezoo.config.settings import GuardSettings
from moezoo.data import Batch
from moezoo.optim.guard import Guard
from moezoo.training.build import build_state, build_step
from moezoo.training.loop import Loop


@pytest.fixture(scope="module")
def started(tiny_deepseek) -> tuple[Any, Any, Any, Any]:
    """A step with a choice bias and micro-steps, compiled; a batch; and a function that makes a fresh state.

    Muon's state has momenta of matrices and both moments of AdamW.
    """
    cfg = moezoo.compose(*tiny_deepseek, "steps=12", "optimizer=muon")
    execution = build_execution(cfg)
    step = build_step(cfg, execution)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, 8, 17)).astype(np.int32)
    position = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 8, 16))
    batch = Batch(tokens[..., :-1], tokens[..., 1:], np.ones((2, 8, 16), np.int32), position)
    return step, step.compile(), jax.device_put(batch, step.batch_shardings), lambda: build_state(cfg, execution, step)


def copy_to_host(state: Any) -> Any:
    """Return a copy on the host; the step donates its argument."""
    return jax.tree.map(np.asarray, state)


def put(step: Any, state: Any) -> Any:
    """Return the state on the devices."""
    return jax.device_put(state, step.state_shardings)


def test_a_step_that_is_not_finite_changes_nothing(started):
    step, compiled, batch, fresh = started
    state, metrics = compiled(fresh(), batch)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (0, 0)
    good = copy_to_host(state)
    for spoil in (np.nan, np.inf):
        broken = eqx.tree_at(lambda s: s.model.embedding.weight, good, np.full_like(good.model.embedding.weight, spoil))
        after, metrics = compiled(put(step, broken), batch)
        assert not np.isfinite(metrics.loss)
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 1)
        for a, b in zip(
            jax.tree.leaves((after.model, after.optimizer)),
            jax.tree.leaves((broken.model, broken.optimizer)),
            strict=True,
        ):
            np.testing.assert_array_equal(np.asarray(a), b)
        assert int(after.step) == int(good.step) + 1
        assert (float(after.guard.loss), float(after.guard.norm)) == (float(good.guard.loss), float(good.guard.norm))
        # The next step is the same as without the skipped one.
        mended = copy_to_host(after)._replace(step=good.step)  # decides the learning rate
        mended = eqx.tree_at(lambda s: s.model.embedding.weight, mended, good.model.embedding.weight)
        again, metrics = compiled(put(step, mended), batch)
        straight, _ = compiled(put(step, good), batch)
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
        for a, b in zip(jax.tree.leaves(again.model), jax.tree.leaves(straight.model), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("field", "value"), [("loss", 0.5), ("norm", 1e-3)])
def test_a_spike_changes_nothing(started, field, value):
    """A loss or norm far above its running mean is skipped, once twenty steps were accepted."""
    step, compiled, batch, fresh = started
    for accepted, skipped in ((19, 0), (20, 1)):
        state = copy_to_host(fresh())
        guard = state.guard._replace(loss=np.float32(3), norm=np.float32(3), accepted=np.int32(accepted))
        before = state._replace(guard=guard._replace(**{field: np.float32(value)}))
        after, metrics = compiled(put(step, before), batch)
        assert int(metrics.skipped) == skipped
        same = [
            np.array_equal(np.asarray(a), b)
            for a, b in zip(jax.tree.leaves(after.model), jax.tree.leaves(before.model), strict=True)
        ]
        assert all(same) == bool(skipped)


def test_running_means():
    guard, seen = Guard.fresh(), []
    for value in np.linspace(1, 5, 120, dtype=np.float32):
        taken = value != np.float32(np.linspace(1, 5, 120, dtype=np.float32)[7])
        guard = guard.after(jnp.asarray(taken), jnp.asarray(value), jnp.asarray(2 * value))
        seen += [float(value)] if taken else []
    mean = 0.0
    for count, value in enumerate(seen):
        keep = min(0.98, count / (count + 1))
        mean = keep * mean + (1 - keep) * value
    assert float(guard.loss) == pytest.approx(mean, rel=1e-5)
    assert float(guard.norm) == pytest.approx(2 * mean, rel=1e-5)
    assert (int(guard.accepted), int(guard.skipped), int(guard.in_a_row)) == (119, 1, 0)


def test_without_limits_only_values_that_are_not_finite_are_skipped():
    guard = Guard.fresh()._replace(accepted=jnp.int32(100), loss=jnp.float32(1), norm=jnp.float32(1))
    free = GuardSettings(loss=None, gradient_norm=None)
    for loss, norm, wanted in ((1e9, 1e9, True), (np.nan, 1, False), (1, np.inf, False)):
        assert bool(guard.accepts(jnp.float32(loss), jnp.float32(norm), free)) == wanted
    assert not guard.accepts(jnp.float32(3.1), jnp.float32(1), GuardSettings())
    assert not guard.accepts(jnp.float32(1), jnp.float32(10.1), GuardSettings())
    assert guard.accepts(jnp.float32(2.9), jnp.float32(9.9), GuardSettings())


def test_too_many_in_a_row_before_a_save(tmp_path):
    """There is nothing to continue from."""
    skipped: Any = SimpleNamespace(skipped_in_a_row=2, loss=9.0, gradient_norm=1.0)
    run: Any = SimpleNamespace(cfg=moezoo.compose("guard.patience=2"), checkpoints=SimpleNamespace(folder=tmp_path))
    run.checkpoints.wait = lambda: None
    run._progress = SimpleNamespace(report_skipped=lambda *_: None)
    end = "no step is saved: start again with a lower learning rate"
    with refused("steps 1 to 2 were all skipped", end):
        Loop._check_skipped(run, 2, skipped)


def test_too_many_in_a_row_end_the_run(tiny, tmp_path, capsys):
    """A learning rate that breaks the model: the clock asks for a save all the time, but only step 1 is saved."""
    settings = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "schedule.warmup_steps=0")
    settings += (
        "mesh=single",
        "dispatch=gather",
        "steps=20",
        "guard.patience=3",
        "checkpoint_minutes=1e-9",
        "eval_every=0",
    )
    with pytest.raises(moezoo.UserError) as error:
        moezoo.train(moezoo.compose(*tiny, *settings, f"run_dir={tmp_path}/a"))
    assert str(error.value).startswith("steps 2 to 4 were all skipped (loss ")
    assert "; the last checkpoint is step 1: continue with a lower learning rate" in str(error.value)
    assert steps(tmp_path / "a" / "checkpoints") == [1]
    assert capsys.readouterr().out.count("skipped: loss") == 3

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    rows = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert None in json.loads(rows[-1], parse_constant=refuse).values()
