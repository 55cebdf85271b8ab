"""Runs in which parameters are frozen: the summary, what is saved and when, and what reads it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from training_runs import assert_same_models, read_rows, steps_only, train_and_print

import moezoo
from moezoo.config.build import blueprint_of
from moezoo.tools.sharding.describe import describe
from moezoo.training.checkpoint import Checkpoints, read_about, restore
from moezoo.training.exporting import plan_export
from moezoo.training.report import trained_rows

# Experts, the embedding, and one matrix of attention.
FROZEN = "frozen=['*.experts.*', .embedding.weight, '*.attention.out']"
FROZEN_NAMES = {"embedding/weight"} | {
    f"stacks/0/blocks/0/{name}"
    for name in ("attention/out", *(f"feed_forward/experts/{part}" for part in ("gate", "up", "down")))
}
ABOUT = {"versions": {"moezoo": "0"}, "config": {}, "loader": {}}
TREES = {"model": {"a": jnp.arange(3.0), "b": None}, "frozen": {"a": None, "b": jnp.arange(4.0)}}


@pytest.fixture(scope="module", autouse=True)
def _steps_only():
    with steps_only():
        yield


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Nine steps on eight devices with a save after the third and sixth, and the lines that were printed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    settings = ("mesh=fsdp2_ep4", "steps=9", "eval_every=0", "checkpoint_every=3", "checkpoint_keep=3")
    return train_and_print(*tiny, *settings, FROZEN, f"run_dir={folder}")


def test_the_summary_counts_both(whole):
    found = {line[:12].strip(): line[12:] for line in whole[1]}
    model = whole[0].model
    frozen = 32 * 32 + 2 * 4 * 8 * 32 + 2 * 3 * 8 * 32 * 16  # of 4 bytes
    assert found["frozen"].startswith(f"{frozen:,} parameters, {frozen * 4 / 1e3:.3g} kB: embedding, attention.out, ")
    assert found["frozen"].endswith("feed_forward.experts.{gate, up, down}")
    rest = sum(x.size for x in jax.tree.leaves(model)) - frozen
    assert found["trained"].startswith(f"{rest:,} parameters, {rest * 4 / 1e3:.3g} kB: ")
    assert "attention.{query, key, value}" in found["trained"]


def test_layers_that_differ_are_named_apart():
    """The same matrix is trained in one stack and frozen in the other. Where all is trained, there is no line."""
    words = ("trained=['.stacks[1].*.out', '*.kv_down']", "frozen=['*stacks[1]*.kv_down']")
    found = dict(trained_rows(blueprint_of(moezoo.compose("model=deepseek", *words))))
    assert found["trained"].endswith("B: stacks[0].blocks[0].attention.kv_down, stacks[1].blocks[0].attention.out")
    assert "stacks[1].blocks[0].attention.kv_down" in found["frozen"]
    assert "choice_bias" not in found["frozen"]
    assert trained_rows(blueprint_of(moezoo.compose("model=deepseek"))) == []


def test_moments_are_counted_for_what_is_trained(tiny):
    words = (*tiny, "mesh=fsdp2_ep4", FROZEN)
    rows = describe(moezoo.compose(*words)).parameters
    learns = sum(row.bytes_per_device for row in rows if row.trained)
    memory = {row.name: row.bytes_per_device for row in describe(moezoo.compose(*words)).memory}
    assert memory["gradients"] == learns < memory["parameters"] / 2
    assert memory["optimizer state"] == 2 * learns + 4


def test_frozen_arrays_are_saved_once(whole):
    """They are those of a fresh model, and no step's folder has them."""
    checkpoints = whole[0].folder / "checkpoints"
    arrays = json.loads((checkpoints / "6" / "about.json").read_text())["arrays"]
    assert set(arrays["frozen"]) == FROZEN_NAMES
    assert not FROZEN_NAMES & set(arrays["model"])
    assert not any(".".join(name.split("/")) in str(arrays["training"]) for name in FROZEN_NAMES)
    files = list((checkpoints / "frozen").rglob("*"))
    first_step = (checkpoints / "3").stat().st_mtime_ns
    assert all(file.stat().st_mtime_ns <= first_step for file in files if file.is_file())
    for step in ("3", "6", "9"):
        assert not (checkpoints / step / "frozen").exists()


def test_a_resumed_run_is_equal_to_the_bit_and_stands_alone(whole, tmp_path):
    """It goes on in another folder, which has the frozen arrays too: it is read where the first run is gone."""
    shutil.copytree(whole[0].folder, tmp_path / "a")
    again = moezoo.train(moezoo.compose(f"resume={tmp_path}/a/checkpoints/3", f"run_dir={tmp_path}/b"))
    assert read_rows(again.folder) == read_rows(whole[0].folder)
    assert_same_models(again.model, whole[0].model)
    shutil.rmtree(tmp_path / "a")
    assert_same_models(moezoo.load_run(again.folder)[0], whole[0].model)


