"""A whole run: the files it writes, what it prints, and that only its settings decide its numbers."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from training_runs import assert_same_models, read_rows, repeatable, steps_only, train_and_print

import moezoo
from moezoo.config.build import build_execution
from moezoo.config.compose import as_mapping, compose, to_yaml
from moezoo.config.run_folders import steps
from moezoo.data import load
from moezoo.data.epochs import make_epochs
from moezoo.moe.dispatch import Gather
from moezoo.optim import Constant, Cosine
from moezoo.training.build import build_state, build_step
from moezoo.training.checkpoint import Checkpoints
from moezoo.training.files import making
from moezoo.training.loop import Loop
from moezoo.training.metrics import MEASURED, MetricsLog, read_metrics
from moezoo.training.saved import loader_state, read_batch_count
from moezoo.training.signals import Signals


@pytest.fixture(scope="module")
def printed(tiny, tmp_path_factory):
    """Twelve steps on eight devices, evaluated at step 8 and at the end; and what they print."""
    folder = tmp_path_factory.mktemp("runs") / "ep8"
    settings = ("mesh=ep8", "steps=12", "eval_every=8", "checkpoint_every=5", f"run_dir={folder}")
    return train_and_print(*tiny, *settings)


@pytest.fixture(scope="module")
def run(printed):
    """The run alone."""
    return printed[0]


def summary_of(lines):
    """The lines before the first step; they fit on a screen, next to the parts of an optimiser that has several."""
    summary = lines[: next(i for i, line in enumerate(lines) if line.startswith("step "))]
    parts = [line for line in summary if "muon updates " in line or "adamw updates " in line]
    others = [line for line in summary if line not in parts]
    assert len(others) <= 24
    assert max(map(len, others)) <= 100
    return summary


def test_writes_its_files(run):
    names = {p.name for p in run.folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "routing.png", "expert_load.png", "checkpoints"}
    for picture in ("loss.png", "routing.png", "expert_load.png"):
        assert (run.folder / picture).read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (run.folder / "checkpoints").iterdir()} == {"10", "12"}


def test_summary(run, printed):
    """Each line has a title; compilation is announced before it starts, and timed."""
    summary = {line[:12].strip(): line[12:] for line in summary_of(printed[1])}
    wanted = "model mesh rules weights dispatch optimizer kernels memory traffic precision data training validation"
    assert wanted.split() == [title for title in summary if title][:13]
    assert summary["kernels"].endswith(": blocked (cpu)")
    assert "activations" in summary["memory"]
    assert "per device and step" in next(line for line in printed[1] if line.startswith("traffic"))
    assert "12 steps x 8 sequences x 16 tokens = 1,536 tokens" in summary["steps"]
    assert "every 5 steps, at best validations and at the end; the newest 2 and the best are" in summary["checkpoint"]
    assert summary["run_dir"] == str(run.folder)
    compiling = next(i for i, line in enumerate(printed[1]) if line.startswith("compile"))
    assert printed[1][compiling + 1].strip().startswith("done in ")
    assert printed[1][compiling + 2].startswith("step 1/12  loss ")


def test_metrics_rows(run):
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history
    assert [row["step"] for row in rows] == list(range(1, 13))
    wanted = {"step", "loss", "load_balance_loss", "z_loss", "tokens_per_second", "grad_norm", "learning_rate"}
    wanted |= {"mean_entropy", "lowest_entropy", "mean_violation", "max_violation", "experts_in_use"}
    wanted |= {"dropped", "skipped", *MEASURED}
    for row in rows:
        assert set(row) == wanted | ({"val_loss"} if row["step"] in (8, 12) else set())
    # A fresh model predicts nearly a uniform distribution: logits of deviation 0.5 add half its square.
    assert abs(rows[0]["loss"] - np.log(32) - 0.12) < 0.1
    assert rows[-1]["val_loss"] < rows[0]["loss"] - 0.1
    assert rows[-1]["val_loss"] == run.evaluation.loss
    assert rows[0]["learning_rate"] == pytest.approx(0.005)  # half of the warm-up of two steps
    assert rows[1]["learning_rate"] == pytest.approx(0.01)
    assert all(row["dropped"] == 0 for row in rows)
    assert all(0 < row["lowest_entropy"] <= row["mean_entropy"] <= 1 for row in rows)
    assert all(0 < row["mean_violation"] <= row["max_violation"] for row in rows)
    assert all(0 < row["experts_in_use"] <= 1 for row in rows)


def test_progress_shows_how_evenly_experts_are_used(run, printed):
    line = next(line for line in printed[1] if line.startswith("step 12/12"))
    row = run.history[-1]
    assert f"  entropy {row['mean_entropy']:.2f}/{row['lowest_entropy']:.2f}  " in line
    assert f"  violation {row['mean_violation']:.2f}/{row['max_violation']:.2f}  " in line
    assert f"  used {int(100 * row['experts_in_use'])}%  " in line


def test_sample_continues_the_prompt(run):
    assert len(run.sample.prompt.split()) == 4
    assert len(run.sample.continuation.split()) == 12


def assert_same_but_for_rounding(rows, wanted):
    """The rows report the same losses."""
    for row, theirs in zip(rows, wanted, strict=True):
        # Twelve steps of float32 rounding at a large learning rate, which jumps of the routing amplify.
        assert row["loss"] == pytest.approx(theirs["loss"], rel=1e-4), row["step"]


def test_mesh_dispatch_and_remat_change_rounding_only(run, tiny, tmp_path):
    """One device; then a mesh that splits each sequence, except in the sample, where other weights move.

    The latter also continues the run of the other mesh. Data, validation and sample do not depend on its order of
    tokens.
    """
    split = ("mesh.context=2", "mesh.expert=4", "dispatch=dense", "execution.remat=none")
    split = (*split, "execution.context_parallel=ring", "execution.sequence_order=balanced")
    for overrides in (("mesh=single", "dispatch=gather"), split):
        with contextlib.nullcontext() if overrides is split else steps_only():
            other = moezoo.train(moezoo.compose(*tiny, "steps=12", "eval_every=0", *overrides))
        assert_same_but_for_rounding(run.history, other.history)
        assert other.evaluation.tokens == run.evaluation.tokens
        assert other.evaluation.loss == pytest.approx(run.evaluation.loss, rel=1e-4)
    assert other.sample.prompt == run.sample.prompt
    # The weights differ by rounding, so nearly all random draws agree.
    pairs = list(zip(other.sample.continuation.split(), run.sample.continuation.split(), strict=True))
    assert sum(a == b for a, b in pairs) >= 10
    resume = (f"resume={run.folder}/checkpoints/10", f"run_dir={tmp_path}/split")
    with steps_only():
        continued = moezoo.train(moezoo.compose(*resume, *split))
    assert_same_but_for_rounding(continued.history, run.history)
    assert continued.evaluation.loss == pytest.approx(run.evaluation.loss, rel=1e-4)


def test_repeated_in_two_parts_it_is_bit_equal(run, tiny, tmp_path, capsys):
    """Ten steps to their end, then more in the same folder; only what changes is set, and it is printed."""
    common = (*tiny, "mesh=ep8", "eval_every=8")
    first = moezoo.train(moezoo.compose(*common, "steps=10", f"run_dir={tmp_path}/a"))
    capsys.readouterr()
    both = moezoo.train(moezoo.compose("steps=12", "checkpoint_every=1", f"resume={tmp_path}/a"))
    lines = [line.removeprefix("changed").strip() for line in capsys.readouterr().out.splitlines()]
    assert {"steps: 10 before, 12 now", "checkpoint_every: 0 before, 1 now"} <= set(lines)
    assert both.folder == first.folder
    # The first part ended with an evaluation that the whole run did not make.
    rows, wanted = (
        [{k: v for k, v in row.items() if k != "val_loss"} for row in repeatable(one.history)] for one in (both, run)
    )
    assert rows == wanted
    assert read_rows(both.folder) == repeatable(both.history)
    assert_same_models(both.model, run.model)
    assert both.sample == run.sample


def test_saves_by_the_clock_change_no_numbers(run, tiny, tmp_path, monkeypatch):
    """With a clock that advances by a minute per look; slow saves are 20 times as far apart as they take."""
    overrides = ("mesh=ep8", "steps=8", "eval_every=8", "checkpoint_minutes=2.5")
    cfg = moezoo.compose(*tiny, *overrides)
    execution = build_execution(cfg)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=cfg.model.vocab)
    step = build_step(cfg, execution)
    feed = step.feed()
    epochs = make_epochs(source, seq_len=cfg.seq_len, seed=cfg.seed)
    for save_seconds, saved in ((0, [3, 6, 8]), (10, [4, 8])):
        seconds = property(lambda self, taken=save_seconds: taken, lambda self, value: None)
        monkeypatch.setattr(Checkpoints, "seconds", seconds, False)
        log, checkpoints = MetricsLog(None, []), Checkpoints(tmp_path / str(save_seconds), 9, size=0)
        minutes = map(float, itertools.count(step=60))
        loop = Loop(cfg, execution, step, source, epochs, [log], checkpoints, feed, clock=minutes.__next__)
        batches = epochs.batches(cfg.batch_size, feed.rows, 0, None)
        loop.train(build_state(cfg, execution, step), batches, 0, Signals())
        checkpoints.close()
        assert steps(checkpoints.folder) == saved
        assert repeatable(log.history) == repeatable(run.history[:8])


def test_a_save_is_timed(tmp_path):
    """The loop spaces saves by how long the last one took."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    assert checkpoints.seconds == 0
    state = {"model": {"x": jnp.zeros(2)}, "training": {"y": jnp.zeros(2)}}
    checkpoints.save(1, state, {"versions": {}, "config": {}, "loader": {}})
    checkpoints.close()
    assert checkpoints.seconds > 0


