"""Runs that train low-rank pairs beside the weights of a folder in few bits: what they save, and what reads it."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_bit_folders import CASES, write_few_bits
from refusals import refused
from training_runs import assert_same_models, read_rows, steps_only, train_and_print

import moezoo
from moezoo.hub.adapter_files import read_adapter
from moezoo.hub.tensors import arrays_by_path
from moezoo.hub.values import ModelValues
from moezoo.models.blueprint import Blueprint
from moezoo.nn.containers import as_arrays
from moezoo.parallel.low_rank import pairs_by_path, without_pairs
from moezoo.training.exporting import plan_export

STEPS = (
    "mesh.expert=2",
    "seq_len=16",
    "batch_size=4",
    "eval_every=0",
    "checkpoint_minutes=0",
    "log_every=1",
    "data=synthetic",
    "data.vocab=40",
    "data.documents=60",
    "data.eval_sequences=8",
    "schedule=constant",
    "optimizer.learning_rate=0.01",
    "checkpoint_every=1",
    "execution.param_dtype=stored",
)
LORA = (
    "adapter=lora",
    "adapter.rank=2",
    "adapter.alpha=3",
    "adapter.targets=[attention,experts]",
    "adapter.dropout=0.3",
)


@pytest.fixture(scope="module", autouse=True)
def _steps_only():
    with steps_only():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder of a DeepSeek in FP8."""
    root, case, rng = tmp_path_factory.mktemp("folders"), CASES["fp8"], np.random.default_rng(1)
    model = jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), Blueprint(case.config).shapes
    )
    moezoo.save_pretrained(model, root / "plain")
    few, *_ = write_few_bits(root / "plain", root, case)
    return few


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Any:
    """Two steps on two devices, and the lines that were printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train_and_print(*STEPS, *LORA, f"init_from={base}", "steps=2", f"run_dir={folder}")


def test_the_base_stays_and_is_in_no_checkpoint(run, base):
    """Its weights of few bits are those of the folder to the bit, and checkpoints hold pairs and moments only."""
    model, folder = run[0].model, run[0].folder
    stored = moezoo.from_pretrained(base, dtype="stored")
    # A run may cut pieces of scales smaller.
    for ours, theirs in zip(*(jax.tree.leaves(as_arrays(m)) for m in (without_pairs(model), stored)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    arrays = json.loads((folder / "checkpoints" / "2" / "about.json").read_text())["arrays"]
    assert arrays["model"]
    assert all(name.endswith(("/a", "/b", "choice_bias")) for name in arrays["model"])
    assert "frozen" not in arrays
    assert not (folder / "checkpoints" / "frozen").exists()
    pairs = [pair for _, pair in pairs_by_path(model)]
    assert all(np.asarray(pair.b).any() for pair in pairs)
    assert len([name for name in arrays["training"] if "/mu/" in name]) == 2 * len(pairs)


def test_the_summary_and_the_rate(run):
    found = {line[:12].strip(): line[12:] for line in run[1]}
    numbers = sum(pair.a.size + pair.b.size for _, pair in pairs_by_path(run[0].model))
    assert found["adapter"].startswith(f"rank 2, scale 1.5: {numbers:,} parameters, {numbers * 4 / 1e3:.3g} kB: ")
    drops = next(line for line in run[1] if "dropout 0.3 of what the pairs of attention.{" in line)
    assert drops.endswith("} read; those of feed_forward.experts.{gate, up, down} drop nothing")
    assert "trained" not in found
    assert any("adapter  the low-rank pairs" in line for line in run[1])


def test_the_rate_is_ten_times_that_of_whole_weights(base):
    words = [word for word in STEPS if "learning_rate" not in word]
    rates = [moezoo.compose(*words, *more, f"init_from={base}").optimizer.learning_rate for more in ((), LORA)]
    assert rates == [2e-5, 2e-4]


def test_the_folder_of_pairs_is_that_of_the_run(run, base):
    """Beside the base it is the model of the run."""
    model, folder = run[0].model, run[0].folder
    again = moezoo.from_pretrained(base, dtype="stored", adapter=folder / "adapter")
    for (path, ours), (other, theirs) in zip(*map(pairs_by_path, (model, again)), strict=True):
        assert (path, ours.scale) == (other, theirs.scale)
        np.testing.assert_array_equal(ours.a, theirs.a)
        np.testing.assert_array_equal(ours.b, theirs.b)


def test_a_merged_run_is_a_merged_folder(run, base, tmp_path):
    plan_export(str(run[0].folder), str(tmp_path / "run")).write()
    plan_export(str(base), str(tmp_path / "folder"), adapter=str(run[0].folder / "adapter")).write()
    merged = [arrays_by_path(moezoo.from_pretrained(tmp_path / name)) for name in ("run", "folder")]
    plain, pairs = arrays_by_path(moezoo.from_pretrained(base, dtype="float32")), pairs_by_path(run[0].model)
    for path in {*plain} - {path.lstrip(".") for path, _ in pairs}:
        np.testing.assert_array_equal(*(arrays[path] for arrays in merged))
    for path, pair in pairs:
        weight, *found = (np.asarray(arrays[path.lstrip(".")], np.float64) for arrays in (plain, *merged))
        first = pair.a.ndim - 1 - pair.inputs
        a = np.asarray(pair.a, np.float64).reshape(*pair.a.shape[:first], -1, 2)
        b = np.asarray(pair.b, np.float64).reshape(*pair.b.shape[: first + 1], -1)
        wanted = weight + 1.5 * (a @ b).reshape(weight.shape)
        for each in found:
            # bfloat16 rounds by 2^-9 of a number at most; sums in float32 of numbers up to 1 by 2^-24.
            np.testing.assert_allclose(each, wanted, rtol=2**-8, atol=1e-6)


def test_a_merged_run_has_the_dtype_of_its_base(tmp_path):
    """Parameters of the run are float32; `dtype` is as asked for."""
    model = Blueprint(CASES["fp8"].config, "bfloat16").shapes
    moezoo.save_pretrained(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model), tmp_path / "base")
    run = moezoo.train(
        moezoo.compose(
            *STEPS,
            *LORA,
            "execution.param_dtype=float32",
            f"init_from={tmp_path}/base",
            "steps=0",
            f"run_dir={tmp_path}/run",
        )
    )
    for dtype, wanted in ((None, "bfloat16"), ("float32", "float32")):
        plan_export(str(run.folder), str(tmp_path / wanted), dtype=dtype).write()
        assert json.loads((tmp_path / wanted / "config.json").read_text())["dtype"] == wanted


def change_last_byte(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\x01")


def test_a_resumed_run_is_equal_to_the_bit(run, base, tmp_path):
    """It reads the base where it is; without it, or with another, it is refused."""
    shutil.copytree(run[0].folder, tmp_path / "a")
    checkpoint = f"resume={tmp_path}/a/checkpoints/1"
    again = moezoo.train(moezoo.compose(checkpoint, f"run_dir={tmp_path}/b"))
    assert read_rows(again.folder) == read_rows(run[0].folder)
    assert_same_models(again.model, run[0].model)
    moved = shutil.copytree(base, tmp_path / "moved")
    change_last_byte(moved / "model.safetensors")
    with refused(f"init_from={moved} but the run began with", "which holds something else"):
        moezoo.compose(checkpoint, f"init_from={moved}")
    for words, parts in {
        "adapter.alpha=4": "adapter.alpha=4.0 but the run at|has adapter.alpha=3.0, which cannot change during a run",
        "adapter.rank=3": "adapter.rank=3 but the run at|has adapter.rank=2",
        "adapter=none": "adapter.name=none but the run at|has adapter.name=lora",
        "adapter.targets=[experts]": "adapter.targets=[experts] but the run at|has adapter.targets=[attention, ",
    }.items():
        with refused(*parts.split("|")):
            moezoo.train(moezoo.compose(checkpoint, words, f"run_dir={tmp_path}/c"))
    with refused("adapter.alpha=4.0 but", "was saved with adapter.alpha=3.0"):
        moezoo.load_run(run[0].folder, "adapter.alpha=4")


def test_a_run_starts_from_pairs(run, base, tmp_path):
    """Without steps it has them to the bit; of another rank, scale or other weights they are refused."""
    pairs = run[0].folder / "adapter"
    words = (*STEPS, *LORA, f"init_from={base}", f"adapter.init_from={pairs}")
    again = moezoo.train(moezoo.compose(*words, "steps=0", f"run_dir={tmp_path}/run"))
    assert_same_models(again.model, run[0].model)
    with refused("adapter.init_from=", "has rank 2 and scale 1.5, but", "ask for rank 3 and scale 1"):
        moezoo.train(moezoo.compose(*words, "adapter.rank=3", f"run_dir={tmp_path}/b"))
    with refused("adapter.init_from=", "attention.", "has rank 2 and scale 1.5, but", "ask for no pair"):
        moezoo.train(moezoo.compose(*words, "adapter.targets=[experts]", "adapter.dropout=0", f"run_dir={tmp_path}/b"))
    moved = shutil.copytree(base, tmp_path / "moved")
    change_last_byte(moved / "model.safetensors")
    with refused(f"adapter={pairs} was trained beside weights with sha256"):
        moezoo.train(moezoo.compose(*words, f"init_from={moved}", f"run_dir={tmp_path}/b"))


def test_a_run_with_an_adapter_is_no_base(run, tmp_path):
    with refused(f"init_from={run[0].folder} is a run with an adapter", "moezoo convert"):
        moezoo.compose(f"init_from={run[0].folder}")


def test_the_hash_of_the_base_is_in_the_folder(run, base):
    read = read_adapter(run[0].folder / "adapter", Blueprint(CASES["fp8"].config).shapes)
    assert read.base_sha256 == moezoo.saved_config(run[0].folder).init_sha256
    with refused("adapter=", "was trained beside weights with sha256", "and these have 00"):
        read.check_base(ModelValues({}), "00")
