"""When a run is evaluated, which checkpoint is its best, and what ends a run that overfits.

The losses of evaluations are written by hand where a test needs to know which is the lowest.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from refusals import refused
from training_runs import assert_same_models, read_rows, steps_only, train_and_print

import moezoo
from moezoo.cli import train as command
from moezoo.cli.convert import main as convert
from moezoo.cli.model_keys import ModelKeys, load_model
from moezoo.config.compose import compose_onto, read_run
from moezoo.config.run_folders import steps
from moezoo.tools.sweep.expand import Element
from moezoo.tools.sweep.runs import find_outcome
from moezoo.training import loop
from moezoo.training.evaluate import Evaluation
from moezoo.training.metrics import best_checkpoint, count_validations
from moezoo.training.reading import read_folder

NAN = math.nan
ONE = ("mesh=single", "dispatch=gather", "model.layers=1", "data.documents=20")
# The last number of checkpoints does not hold the best one.
STOPPED = ("eval_every=1", "eval_patience=3", "steps=9", "checkpoint_keep=1")


@pytest.fixture(scope="module")
def train(tiny):
    """Train, with the given losses in place of evaluations, one after the other; return the run and its lines.

    The step is compiled once: with a constant learning rate it does not depend on the number of steps.
    """
    programs, compiled = {}, loop.Loop._compile

    def train(losses, *overrides):
        left = iter(losses)

        def evaluate(model, on_batch):
            if (loss := next(left, None)) is None:  # no loss is left: a signal comes
                os.kill(os.getpid(), signal.SIGTERM)
                on_batch(0, 2)
            assert loss is not None
            return Evaluation(loss, 8, 0, "token", 1, 1)

        with pytest.MonkeyPatch.context() as patch, steps_only():
            patch.setattr(loop, "Evaluator", lambda *_: evaluate)
            patch.setattr(
                loop.Loop, "_compile", lambda self: programs.get("step") or programs.setdefault("step", compiled(self))
            )
            words = overrides if any(word.startswith("resume=") for word in overrides) else (*tiny, *ONE, *overrides)
            found = train_and_print(*words)
        assert next(left, None) is None  # each of the losses was asked for
        return found

    return train


@pytest.fixture(scope="module")
def ended(train, tmp_path_factory):
    """A run that ends by its patience, and its lines: step 2 is the best, as an equal loss and no number are not."""
    return train([3.0, 2.0, 2.0, NAN, 2.5], *STOPPED, f"run_dir={tmp_path_factory.mktemp('ended')}/run")


@pytest.fixture
def copy(ended, tmp_path):
    """A copy of its folder."""
    return Path(shutil.copytree(ended[0].folder, tmp_path / "run"))


def test_a_run_ends_after_validations_without_a_gain(ended):
    run, lines = ended
    assert [row["val_loss"] for row in run.history] == [3.0, 2.0, 2.0, None, 2.5]
    assert lines[-2].startswith("ended       by eval_patience=3: ")
    assert lines[-1] == "best        step 2, validation 2.0000 nats per token; checkpoint=best names it"
    assert steps(run.folder / "checkpoints") == [2, 5]
    assert read_folder(run.folder, "run").notes == []  # not: it is not finished
    outcome = find_outcome(run.folder, Element(0, "run", {}, []))
    assert (outcome.state, outcome.run.last) == ("finished", 5)


def test_weights_without_a_loss_end_a_run_before_its_first_step(train):
    with refused("eval_patience=1 ends the run before step 1: ... is nan ... set eval_patience above 1"):
        train([NAN], "steps=3", "eval_patience=1")


def test_a_continued_run_keeps_its_best_and_its_count(copy, train, capsys):
    with refused(f"resume={copy} ended at step 5: 3 evaluations had no lower loss; set eval_patience above 3"):
        moezoo.train(moezoo.compose(f"resume={copy}"))
    assert command.main([f"run_dir={copy}", "resume=auto"]) == 0
    assert f"{copy} is complete: step 5 is its last" in capsys.readouterr().out
    train([2.0], f"resume={copy}", "eval_patience=4")
    assert steps(copy / "checkpoints") == [2, 6]
    _, lines = train([1.9, 2.0, 2.0], f"resume={copy}", "eval_patience=9")
    assert steps(copy / "checkpoints") == [7, 9]
    assert lines[-1].startswith("best        step 7, validation 1.9000 ")


def test_rows_after_the_checkpoint_do_not_count(copy, train):
    """A killed run has a row of a better loss than that of its newest checkpoint, step 2, and no checkpoint of it."""
    shutil.rmtree(copy / "checkpoints" / "5")
    log = copy / "metrics.jsonl"
    log.write_text(log.read_text().replace('"val_loss": null', '"val_loss": 1.0'))
    assert best_checkpoint(copy, "run_dir") == copy / "checkpoints" / "2"
    train([2.0, 2.0, 2.0], f"resume={copy}")
    assert [row.get("val_loss") for row in read_rows(copy)] == [3.0, 2.0, 2.0, 2.0, 2.0]
    assert steps(copy / "checkpoints") == [2, 5]


def test_the_best_checkpoint_of_another_folder(ended, train, tmp_path):
    """The run that goes on elsewhere knows its best, which is not there."""
    resume = (f"resume={ended[0].folder}/checkpoints/5", f"run_dir={tmp_path}/other")
    run, lines = train([2.0], *resume, "eval_patience=4")
    assert lines[-1] == f"best        step 2, validation 2.0000 nats per token; its checkpoint is not in {run.folder}"
    with refused(f"run_dir={run.folder} checkpoint=best: ", "step 2, whose checkpoint is not there", "there are 6"):
        best_checkpoint(run.folder, "run_dir")


def test_commands_read_the_best_checkpoint(copy, tmp_path):
    folder = str(copy)
    named = ModelKeys(run_dir=folder, checkpoint="best"), ModelKeys(run_dir=f"{folder}/checkpoints/2")
    best, second, newest = (load_model(keys, [], None) for keys in (*named, ModelKeys(run_dir=folder)))
    assert_same_models(best, second)
    assert (np.asarray(best.unembedding) != np.asarray(newest.unembedding)).any()
    convert([f"source={folder}", f"target={tmp_path}/best", "checkpoint=best"])
    convert([f"source={folder}/checkpoints/2", f"target={tmp_path}/second"])
    one, other = (tmp_path / name / "model.safetensors" for name in ("best", "second"))
    assert one.read_bytes() == other.read_bytes()
    with refused(f"run_dir={folder}/checkpoints/5 names a checkpoint and checkpoint=best another; "):
        best_checkpoint(f"{folder}/checkpoints/5", "run_dir")
    with refused("checkpoint=best: a folder has no checkpoints; leave it out"):
        ModelKeys(folder=f"{tmp_path}/best", checkpoint="best")
    (Path(folder) / "metrics.jsonl").unlink()
    with refused(f"run_dir={folder} checkpoint=best: metrics.jsonl there has no validation loss up to step 5; "):
        best_checkpoint(folder, "run_dir")


def test_a_validation_that_a_signal_ends_is_not_the_best(train, tmp_path):
    """After the first step, and before it: no loss is known, although the model may be the best."""
    for every, end in (("1", "after step 1, saved"), ("null", "before its first step; nothing was saved")):
        with pytest.raises(moezoo.Stopped, match=end):
            train([], f"eval_every={every}", "steps=3", f"run_dir={tmp_path}/{every}")
    assert ["val_loss" in row for row in read_rows(tmp_path / "1")] == [False]
    assert not (tmp_path / "null").exists()


def test_a_run_is_evaluated_before_its_first_step(tiny, tmp_path):
    """Then after each step of two; the losses of its steps are those of a run with one evaluation."""
    words = (*tiny, *ONE, "steps=2", "checkpoint_keep=9")
    with steps_only():
        run, lines = train_and_print(*words, f"run_dir={tmp_path}/run")
        plain, _ = train_and_print(*words, "eval_every=0", f"run_dir={tmp_path}/plain")
    rows = read_rows(run.folder)
    assert [(row["step"], "loss" in row, "val_loss" in row) for row in rows] == [
        (0, False, True),
        (1, True, True),
        (2, True, True),
    ]
    assert set(rows[0]) == {"step", "val_loss"}
    losses = [[row["loss"] for row in read_rows(folder)[-2:]] for folder in (run.folder, plain.folder)]
    assert losses[0] == losses[1]
    assert_same_models(run.model, plain.model)
    assert f"step 0/2  validation {rows[0]['val_loss']:.4f}" in lines
    first, cfg = moezoo.load_run(run.folder / "checkpoints" / "0")
    assert moezoo.evaluate(first, cfg).loss == pytest.approx(rows[0]["val_loss"], rel=1e-6)


def test_a_continued_run_is_not_evaluated_twice_before_its_first_step(train, tmp_path):
    train([3.0, 2.0, 2.0], "steps=2", "checkpoint_keep=9", f"run_dir={tmp_path}/run")
    train([2.0, 2.0], f"resume={tmp_path}/run/checkpoints/0")
    assert [row["val_loss"] for row in read_rows(tmp_path / "run")] == [3.0, 2.0, 2.0]


def test_epochs_are_as_many_steps_as_read_their_rows(train, tmp_path):
    folder = tmp_path / "run"
    run, lines = train([2.0], "epochs=1", "eval_every=0", f"run_dir={folder}")
    rows = int(next(line for line in lines if "1 epoch of " in line).split()[-2])
    count = -(-rows // 8)
    assert run.history[-1]["step"] == count
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (count, 1)
    with refused(f"resume={folder} is at step {count} and steps={count}; set steps above {count}, or epochs above 1"):
        moezoo.train(moezoo.compose(f"resume={folder}"))
    with refused(
        f"steps=99 epochs=1: 1 epoch of {rows} rows together in batches of 8 would be {count} steps; leave one "
    ):
        moezoo.train(dataclasses.replace(moezoo.compose(f"resume={folder}"), steps=99))
    run, _ = train([1.0], f"resume={folder}", "epochs=2")
    assert run.history[-1]["step"] == -(-2 * rows // 8)
    outcome = find_outcome(folder, Element(0, "run", {}, []))
    assert (outcome.state, outcome.run.last) == ("finished", -(-2 * rows // 8))


def test_one_of_steps_and_epochs():
    cfg = moezoo.compose("epochs=2")
    assert (cfg.steps, cfg.epochs) == (None, 2)


def test_a_run_with_epochs_is_continued_by_either(tmp_path, train):
    train([2.0], "epochs=1", "eval_every=0", f"run_dir={tmp_path}/run")
    saved = read_run(tmp_path / "run", "resume")
    for word, expected in (
        ("epochs=1", (saved["steps"], 1)),
        ("epochs=3", (None, 3)),
        ("steps=99", (99, None)),
        ("seed=0", (saved["steps"], 1)),
    ):
        cfg = compose_onto(saved, word)
        assert (cfg.steps, cfg.epochs) == expected


def test_when_a_run_is_evaluated():
    def after(*words):
        cfg = moezoo.compose(*words)
        assert cfg.steps is not None
        return [step for step in range(cfg.steps + 1) if cfg.is_evaluated(step)]

    assert after("steps=500") == [0, 125, 250, 375, 500]
    assert after("steps=10") == [0, 3, 5, 8, 10]
    for short in range(5):
        assert after(f"steps={short}") == list(range(short + 1))
    for long in range(5, 40):
        found = after(f"steps={long}")
        assert (found[0], found[-1], len(found)) == (0, long, 5)
        assert max(np.diff(found)) - min(np.diff(found)) <= 1
    assert after("steps=10", "eval_every=4") == [4, 8, 10]
    assert after("steps=10", "eval_every=0") == [10]


def test_counting():
    rows = [{"step": step, "val_loss": loss} for step, loss in enumerate([None, 3.0, 2.0, 2.0, None, 2.5])]
    assert [count_validations(rows[:n]).step for n in range(7)] == [None, None, 1, 2, 2, 2, 2]
    assert [count_validations(rows[:n]).since for n in range(7)] == [0, 1, 0, 0, 1, 2, 3]
    found = count_validations(json.loads(json.dumps([*rows, {"step": 6, "loss": 1.0}])))
    assert [found.exhaust(patience) for patience in (None, 2, 3, 4)] == [False, True, True, False]
