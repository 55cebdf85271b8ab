"""Low-rank adapters on the command line: a run leaves one, and commands put it beside a folder or merge it."""

import re

import jax
import numpy as np
import pytest
from refusals import refused
from training_runs import steps_only

import moezoo
from moezoo.cli import evaluate, train
from moezoo.cli.generate import continuations
from moezoo.models import MixtralConfig, build_model
from moezoo.nn.containers import as_arrays

TEXT = ("data=synthetic", "data.vocab=32", "data.documents=40", "seq_len=16", "data.eval_sequences=8")
ASKED = ("prompt=3 1 4", "max_new_tokens=6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = MixtralConfig(
        vocab=32, embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, expert_mlp=8, max_length=64, z_loss=0.0
    )
    path = tmp_path_factory.mktemp("hub") / "model"
    moezoo.save_pretrained(build_model(config, key=jax.random.key(0)), path)
    return path


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """The folder of a run that trains pairs of gates alone, and the lines that it prints."""
    path = tmp_path_factory.mktemp("runs") / "one"
    words = (f"init_from={folder}", "adapter=lora", "adapter.rank=2", "adapter.alpha=64", "steps=2", "eval_every=0")
    words += ("adapter.targets=['*.experts.gate', attention]", "mesh.expert=2", "optimizer.learning_rate=1.0")
    with pytest.MonkeyPatch.context() as patch, steps_only():
        lines: list[str] = []
        patch.setattr("moezoo.training.report.print_lines", lambda rows: lines.extend(": ".join(row) for row in rows))
        train.main([*TEXT, *words, f"run_dir={path}"])
    return path, lines


def test_a_run_leaves_an_adapter(folder, run):
    """It is the run's model beside the folder's, for the folder alone; what PEFT does not read is in the summary."""
    path, lines = run
    found = moezoo.from_pretrained(folder, adapter=path / "adapter")
    wanted = moezoo.load_run(path)[0]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [
        line for line in lines if re.match("adapter: PEFT .* does not read .* w1 and w3 .* only w1 has pairs", line)
    ]
    assert next(line for line in lines if line.startswith("adapter: rank 2, scale 32"))


def test_an_adapter_is_for_a_folder(run):
    """A run's weights are not those that it was trained beside."""
    with refused("adapter=there: a run has its own weights and pairs", "folder=FOLDER"):
        continuations([f"run_dir={run[0]}", "adapter=there", *ASKED])


def test_generate_and_evaluate_with_an_adapter(folder, run, capsys):
    path, _ = run
    beside = [f"folder={folder}", f"adapter={path}/adapter"]
    texts = [continuations([*names, *ASKED]) for names in (beside, [*beside, "mesh=ep8"], [f"run_dir={path}"])]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != continuations([f"folder={folder}", *ASKED])

    few = (*TEXT, "data.documents=4", "dispatch=gather", "split=all")
    losses = []
    for names in (beside, beside[:1]):
        capsys.readouterr()
        evaluate.main([*names, *few])
        losses.append(float(capsys.readouterr().out.split()[1]))
    merged, cfg = as_arrays(moezoo.from_pretrained(folder, adapter=path / "adapter")), evaluate.configure(*beside, *few)
    assert losses[0] == pytest.approx(moezoo.evaluate(merged, cfg, split="all").loss, abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_convert_merges(folder, run, tmp_path, console):
    """A folder with the run's adapter is what the run itself becomes."""
    path, _ = run
    code, out, err = console("convert", str(folder), "merged", f"adapter={path}/adapter")
    assert (code, err) == (0, "")
    assert re.search(rf"^adapter     {path}/adapter: 12 low-rank pairs of rank 2, merged$", out, re.MULTILINE)
    assert console("convert", str(path), "of_run")[0] == 0
    names = [tmp_path / name / "model.safetensors" for name in ("merged", "of_run")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert continuations(["folder=merged", *ASKED]) == continuations(
        [f"folder={folder}", f"adapter={path}/adapter", *ASKED]
    )
    code, _, err = console("convert", str(path), "again", f"adapter={path}/adapter")
    assert (code, err.count("\n")) == (2, 1)
    assert f"adapter={path}/adapter: {path} is a run; name the folder that it began with" in err


def test_an_adapter_of_another_folder_is_refused(folder, run, tmp_path, console):
    path, _ = run
    moezoo.save_pretrained(moezoo.from_pretrained(folder, dtype="bfloat16"), tmp_path / "other")
    with refused(f"adapter={path}/adapter was trained beside weights with sha256 "):
        continuations(["folder=other", f"adapter={path}/adapter", *ASKED])
    code, _, err = console("convert", "other", "new", f"adapter={path}/adapter")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "new").exists()
    with refused("adapter=none: there is no such folder"):
        continuations([f"folder={folder}", "adapter=none", *ASKED])