@pytest.mark.weekly
def test_a_saved_run_evaluates_alike_on_any_mesh(run):
    for overrides in ([], ["mesh=single", "dispatch=gather"], ["mesh=fsdp4_ep2", "dispatch=dense"]):
        model, cfg = moezoo.load_run(run.folder, *overrides)
        result = moezoo.evaluate(model, cfg)
        assert result.tokens == run.evaluation.tokens
        assert result.loss == pytest.approx(run.evaluation.loss, rel=1e-6)


def test_model_is_called_on_a_mesh_or_on_none(run):
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) % 32
    cfg = moezoo.compose("mesh=ep8")
    execution = moezoo.Execution(moezoo.make_mesh(cfg.mesh), cfg.rules, Gather())
    split = run.model(tokens, execution=execution)  # not inside `jit`, as a user may call it
    whole = moezoo.place(run.model, moezoo.Execution())(tokens)
    np.testing.assert_allclose(split.logits, whole.logits, atol=1e-5)  # logits are of order 1
    np.testing.assert_array_equal(split.routing.load, whole.routing.load)
    assert int(whole.routing.load.sum()) == 2 * 2 * 8 * 16


@pytest.mark.weekly
def test_bfloat16_compute_learns_too(tiny):
    cfg = moezoo.compose(*tiny, "mesh=fsdp2_ep4", "steps=12", "execution.dtype=bfloat16", "eval_every=0")
    with steps_only():
        run = moezoo.train(cfg)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.model))
    assert run.history[-1]["val_loss"] < run.history[0]["loss"] - 0.1


