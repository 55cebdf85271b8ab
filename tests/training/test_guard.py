"""Steps that are not taken: what stays as it was, to the bit, and what is told."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.config.build import build_execution
from moezoo.config.settings import GuardSettings
from moezoo.data import Batch
from moezoo.training.build import build_state, build_step
from moezoo.training.guard import Guard

DEEPSEEK = (
    "model=deepseek",
    "model.vocab=32",
    "model.embed=32",
    "model.layers=2",
    "model.heads=2",
    "model.q_lora=16",
    "model.kv_lora=8",
    "model.nope_dim=8",
    "model.rope_dim=8",
    "model.value_dim=8",
    "model.mlp=32",
    "model.expert_mlp=16",
    "model.experts=8",
    "model.experts_per_token=2",
    "model.router.groups=1",
    "model.router.kept_groups=1",
    "model.router.group_score=max",
    "mesh=fsdp2_ep4",
    "seq_len=16",
    "execution.microbatches=2",
    "batch_size=16",
)


@pytest.fixture(scope="module")
def started() -> tuple[Any, Any, Any, Any]:
    """A compiled step with a choice bias and micro-steps, its configuration, and a batch."""
    cfg = moezoo.compose(*DEEPSEEK)
    execution = build_execution(cfg)
    step = build_step(cfg, execution)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, 8, 17)).astype(np.int32)
    position = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 8, 16))
    batch = Batch(tokens[..., :-1], tokens[..., 1:], np.ones((2, 8, 16), np.int32), position)
    return step, step.compile(), jax.device_put(batch, step.batch_shardings), lambda: build_state(cfg, execution, step)


def copied(state: Any) -> Any:
    """On the host, as the step gives up what it is given."""
    return jax.tree.map(np.asarray, state)


def put(step: Any, state: Any) -> Any:
    """Back on the devices."""
    return jax.device_put(state, step.state_shardings)


def test_what_is_not_finite_changes_nothing(started):
    step, compiled, batch, fresh = started
    state, metrics = compiled(fresh(), batch)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (0, 0)
    good = copied(state)
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
        # The next step is taken as if the other had not been.
        mended = copied(after)._replace(step=good.step)  # which the learning rate goes by
        mended = eqx.tree_at(lambda s: s.model.embedding.weight, mended, good.model.embedding.weight)
        again, metrics = compiled(put(step, mended), batch)
        straight, _ = compiled(put(step, good), batch)
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
        for a, b in zip(jax.tree.leaves(again.model), jax.tree.leaves(straight.model), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("field", "value"), [("loss", 0.5), ("norm", 1e-3)])
def test_a_spike_changes_nothing(started, field, value):
    """Loss or norm far above their running mean; but not before twenty steps were seen."""
    step, compiled, batch, fresh = started
    for accepted, skipped in ((19, 0), (20, 1)):
        state = copied(fresh())
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


def test_without_limits_only_what_is_not_finite():
    guard = Guard.fresh()._replace(accepted=jnp.int32(100), loss=jnp.float32(1), norm=jnp.float32(1))
    free = GuardSettings(loss=None, gradient_norm=None)
    for loss, norm, wanted in ((1e9, 1e9, True), (np.nan, 1, False), (1, np.inf, False)):
        assert bool(guard.accepts(jnp.float32(loss), jnp.float32(norm), free)) == wanted
    assert not guard.accepts(jnp.float32(3.1), jnp.float32(1), GuardSettings())
    assert not guard.accepts(jnp.float32(1), jnp.float32(10.1), GuardSettings())
    assert guard.accepts(jnp.float32(2.9), jnp.float32(9.9), GuardSettings())


def test_too_many_in_a_row_end_the_run(tiny, tmp_path, capsys):
    """A learning rate that breaks the model at once; the checkpoint before it stays."""
    wild = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "schedule=constant", "schedule.warmup_steps=0")
    cfg = moezoo.compose(
        *tiny[:-2],
        *wild,
        "log_every=1",
        "mesh=ep8",
        "steps=20",
        "guard.patience=3",
        "checkpoint_every=1",
        f"run_dir={tmp_path}/a",
    )
    told = (
        r"^steps 2 to 4 were all skipped \(loss .*, gradient norm .*\); the last checkpoint is step 1: continue from it"
    )
    with pytest.raises(moezoo.UserError, match=told):
        moezoo.train(cfg)
    out = capsys.readouterr().out
    assert out.count("skipped: loss") == 3
