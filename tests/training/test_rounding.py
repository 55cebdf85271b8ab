"""Changes that rounding undoes: counted exactly on tiny arrays, in whole steps against what they changed, and said."""

from types import SimpleNamespace
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from traffic_oracle import step_traffic
from training_runs import steps_only, train_and_print

import moezoo
from moezoo.config.build import build_execution
from moezoo.data import Batch
from moezoo.host.machine import in_units
from moezoo.optim import Guard
from moezoo.parallel.axes import Axes, Role
from moezoo.parallel.placement import Placement
from moezoo.parallel.traces import collective_traffic
from moezoo.training import loop, rounding
from moezoo.training.build import build_state, build_step
from moezoo.training.loop import Loop
from moezoo.training.rounding import as_counts, count_lost
from moezoo.training.step import Step

AXES = ("one", "two")


def split_over(*axes: str) -> Placement:
    """Return where an array is that is split over these mesh axes along its first dimension."""
    return Placement(Axes(Role.WEIGHT, (), ("embed",), ()), (axes,), ((),), 1)


def test_counts_by_hand():
    """In bfloat16 the neighbours of 1 are 1 - 2^-8 and 1 + 2^-7; a change of half of the way to a neighbour is lost."""
    start = jnp.ones(8, jnp.bfloat16)
    changes = np.array([0, 2**-9, -(2**-8), 2**-9 + 2**-20, -(2**-8) - 2**-20, 1, 2**-24, 2**-26], np.float32)
    counted = jax.jit(lambda p, c: count_lost([p], [c], [split_over()], ()))(start, changes)
    # No change in float32: the first and the last. Lost: halves, which are ties to the even 1, and 2^-24.
    assert as_counts(counted) == (6, 3)


def test_arrays_of_every_rank_on_a_mesh_against_numpy():
    """Each number counts once, also where several devices store it; float32 arrays do not count."""
    rng, mesh = np.random.default_rng(0), auto_mesh(one=2, two=4)
    arrays = {"both": (8, 3, 2, 5), "one": (4, 6), "two": (4, 3, 2), "none": (5,), "number": ()}
    stored = {name: (AXES if name == "both" else (name,) if name in AXES else ()) for name in arrays}
    parameters = {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in arrays.items()}
    changes = {
        name: (rng.normal(size=shape) * np.exp(-9 * rng.random(shape))).astype(np.float32)
        for name, shape in arrays.items()
    }
    changes["one"][0] = 0
    before = {name: x.astype(np.float32) for name, x in parameters.items()}
    after = {name: before[name] - changes[name] for name in arrays}
    changed = sum(int((after[n] != before[n]).sum()) for n in arrays)
    moved = sum(int((after[n].astype(ml_dtypes.bfloat16) != parameters[n]).sum()) for n in arrays)
    assert 0 < moved < changed - 20
    wide = {"wide": np.ones(3, np.float32)}
    specs = {name: PartitionSpec(axes or None) if arrays[name] else PartitionSpec() for name, axes in stored.items()}
    specs |= {"wide": PartitionSpec()}
    placements = {name: split_over(*axes) for name, axes in stored.items()} | {"wide": split_over()}
    count = lambda p, c: count_lost(p, c, placements, AXES)  # noqa: E731
    mapped = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=(specs, specs), out_specs=PartitionSpec()))
    assert as_counts(mapped(parameters | wide, changes | wide)) == (changed, changed - moved)


def test_counts_above_32_bits(monkeypatch):
    """With parts of four bits in place of 16, several carries are needed within a stack, between arrays and devices."""
    monkeypatch.setattr(rounding, "_BITS", 4)
    mesh, size = auto_mesh(one=8), 37
    start = [jnp.ones((8, 11, 3, size), jnp.bfloat16), jnp.ones((8, 7), jnp.bfloat16)]
    changes = [jnp.full(x.shape, 2.0**-10, jnp.float32) for x in start]
    count = lambda p, c: count_lost(p, c, [split_over("one")] * 2, ("one",))  # noqa: E731
    mapped = jax.shard_map(count, mesh=mesh, in_specs=PartitionSpec("one"), out_specs=PartitionSpec())
    counted = jax.jit(mapped)(start, changes)
    assert (np.asarray(counted)[:, 1] < 16).all()
    assert as_counts(counted) == (8 * (11 * 3 * size + 7),) * 2


def step_of(*words: str) -> Step:
    """Return the step of a configuration."""
    cfg = moezoo.compose(*words)
    return build_step(cfg, build_execution(cfg))