def test_deepseek_learns_and_resumes_to_the_bit(tiny_deepseek, tmp_path):
    """The choice bias is moved by counts of all micro-steps, saved and loaded; data are read by micro-batches.

    Muon's state has momenta of matrices and both moments of AdamW.

    The resumed part evaluates at step 10 too: an evaluation moves neither the bias nor anything else.
    """
    settings = ("optimizer=muon", "steps=12", "eval_every=0", "checkpoint_every=9", f"run_dir={tmp_path}/a")
    with steps_only():
        run, lines = train_and_print(*tiny_deepseek, *settings)
    first, second = (line[12:] for line in summary_of(lines) if " updates " in line)
    assert re.fullmatch(r"adamw updates embedding, .*\.router, .* \(each number moves by [^;]+\)", first)
    takes = r"; \S+ GFLOP of work, \S+ kB received per device and step\)"
    assert re.fullmatch(r"muon updates attention.*experts\.{gate, up, down}.* \(each matrix .*" + takes, second)
    assert run.history[-1]["val_loss"] < run.history[0]["loss"] - 0.1
    assert_same_models(moezoo.load_run(run.folder)[0], run.model)
    assert np.asarray(run.model.stacks[1].blocks[0].feed_forward.router.choice_bias).any()  # type: ignore[attr-defined]
    resume = (f"resume={tmp_path}/a/checkpoints/9", f"run_dir={tmp_path}/b")
    with steps_only():
        again = moezoo.train(moezoo.compose(*resume, "eval_every=2"))
    rows, wanted = read_rows(again.folder), read_rows(run.folder)
    assert rows[9].pop("val_loss") > 0
    assert rows == wanted
    assert_same_models(again.model, run.model)


