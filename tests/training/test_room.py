"""Whether a run has room is known before its first step: memory by the prediction of its step, a disk by shapes."""

import inspect
import shutil
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused
from training_runs import steps_only, train_and_print

import moezoo
from moezoo.config.build import build_execution
from moezoo.parallel import memory
from moezoo.parallel.mesh import abstract_mesh
from moezoo.training import room
from moezoo.training.build import build_step
from moezoo.training.checkpoint import count_kept
from moezoo.training.step_memory import step_footprint


def step_of(*overrides: str) -> Any:
    cfg = moezoo.compose(*overrides)
    return build_step(cfg, build_execution(cfg))


@pytest.mark.parametrize(("mesh", "devices"), [("mesh=single", 1), ("mesh=ep8", 8)])
def test_virtual_devices_share_memory(tiny, monkeypatch, mesh, devices):
    """Above 0.8 times there is a line, above 1.5 times a refusal; neither below."""
    step = step_of(*tiny, mesh)
    needed = devices * step_footprint(step, step.traced).peak

    def free(times: float) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda: int(needed / times))

    free(0.79)
    assert room.check_memory(step) == []
    for times in (0.81, 1.49):
        free(times)
        (line,) = room.check_memory(step)
        assert "execution.microbatches" in line
        assert ("8 CPU devices" in line) == (devices == 8)
    free(1.51)
    with refused("a step needs about", "this process may use", "smaller batch_size", "execution.microbatches"):
        room.check_memory(step)


def test_what_is_predicted_too_low_is_said(monkeypatch):
    """With a decay per channel a CPU may need 2.6 times the prediction, so the line comes earlier; the refusal not."""
    small = ("model.layers=2", "model.embed=16", "model.delta.key_dim=4", "model.delta.value_dim=4", "seq_len=64")
    step = step_of("model=kimi_linear", *small, "batch_size=1", "mesh=single")
    needed = step_footprint(step, step.traced).peak
    for times, lines in ((0.30, 0), (0.31, 1), (1.49, 1)):
        monkeypatch.setattr(memory, "free_memory", lambda times=times: int(needed / times))
        found = room.check_memory(step)
        assert len(found) == lines
        assert all("low for such recurrent layers, of which up to 2.6 times as much was seen" in line for line in found)


def test_a_device_has_its_own_memory(tiny, monkeypatch):
    """The smallest of those of this process counts, and no multiple of a device; unknown memory is not compared."""
    step = step_of(*tiny, "mesh=ep8", "execution.remat=dots")
    peak = step_footprint(step, step.traced).peak

    without_types = inspect.unwrap(memory.room_of)  # which would refuse what stands for a mesh

    def devices(*limits: int | None) -> None:
        facts = [{"process_index": int(n == 2), "memory_stats": lambda n=n: {"bytes_limit": n}} for n in limits]
        here = [SimpleNamespace(platform="gpu", device_kind="big", **each) for each in facts]
        mesh = SimpleNamespace(devices=np.array(here))
        monkeypatch.setattr(room, "room_of", lambda _: without_types(mesh))

    devices(2 * peak, 2)  # the second device is another process's
    assert room.check_memory(step) == []
    devices(2 * peak, peak)
    assert len(room.check_memory(step)) == 1
    devices(2 * peak, peak // 2)
    with refused("a step needs about", "a big may use", "execution.remat=full"):
        room.check_memory(step)
    devices(None)
    assert room.check_memory(step) == []


def test_layers_before_what_is_trained_have_no_backward_pass():
    step = step_of("model=deepseek", "model.layers=3", "seq_len=32", 'trained=["*.stacks[1]*"]')
    held = {moment.name: dict(moment.terms) for moment in step_footprint(step, step.traced).moments}
    parts = ("arrays of attention", "arrays of feed_forward")
    assert [name in held[f"backward pass of stacks[{n}]"] for n in (0, 1) for name in parts] == [False] * 2 + [True] * 2


def test_a_run_is_refused_before_it_writes(tiny, tmp_path, monkeypatch):
    words = (*tiny, "mesh=ep8", "steps=2", f"run_dir={tmp_path}/run")
    cfg = moezoo.compose(*words)
    needed = 8 * step_footprint(build_step(cfg, build_execution(cfg))).peak
    monkeypatch.setattr(memory, "free_memory", lambda: needed // 2)
    with refused("a step needs about"):
        moezoo.train(cfg)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    with steps_only():
        _, lines = train_and_print(*words)
    assert sum(line.startswith("warning:") and "this process may use" in line for line in lines) == 1


@pytest.fixture
def disk(monkeypatch):
    """Set the free bytes of every disk."""
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=free))


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("every", "keep"), [("0", 1), ("0", 3), ("null", 2)])
def test_a_disk_has_room_for_one_more_than_is_kept(tiny, tmp_path, disk, every, keep):
    """The best of several evaluations is kept beside the newest."""
    newest = keep - (every != "0")
    cfg = moezoo.compose(*tiny, f"checkpoint_keep={newest}", "mesh=ep8", f"eval_every={every}")
    step = build_step(cfg, build_execution(cfg))
    each, folder = bytes_of(step.arguments[0]), tmp_path / "run"

    def check_bound(needed: int) -> None:
        disk(needed)
        room.check_disk(cfg, step, folder)
        disk(needed - 1)
        with refused(f"run_dir={folder}: checkpoints need ", "and the disk has ", "checkpoint_keep"):
            room.check_disk(cfg, step, folder)

    check_bound((keep + 1) * each)
    for saved in range(keep + 1):  # what is there needs no room; one more than is kept is removed by the next save
        (folder / f"checkpoints/{saved + 1}").mkdir(parents=True)
        check_bound((max(0, keep - 1 - saved) + 1) * each)
    (folder / "checkpoints/unfinished.9/part").mkdir(parents=True)
    (folder / "checkpoints/unfinished.9/part/file").write_bytes(bytes(1000))  # what a run removes when it goes on
    check_bound(each - 1000)


def test_a_short_run_has_few_checkpoints(tiny):
    cfg = moezoo.compose(*tiny, "steps=1", "checkpoint_keep=9")
    assert count_kept(cfg) == 2  # before and after its step


def test_frozen_arrays_are_written_once(tiny, tmp_path, disk):
    words = (*tiny, "checkpoint_keep=1", "eval_every=0", "frozen=['.stacks[0]*']")
    cfg = moezoo.compose(*words)
    step = build_step(cfg, build_execution(cfg))
    state, frozen = step.arguments[0], bytes_of(step.arguments[0].model.stacks)
    needed = 2 * (bytes_of(state) - frozen)
    for there, bound in ((False, needed + frozen), (True, needed)):
        if there:
            (tmp_path / "checkpoints/frozen").mkdir(parents=True)
        disk(bound)
        room.check_disk(cfg, step, tmp_path)
        disk(bound - 1)
        with refused("run_dir=", "of frozen arrays" * (not there)):
            room.check_disk(cfg, step, tmp_path)


def test_a_store_and_a_disk_of_unknown_size_are_not_asked(tiny, tmp_path, disk, monkeypatch):
    cfg = moezoo.compose(*tiny)
    step = build_step(cfg, build_execution(cfg, abstract_mesh(cfg.mesh)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    room.check_disk(cfg, step, tmp_path)
    disk(0)
    room.check_disk(cfg, step, "gs://bucket/run")  # type: ignore[arg-type]