def one_step(*words: str) -> tuple[Any, Any, Any, Any]:
    """Return the step, the model before and after one step on random tokens, and its metrics."""
    cfg = moezoo.compose(*words, "execution.param_dtype=bfloat16", "seed=3")
    execution = build_execution(cfg)
    step = build_step(cfg, execution)
    state = build_state(cfg, execution, step)
    before = jax.tree.map(np.asarray, state.model)
    shape = step.arguments[1].tokens.shape
    tokens = np.random.default_rng(0).integers(0, 32, shape).astype(np.int32)
    ones, places = np.ones_like(tokens), np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    batch = Batch(*map(jax.device_put, (tokens, tokens, ones, places), step.batch_shardings))
    state, metrics = step.compile()(state, batch)
    return step, before, jax.tree.map(np.asarray, state.model), metrics


@pytest.mark.parametrize(
    "words",
    [
        "mesh=fsdp2_ep4 optimizer=muon execution.microbatches=2 batch_size=16",
        "mesh=ep8 optimizer=adamw adapter=lora adapter.rank=2 trained=[.embedding.weight] optimizer.learning_rate=1e-4",
        pytest.param(
            "mesh=ep8 optimizer=sgd optimizer.learning_rate=0.1 frozen=['.stacks[0].*experts*']",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_a_step_moves_what_it_changes_and_does_not_lose(tiny, words):
    """What differs after the step is, to the number, what changed in float32 and was not lost; pairs are float32."""
    step, before, after, metrics = one_step(*tiny, *words.split())
    changed, lost = as_counts(metrics.lost)
    trained = [eqx.filter(model, step.trained) for model in (before, after)]
    pairs = [(a, b) for a, b in zip(*map(jax.tree.leaves, trained), strict=True) if a.dtype == ml_dtypes.bfloat16]
    moved, total = sum(int((a != b).sum()) for a, b in pairs), sum(a.size for a, _ in pairs)
    assert changed - lost == moved
    learns = {jax.tree_util.keystr(path) for path, yes in jax.tree_util.tree_leaves_with_path(step.trained) if yes}
    wanted = step_traffic(moezoo.compose(*tiny, *words.split()), step.blueprint.shapes, trained=learns.__contains__)
    assert collective_traffic(step.traced.jaxpr).outline(2) == wanted
    assert 0 < lost < changed <= total
    assert moved > 0


def test_a_skipped_step_changes_nothing(tiny, monkeypatch):
    monkeypatch.setattr(Guard, "accepts", lambda *_: jnp.bool_(False))
    *_, metrics = one_step(*tiny)
    assert int(metrics.skipped) == 1
    assert as_counts(metrics.lost) == (0, 0)


def test_a_run_says_once_that_weights_do_not_move(tiny, monkeypatch):
    """After the first steps, before the row of the last of them, with the memory of a run in float32."""
    monkeypatch.setattr(loop, "COUNTED_STEPS", 2)
    words = (*tiny, "mesh=ep8", "steps=3", "optimizer.learning_rate=2e-5")
    with steps_only():
        _, lines = train_and_print(*words, "execution.param_dtype=bfloat16")
    (line,) = (line for line in lines if "param_dtype=float32" in line)
    assert line.startswith("warning: rounding to bfloat16 undid ")
    assert lines.index(line) == next(n for n, each in enumerate(lines) if each.startswith("step 2/3")) - 1
    wide = step_of(*words)
    assert " first 2 steps made " in line
    assert f" with {in_units(sum(wide.memory.values()))} of parameters, gradients and optimizer state" in line


@pytest.mark.parametrize(
    ("lost", "steps", "said"),
    [([3, 3, 3], 3, [2]), ([3], 1, [1]), ([2, 2], 2, []), ([3, 1], 2, []), ([0, 0, 4, 4], 4, [])],
)
def test_more_than_half_of_all_changes_of_the_first_steps(tiny, monkeypatch, lost, steps, said):
    """Of 4 changes in each step; nothing without a count."""
    monkeypatch.setattr(loop, "COUNTED_STEPS", 2)
    cfg, lines, found = moezoo.compose(*tiny, "execution.param_dtype=bfloat16", f"steps={steps}"), [], []
    run: Any = SimpleNamespace(cfg=cfg, step=step_of(*tiny), _lost=np.zeros(2, np.int64))
    run._progress = SimpleNamespace(print=lines.append)
    for number, count in enumerate(lost, start=1):
        metrics: Any = SimpleNamespace(lost=jnp.array([[0, 4], [0, count]], jnp.uint32))
        Loop._check_rounding(run, number, metrics)
        found += [number] * len(lines)
        lines.clear()
    assert found == said
    Loop._check_rounding(run, steps, cast(Any, SimpleNamespace(lost=None)))
    assert lines == []


def test_a_step_in_float32_counts_nothing(tiny):
    step = step_of(*tiny)
    assert jax.eval_shape(step.function, *step.arguments)[1].lost is None
