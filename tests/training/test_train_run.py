"""A whole run: what it leaves, what it tells, and that nothing but its settings decides it."""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moezoo
from moezoo.config.compose import as_mapping, compose, to_yaml
from moezoo.moe.dispatch import Gather
from moezoo.optim import Cosine
from moezoo.training.metrics import read_metrics
from moezoo.training.train import _make_folder


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Twelve steps on eight devices, evaluated at step 8 and the end."""
    folder = tmp_path_factory.mktemp("runs") / "ep8"
    return moezoo.train(
        moezoo.compose(*tiny, "mesh=ep8", "steps=12", "eval_every=8", "checkpoint_every=5", f"run_dir={folder}")
    )


def numbers(rows):
    """Rows without the only figure that a clock decides."""
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def test_leaves_what_it_says(run):
    names = {p.name for p in run.folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "expert_load.png", "checkpoints"}
    for picture in ("loss.png", "expert_load.png"):
        assert (run.folder / picture).read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (run.folder / "checkpoints").iterdir()} == {"10", "12"}


def test_metrics_rows(run):
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history
    assert [row["step"] for row in rows] == list(range(1, 13))
    wanted = {"step", "loss", "load_balance_loss", "z_loss", "tokens_per_second", "grad_norm", "learning_rate"}
    wanted |= {"max_violation", "dropped", "skipped"}
    for row in rows:
        assert set(row) == wanted | ({"val_loss"} if row["step"] in (8, 12) else set())
    assert abs(rows[0]["loss"] - np.log(32)) < 0.1  # a fresh model knows nothing
    assert rows[-1]["val_loss"] < rows[0]["loss"] - 0.1
    assert rows[-1]["val_loss"] == run.evaluation.loss
    assert rows[0]["learning_rate"] == pytest.approx(0.005)  # half way through a warm-up of two steps
    assert rows[1]["learning_rate"] == pytest.approx(0.01)
    assert all(row["dropped"] == 0 for row in rows)


def test_sample_continues_the_prompt(run):
    assert len(run.sample.prompt.split()) == 4
    assert len(run.sample.continuation.split()) == 12


@pytest.mark.parametrize(
    "overrides",
    [("mesh=single", "dispatch=gather"), ("mesh=fsdp2_ep4", "dispatch=dense", "execution.remat=none")],
    ids=" ".join,
)
def test_mesh_and_dispatch_change_rounding_only(run, tiny, overrides):
    other = moezoo.train(moezoo.compose(*tiny, "steps=12", "eval_every=0", *overrides))
    for row, theirs in zip(run.history, other.history, strict=True):
        # Twelve steps of float32 rounding at a large learning rate, which the routing's jumps amplify.
        assert row["loss"] == pytest.approx(theirs["loss"], rel=1e-4), row["step"]
    assert other.evaluation.tokens == run.evaluation.tokens


def test_the_same_run_twice_is_bit_equal(run, tiny):
    again = moezoo.train(moezoo.compose(*tiny, "mesh=ep8", "steps=12", "eval_every=8"))
    assert numbers(again.history) == numbers(run.history)
    assert again.sample == run.sample
    for a, b in zip(jax.tree.leaves(run.model), jax.tree.leaves(again.model), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_resume_is_bit_equal(run, tiny, tmp_path):
    """Stopped after 10 of 12 steps and continued, in the folder of the first part."""
    common = (*tiny, "mesh=ep8", "eval_every=8", "execution.microbatches=1")
    first = moezoo.train(moezoo.compose(*common, "steps=10", "schedule=constant", f"run_dir={tmp_path}/a"))
    # The settings of the first part hold, so only what changes is said.
    both = moezoo.train(moezoo.compose("steps=12", f"resume={tmp_path}/a"))
    whole = moezoo.train(moezoo.compose(*common, "steps=12", "schedule=constant", f"run_dir={tmp_path}/b"))
    assert both.folder == first.folder
    # The first part ended with an evaluation that the whole run did not make.
    rows = [{k: v for k, v in row.items() if k != "val_loss"} for row in numbers(both.history)]
    assert rows == [{k: v for k, v in row.items() if k != "val_loss"} for row in numbers(whole.history)]
    for a, b in zip(jax.tree.leaves(both.model), jax.tree.leaves(whole.model), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_saved_run_evaluates_alike_on_any_mesh(run):
    for overrides in ([], ["mesh=single", "dispatch=gather"], ["mesh=fsdp4_ep2", "dispatch=dense"]):
        model, cfg = moezoo.load_run(run.folder, *overrides)
        result = moezoo.evaluate(model, cfg)
        assert result.tokens == run.evaluation.tokens
        assert result.loss == pytest.approx(run.evaluation.loss, rel=1e-6)


def test_model_is_called_on_a_mesh_or_on_none(run):
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) % 32
    cfg = moezoo.compose("mesh=ep8")
    split = run.model(tokens, execution=moezoo.Execution(moezoo.make_mesh(cfg.mesh), cfg.rules, Gather()))
    whole = moezoo.place(run.model, moezoo.Execution())(tokens)
    np.testing.assert_allclose(split.logits, whole.logits, atol=1e-5)  # logits are of order 1
    np.testing.assert_array_equal(split.routing.load, whole.routing.load)
    assert int(whole.routing.load.sum()) == 2 * 2 * 8 * 16


def test_bfloat16_compute_learns_too(tiny):
    cfg = moezoo.compose(*tiny, "mesh=fsdp2_ep4", "steps=12", "execution.dtype=bfloat16", "eval_every=0")
    run = moezoo.train(cfg)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.model))
    assert run.history[-1]["val_loss"] < run.history[0]["loss"] - 0.1


def test_context_parallel_run(run, tiny):
    """To its end, the sample at which no axis splits a sequence."""
    other = moezoo.train(moezoo.compose(*tiny, "mesh.context=2", "mesh.expert=4", "steps=12", "eval_every=0"))
    assert other.sample.prompt == run.sample.prompt
    assert other.evaluation.loss == pytest.approx(run.evaluation.loss, rel=1e-4)
    # The weights differ by rounding, a draw by far less than chance allows.
    pairs = list(zip(other.sample.continuation.split(), run.sample.continuation.split(), strict=True))
    assert sum(a == b for a, b in pairs) >= 10


def test_resume_tells_what_changed_and_refuses_another_run(run, tiny, tmp_path, capsys):
    first = moezoo.train(moezoo.compose(*tiny, "steps=2", "eval_every=0", f"run_dir={tmp_path}/a"))
    saved = (first.folder / "config.yaml").read_text()
    for changed in (
        "data.successors=2",
        "model.experts_per_token=1",
        "seed=7",
        "batch_size=4",
        "execution.microbatches=2",
        "data=python_stdlib",
    ):
        key = changed.replace("data=", "data.name=")
        with pytest.raises(moezoo.UserError, match=f"^{key} but the run at resume="):
            moezoo.train(moezoo.compose(f"resume={first.folder}", "steps=4", changed))
    assert (first.folder / "config.yaml").read_text() == saved
    capsys.readouterr()
    moezoo.train(moezoo.compose(f"resume={first.folder}", "steps=4", "mesh=ep8", "optimizer.learning_rate=0.02"))
    out = capsys.readouterr().out
    lines = [line.removeprefix("changed").strip() for line in out.splitlines()]
    assert "optimizer.learning_rate: 0.01 before, 0.02 now" in lines
    assert "steps: 2 before, 4 now" in lines
    assert "mesh.expert: 1 before, 8 now" in lines


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        moezoo.UserError, match=r"^run_dir=.*file/x: cannot write there \(Not a directory\); name anoth"
    ):
        moezoo.train(moezoo.compose(*tiny, "steps=2", f"run_dir={tmp_path}/file/x"))


def test_a_run_without_a_checkpoint_is_not_offered_to_resume(tiny, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(compose(*tiny))))
    with pytest.raises(
        moezoo.UserError, match=r"already holds a run; name another folder, or remove it, as it saved no checkpoint$"
    ):
        moezoo.train(moezoo.compose(*tiny, "steps=2", f"run_dir={tmp_path}"))
    with pytest.raises(moezoo.UserError, match="no checkpoint there"):
        moezoo.train(moezoo.compose(*tiny, "steps=2", f"resume={tmp_path}"))


def test_another_model_than_the_configuration_says_is_not_evaluated(run, tiny):
    with pytest.raises(moezoo.UserError, match=r"^evaluate: the model's arrays are not those of"):
        moezoo.evaluate(run.model, moezoo.compose(*tiny, "model.layers=1"))


def test_tokens_are_whole_numbers_in_rows(run):
    model = moezoo.place(run.model, moezoo.Execution())
    call = inspect.unwrap(type(model).__call__)  # the tests' own type checker would speak first
    with pytest.raises(moezoo.UserError, match=r"^tokens are int32\[16\], expected integers \[batch, seq\]; for one"):
        call(model, np.zeros(16, np.int32))
    with pytest.raises(moezoo.UserError, match=r"^tokens are float32\[2, 16\]"):
        call(model, np.zeros((2, 16), np.float32))


def test_warm_up_is_a_tenth_of_the_run_unless_said(tiny):
    rates = [float(Cosine().rate(1.0, jnp.int32(i), 40)) for i in range(40)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1, 1], atol=1e-6)
    assert rates[-1] == pytest.approx(0.1)
    assert sorted(rates[3:], reverse=True) == rates[3:]


def test_resume_refuses_other_data(tiny, tmp_path):
    """The place in the data that a checkpoint holds would mean nothing."""
    (tmp_path / "a.txt").write_text("one two three four " * 200)
    small = [o for o in tiny if not o.startswith("data")]
    settings = (*small, "data=text", f"data.path={tmp_path}/a.txt", "data.eval_sequences=4", "model.vocab=256")
    run = moezoo.train(moezoo.compose(*settings, "steps=2", f"run_dir={tmp_path}/run"))
    moezoo.train(moezoo.compose(f"resume={run.folder}", "steps=3"))
    (tmp_path / "a.txt").write_text("another text " * 200)
    with pytest.raises(moezoo.UserError, match=r"was trained on data with sha256 \w+ and this is \w+; give"):
        moezoo.train(moezoo.compose(f"resume={run.folder}", "steps=4"))


def test_runs_of_one_second_have_folders_of_their_own(tiny, monkeypatch):
    folders = [_make_folder(Path("runs/now"), moezoo.compose(*tiny)) for _ in range(3)]
    assert folders == [Path("runs/now"), Path("runs/now_2"), Path("runs/now_3")]


def test_a_torn_row_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"ste\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path, until=9)] == [1, 2]
    assert [row["step"] for row in read_metrics(path, until=1)] == [1]
