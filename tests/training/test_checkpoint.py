"""The arrays of a checkpoint against those that a model has, and in every layout that a run may continue in."""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from refusals import refused

import moezoo
from moezoo.config.overrides import groups
from moezoo.config.run_folders import steps
from moezoo.training import checkpoint
from moezoo.training.build import build_step
from moezoo.training.checkpoint import Checkpoints, read_about, restore

SAVED = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}


def test_arrays_of_another_model_are_refused_by_name(tmp_path):
    """Orbax would cast, or fail without the name of the array."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    checkpoints.save(1, {"model": SAVED}, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
    checkpoints.close()
    about = read_about(checkpoints.folder, 1)

    def load(**arrays):
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in arrays.items()}
        return restore(checkpoints.folder, 1, about, model=target)["model"]

    jax.tree.map(np.testing.assert_array_equal, load(**SAVED), SAVED)
    half, turned = SAVED["b"].astype(jnp.bfloat16), SAVED["a"].T
    for arrays, parts in (
        ({"a": SAVED["a"], "b": half}, ("checkpoint at step 1: b is float32[4]", "bfloat16[4]", "settings")),
        ({"a": turned, "b": SAVED["b"]}, ("checkpoint at step 1: a is float32[2, 3]", "float32[3, 2]")),
        ({"a": SAVED["a"]}, ("checkpoint at step 1: array b exists only in the checkpoint",)),
        ({**SAVED, "c": half}, ("checkpoint at step 1: array c exists only in this model",)),
    ):
        with refused(*parts):
            load(**arrays)


def test_a_checkpoint_gets_its_name_when_it_is_complete(tmp_path, monkeypatch):
    """A kill at the moment of the renaming, before or after it, leaves no folder of a step without checksums."""
    rename, found = os.rename, []

    def look(source, target):
        if Path(target).name == "1":
            found.append((checkpoint._hash_files(Path(source)), json.loads((Path(source) / "sha256.json").read_text())))
        rename(source, target)

    monkeypatch.setattr(os, "rename", look)
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    checkpoints.save(1, {"model": SAVED}, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
    checkpoints.close()
    ((files, sums),) = found
    assert files == sums
    assert "about.json" in sums


def test_python_reports_everything_again_after_the_last_checkpoint(tmp_path, monkeypatch):
    """What a failed write leaves is not reported while checkpoints are written, and after a failure."""
    before = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", before)  # so that it is that again after the test
    for fails in (False, True):
        checkpoints = Checkpoints(tmp_path / f"{fails}", count=1, size=0)
        assert sys.unraisablehook is not before
        if fails:
            checkpoints.folder.rmdir()
        checkpoints.save(1, {"model": SAVED}, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
        with refused(f"{checkpoints.folder}: ", "was removed") if fails else contextlib.nullcontext():
            checkpoints.wait()
        checkpoints.close()
        assert (sys.unraisablehook is before) is not fails


def test_only_whole_numbers_as_moezoo_writes_them_are_steps(tmp_path):
    for name in ("7", "007", "12", "-3", "unfinished.9", "٣"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").touch()
    assert steps(tmp_path) == [7, 12]


# The rule sets on eight devices, under which states are saved and loaded.
MESHES = dict.fromkeys(groups()["rules"], "mesh.fsdp=2 mesh.expert=4") | {"pure_fsdp": "mesh.fsdp=8"}
MESHES |= dict.fromkeys(("tensor", "serve"), "mesh.fsdp=2 mesh.expert=2 mesh.tensor=2")
MESHES |= dict.fromkeys(("fsdp_ep", "shard_exp_on_fsdp", "cp_as_ep"), "mesh.fsdp=2 mesh.expert=2 mesh.context=2")
TINY = "model.vocab=40 model.embed=16 model.layers=1 model.dense_layers=0 model.heads=4 model.q_lora=24 model.kv_lora=8"
TINY += " model.nope_dim=6 model.rope_dim=4 model.value_dim=5 model.mlp=20 model.expert_mlp=12 model.experts=8"
TINY += " model.tied_embeddings=true"


def shapes(rules: str, mesh: str) -> dict[str, Any]:
    """Return the model of a tiny DeepSeek, and what a run saves beside it by optimizer, as shapes in their layouts."""
    settings = (*TINY.split(), "batch_size=8", "seq_len=8", f"rules={rules}", *mesh.split())
    found: dict[str, Any] = {}
    cfg = moezoo.compose("model=deepseek", *settings)
    for optimizer in groups()["optimizer"]:
        cfg = dataclasses.replace(cfg, optimizer=moezoo.compose(f"optimizer={optimizer}").optimizer)
        model, *found[optimizer] = build_step(cfg, moezoo.execution(cfg)).arguments[0]
        found["model"] = model
    return found


def test_a_checkpoint_of_any_layout_loads_in_others(tmp_path):
    """Every array, with moments and experts, is equal to the bit on every device. Its numbers are all different.

    Each checkpoint is loaded under another layout, in turn, so that each layout is loaded from another one.
    """
    rng = np.random.default_rng(0)
    layouts = {rules: shapes(rules, mesh) for rules, mesh in MESHES.items()}
    first = layouts["fsdp_ep"]
    assert {"model", "adamw", "muon", "sgd"} <= set(first)
    values = jax.tree.map(lambda x: rng.permutation(x.size).reshape(x.shape).astype(x.dtype), first)
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=len(MESHES), size=0)
    for number, target in enumerate(layouts.values(), start=1):
        trees = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), values, target)
        checkpoints.save(number, trees, {"versions": {"moezoo": "0"}, "config": {}, "loader": {}})
    checkpoints.close()
    layouts["another mesh"] = shapes("shard_exp_on_fsdp", "mesh.fsdp=2 mesh.expert=2")
    names = [*layouts, *list(layouts)[:1]]
    for number, other in enumerate(MESHES, start=1):
        about = read_about(checkpoints.folder, number)
        for layout in names[number:] if number == len(MESHES) else [names[number]]:
            target = layouts[layout]
            saved = restore(checkpoints.folder, number, about, **target)
            found = jax.tree_util.tree_leaves_with_path(saved)
            for (path, x), like, wanted in zip(found, jax.tree.leaves(target), jax.tree.leaves(values), strict=True):
                assert x.sharding == like.sharding
                for shard in x.addressable_shards:
                    where = f"{jax.tree_util.keystr(path)}, saved under {other}, loaded under {layout}"
                    np.testing.assert_array_equal(shard.data, wanted[shard.index], where)