def test_drops_are_reported_and_evaluation_drops_nothing(tiny_text, tmp_path):
    """On a folder of text, whose held-out files are listed in a file."""
    for i in range(40):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} " * 20)
    data = (*tiny_text, f"data.path={tmp_path}/texts")
    chosen = ("mesh=fsdp2_ep4", "dispatch=capacity", "dispatch.capacity_factor=0.5", "steps=2", "eval_every=0")
    with steps_only():
        run, lines = train_and_print(*data, *chosen)
    assignments = 2 * 8 * 16 * 2  # layers, sequences, tokens, experts per token
    for row in run.history:
        assert row["dropped"] == sum(row["dropped_by_layer"]) > 0
        assert len(row["dropped_by_layer"]) == 2
        part = f"step {row['step']}/2  loss {row['loss']:.4f}  dropped {row['dropped'] / assignments:.1%}"
        assert any(line.startswith(part) for line in lines)
    first = run.history[0]
    (warning,) = [line for line in lines if line.startswith("warning:")]
    for part in (
        f"step 1 dropped {first['dropped']} of {assignments} assignments",
        " ".join(map(str, first["dropped_by_layer"])),
        "dispatch.capacity_factor",
    ):
        assert part in warning
    assert run.evaluation.dropped == 0
    cfg = moezoo.compose(*data, "mesh=fsdp2_ep4", "dispatch=ring")
    assert run.evaluation.loss == pytest.approx(moezoo.evaluate(run.model, cfg).loss, rel=1e-6)

    source = load(cfg.data, seq_len=16, seed=0, vocab=256)
    listed = (run.folder / "held_out.txt").read_text().splitlines()
    assert listed == list(source.held_out)
    assert len(listed) == source.validation.documents > 0
    line = next(line for line in lines if line.startswith("validation"))
    assert f"in {len(listed)} document" in line
    assert line.endswith("held_out.txt")


def test_a_changed_model_or_data_is_refused(run, tiny_text, tmp_path):
    saved = (run.folder / "config.yaml").read_text()
    for changed in (
        "data.successors=2",
        "model.experts_per_token=1",
        "seed=7",
        "batch_size=4",
        "seq_len=8",
        "execution.microbatches=2",
        "data=python_stdlib",
    ):
        key = changed.replace("data=", "data.name=")
        with pytest.raises(moezoo.UserError, match=f"^{key} but the run at resume="):
            moezoo.train(moezoo.compose(f"resume={run.folder}", "steps=14", changed))
    assert (run.folder / "config.yaml").read_text() == saved

    # The position in the data that a checkpoint holds is meaningless for other data.
    (tmp_path / "a.txt").write_text("one two three four " * 200)
    cfg = moezoo.compose(*tiny_text, f"data.path={tmp_path}/a.txt")
    state = loader_state(7, load(cfg.data, seq_len=16, seed=0, vocab=256), {})
    assert read_batch_count(state, load(cfg.data, seq_len=16, seed=0, vocab=256), cfg) == 7
    (tmp_path / "a.txt").write_text("another text " * 200)
    with pytest.raises(moezoo.UserError, match=r"was trained on data with sha256 \w+, and this data has \w+; use"):
        read_batch_count(state, load(cfg.data, seq_len=16, seed=0, vocab=256), cfg)

    # Two files that become one have the same ids, but other documents.
    (tmp_path / "b").mkdir()
    for number, text in enumerate(("one two " * 200, "three four " * 200)):
        (tmp_path / f"b/{number}.txt").write_text(text)
    cfg = moezoo.compose(*tiny_text, f"data.path={tmp_path}/b")
    state = loader_state(7, load(cfg.data, seq_len=16, seed=0, vocab=256), {})
    (tmp_path / "b/0.txt").write_text("one two " * 199)
    (tmp_path / "b/1.txt").write_text("one two " + "three four " * 200)
    with pytest.raises(moezoo.UserError, match=r"was trained on documents with hash \w+, and this data has \w+; use"):
        read_batch_count(state, load(cfg.data, seq_len=16, seed=0, vocab=256), cfg)