def test_other_patterns_are_refused(whole):
    resume = (f"resume={whole[0].folder}", "steps=12")
    with refused(
        "frozen=[.embedding.weight] but the run at", "has frozen=[*.experts.*, .embedding.weight, *.attention"
    ):
        moezoo.train(moezoo.compose(*resume, "frozen=[.embedding.weight]"))
    with refused("trained=[*.query] but the run at", "has trained=null"):
        moezoo.train(moezoo.compose(*resume, "trained=['*.query']"))


def test_a_folder_of_the_run_has_both(whole, tmp_path):
    plan_export(str(whole[0].folder), str(tmp_path / "hub")).write()
    assert_same_models(moezoo.from_pretrained(tmp_path / "hub"), whole[0].model)


def test_a_pattern_passes_over_the_choice_bias():
    """Of the router, whose weight is trained, and of all that `*` matches."""
    for pattern in ("*router*", "*"):
        rows = describe(moezoo.compose("model=deepseek", f"trained=['{pattern}']"), parts="parameters").parameters
        fitting = {row.name for row in rows if "router" in row.name or pattern == "*"}
        (bias,) = (name for name in fitting if name.endswith("choice_bias"))
        assert {row.name for row in rows if row.trained} == fitting - {bias}


def save(folder: Path, *numbers: int) -> Checkpoints:
    """Save checkpoints of one set of arrays."""
    checkpoints = Checkpoints(folder, count=2, size=0)
    for number in numbers:
        checkpoints.save(number, TREES, ABOUT)
    checkpoints.close()
    return checkpoints


def load(folder: Path, step: int) -> Any:
    """Return the model of a checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here) for name, size in (("a", 3), ("b", 4))}
    return restore(folder, step, read_about(folder, step), model=target)["model"]


def test_a_killed_first_save_leaves_nothing_and_a_later_one_loses_nothing(tmp_path, monkeypatch):
    """A kill is tried before each renaming. A step has its name only when the frozen arrays have theirs."""
    rename, order = os.rename, []

    def kill(source: Any, target: Any) -> None:
        if Path(target).parent == folder and not Path(target).name.startswith("unfinished"):
            order.append(Path(target).name)
            if len(order) == dies:
                raise KeyboardInterrupt  # not one of the errors that a save handles
        rename(source, target)

    monkeypatch.setattr("threading.excepthook", lambda _: None)
    for dies, saved in ((1, ()), (2, ()), (3, (1,))):
        folder, order[:] = tmp_path / str(dies), []
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", kill)
            checkpoints = Checkpoints(folder, count=2, size=0)
            for number in range(1, 3 if dies == 3 else 2):
                checkpoints.save(number, TREES, ABOUT)
            checkpoints._join()
        assert [path.name for path in folder.glob("[0-9]*")] == [str(number) for number in saved]
        assert order == ["frozen", "1", "2"][:dies]
        for number in saved:
            np.testing.assert_array_equal(load(folder, number)["b"], TREES["frozen"]["b"])
        other = TREES | {"frozen": {"a": None, "b": TREES["frozen"]["b"] + 1}} if not saved else TREES
        later = Checkpoints(folder, count=2, size=0)  # what the killed run left is not taken for this run's
        later.save(5, other, ABOUT)
        later.close()
        np.testing.assert_array_equal(load(folder, 5)["b"], other["frozen"]["b"])


def test_damaged_missing_and_foreign_frozen_arrays_are_refused(tmp_path):
    folder = save(tmp_path / "a", 1, 2).folder
    (data,) = (folder / "frozen" / "d").iterdir()
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with refused(f"{folder}/frozen is damaged", data.name, "no older one is complete"):
        load(folder, 2)
    data.write_bytes(whole)
    assert load(folder, 2)["b"].shape == (4,)
    shutil.move(folder / "frozen", tmp_path / "kept")
    with refused(f"{folder}/2 needs the frozen arrays in {folder}/frozen, which is missing"):
        load(folder, 2)
    other = Checkpoints(tmp_path / "b", count=1, size=0)
    other.save(1, TREES | {"frozen": {"a": None, "b": jnp.ones(4)}}, ABOUT)
    other.close()
    shutil.copytree(other.folder / "frozen", folder / "frozen")
    with refused(f"{folder}/frozen has the frozen arrays of another run than {folder}/2"):
        load(folder, 2)