def test_places_of_all_processes_are_saved(tiny, monkeypatch):
    source = load(moezoo.compose(*tiny).data, seq_len=16, seed=0, vocab=32)
    assert "places" not in loader_state(7, source, {})
    others = '{"1": {"rows": 5}, "10": {"rows": 6}}'
    monkeypatch.setattr("moezoo.training.saved.distributed.gather_texts", lambda own: [others, own])
    assert loader_state(7, source, {}, {2: {"rows": 4}, 0: {"rows": 3}})["places"] == [
        {"rows": n} for n in (3, 5, 4, 6)
    ]


def test_a_folder_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    """It is refused before the set-up: below a file, and on a file system that takes no files."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("moezoo.training.train.build_execution", lambda cfg: pytest.fail("the set-up began"))
    for folder in (tmp_path / "file" / "x", "/proc/x", "/proc/self"):
        with refused(f"run_dir={folder}: cannot write there (", "name another"):
            moezoo.train(moezoo.compose(*tiny, "mesh=ep8", "steps=2", f"run_dir={folder}"))


def test_a_run_without_a_checkpoint_is_not_offered_to_resume(tiny, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(compose(*tiny))))
    with pytest.raises(moezoo.UserError, match=r"already holds a run; .*remove config.yaml there"):
        moezoo.train(moezoo.compose(*tiny, "steps=2", f"run_dir={tmp_path}"))
    with pytest.raises(moezoo.UserError, match="no checkpoint there"):
        moezoo.train(moezoo.compose(*tiny, "steps=2", f"resume={tmp_path}"))


def test_another_model_than_that_of_the_configuration_is_not_evaluated(run, tiny):
    with pytest.raises(moezoo.UserError, match=r"^evaluate: .*model.layers=2 in the model, 1 in cfg"):
        moezoo.evaluate(run.model, moezoo.compose(*tiny, "model.layers=1"))


def test_tokens_are_integers_in_rows(run):
    model = moezoo.place(run.model, moezoo.Execution())
    call = inspect.unwrap(type(model).__call__)  # without the type checker of the tests
    with pytest.raises(moezoo.UserError, match=r"^tokens are int32\[16\], expected integers \[batch, seq\]"):
        call(model, np.zeros(16, np.int32))
    with pytest.raises(moezoo.UserError, match=r"^tokens are float32\[2, 16\]"):
        call(model, np.zeros((2, 16), np.float32))


def test_warm_up_is_a_tenth_of_the_run_by_default():
    rates = [float(Cosine().rate(1.0, jnp.int32(i), 40)) for i in range(40)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1, 1], atol=1e-6)
    assert rates[-1] == pytest.approx(0.1)
    assert sorted(rates[3:], reverse=True) == rates[3:]


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamw", Cosine()), ("muon", Constant())])
def test_other_steps_and_another_rate_make_the_same_program(tiny, optimizer, schedule):
    """So a folder of compiled programs has it already."""
    texts = []
    for more in (("steps=40", "optimizer.learning_rate=0.1"), ("steps=7",), ("steps=40", "guard.loss=9")):
        cfg = moezoo.compose(*tiny, "mesh=single", f"optimizer={optimizer}", *more)
        cfg = dataclasses.replace(cfg, schedule=schedule)
        texts.append(build_step(cfg, build_execution(cfg)).traced.lower().as_text())
    assert texts[0] == texts[1] != texts[2]


@dataclasses.dataclass(frozen=True)
class InPython(Cosine):
    """A schedule that computes with numbers of Python."""

    def after_warmup(self, rate, since, left):
        """Return a part of the rate."""
        return rate * since / max(1, left - 1)


def test_a_schedule_that_computes_with_numbers_of_python_is_refused(tiny):
    cfg = dataclasses.replace(moezoo.compose(*tiny, "mesh=single"), schedule=InPython())
    with pytest.raises(moezoo.UserError, match=r"^schedule=InPython: .* write jnp.maximum"):
        build_step(cfg, build_execution(cfg))


def test_runs_of_the_same_second_have_different_folders():
    with contextlib.ExitStack() as held:
        folders = [held.enter_context(making(Path("runs/now"), numbered=True)) for _ in range(3)]
    assert folders == [Path("runs/now"), Path("runs/now_2"), Path("runs/now_3")]


def test_an_incomplete_row_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"ste\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path, until=9)] == [1, 2]
    assert [row["step"] for row in read_metrics(path, until=1)] == [1]
