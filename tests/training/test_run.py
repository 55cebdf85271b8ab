"""What a run's settings decide: initial values, the order of the data, and the figures that it prints."""

import dataclasses
import itertools
import os
import time
import types

import jax
import numpy as np
import pytest
from recorders import Raiser, Recorder, Sleeper, forever
from training_runs import assert_same_models, steps_only

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.data import load, train_batches, trigram_loss, validation_batches
from moezoo.data.epochs import Numbered
from moezoo.training import loop
from moezoo.training.build import build_model_on_mesh


def test_a_model_on_a_mesh_has_the_seed_and_dtype_of_the_run(tiny):
    cfg = moezoo.compose(*tiny, "mesh=fsdp2_ep4", "seed=3", "execution.param_dtype=bfloat16")
    wanted = jax.jit(lambda key: moezoo.build_model(cfg.model, key=key, dtype="bfloat16"))(jax.random.key(3))
    assert_same_models(build_model_on_mesh(blueprint_of(cfg), build_execution(cfg), 3), wanted)


def test_figures_of_a_run(tiny, monkeypatch, capsys):
    """With a clock that advances by half a second per look: around reading, a step of 8 x 16 tokens, and a save."""
    looks, asked, read = itertools.count(), [], Numbered.batches
    clock = types.SimpleNamespace(perf_counter=lambda: next(looks) / 2, monotonic=time.monotonic, time=lambda: 7)
    monkeypatch.setattr(loop, "time", clock)

    def read_and_note(epochs, batch_size, rows, start, places):
        asked.append((batch_size, start, epochs.read(np.arange(8)).tokens.tolist()))
        return read(epochs, batch_size, rows, start, places)

    monkeypatch.setattr(Numbered, "batches", read_and_note)
    overrides = ("mesh=single", "dispatch=gather", "model.layers=1", "model.z_loss=0", "seed=3")
    cfg = moezoo.compose(*tiny, *overrides, "steps=5", "log_every=3", "eval_every=0")
    run = moezoo.train(cfg)
    assert [(row["step"], row["tokens_per_second"]) for row in run.history] == [(1, 128), (3, 128), (5, 128)]
    spent = [[row[f"seconds_{what}"] for what in ("waiting", "computing", "saving")] for row in run.history]
    assert spent == [[0.5, 0.5, 0.5]] * 3
    assert [row["time"] for row in run.history] == [7, 7, 7]
    assert 2**25 < run.history[0]["peak_bytes"] <= run.history[1]["peak_bytes"] < 2**40
    assert all(row["z_loss"] == 0 < row["load_balance_loss"] for row in run.history)

    monkeypatch.undo()
    source = load(cfg.data, seq_len=16, seed=3, vocab=32)
    batch = next(train_batches(source, seq_len=16, batch_size=8, seed=3))
    assert asked == [(8, 0, batch.tokens.tolist())]
    baseline = trigram_loss(source, limit=16, seq_len=16)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("baseline")]
    assert f"{baseline:.3f}" in line
    first = next(validation_batches(source, seq_len=16, batch_size=1, limit=1))
    assert run.sample.prompt == source.decode(np.asarray(first.tokens)[0, :4])


def test_writers_receive_what_a_run_reports(tiny, capsys):
    """A function and a tracker; the tracker also pictures, the configuration and the summary, and the end."""
    words = (*tiny, "mesh=single", "dispatch=gather", "model.layers=1", "model.z_loss=0", "seed=3", "eval_every=0")
    cfg = dataclasses.replace(moezoo.compose(*words, "steps=5", "log_every=2"), tracker=Recorder())
    rows: list = []
    run = moezoo.train(cfg, on_row=lambda row: (rows.append(dict(row)), row.clear()))
    kept = Recorder.kept[-1]
    assert rows == kept.rows == run.history
    assert [row["step"] for row in rows] == [1, 2, 4, 5]
    pictures = [("picture", name) for name in ("loss.png", "routing.png", "expert_load.png")]
    assert kept.calls == [("row", (1, 8))] * 4 + pictures + [("finish", None)]
    assert kept.run.folder == run.folder
    assert kept.run.config["tracker"]["name"] == "recorders.Recorder"
    lines = capsys.readouterr().out.splitlines()
    assert kept.run.text.splitlines()[0] == lines[0]

    # It goes on with the rows so far. A signal, which ends the run, ends the tracker too.
    words = (f"resume={run.folder}/checkpoints/5", "run_dir=other", "tracker=recorders.Recorder", "steps=9")
    stop = lambda row: row["step"] == 7 and os.kill(os.getpid(), 2)  # noqa: E731
    with steps_only(), pytest.raises(moezoo.Stopped, match="after step 7"):
        moezoo.train(moezoo.compose(*words, "log_every=1"), on_row=stop)
    kept = Recorder.kept[-1]
    assert kept.run.history == run.history
    assert [row["step"] for row in kept.rows] == [1, 2, 4, 5, 6, 7]
    assert kept.calls[-1] == ("finish", None)


def test_a_run_goes_on_without_a_tracker_that_fails(tiny, capsys):
    forever.clear()
    words = (*tiny, "mesh=single", "dispatch=gather", "model.layers=1", "model.z_loss=0", "seed=3", "eval_every=0")
    for tracker, why in ((Raiser(), "ValueError: no such project"), (Sleeper(), "it did not finish within 1 s")):
        with steps_only():
            run = moezoo.train(dataclasses.replace(moezoo.compose(*words, "steps=5"), tracker=tracker))
        assert [row["step"] for row in run.history] == [1, 2, 3, 4, 5]
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tracker ")]
        name = f"recorders.{type(tracker).__name__}"
        assert found == [f"tracker     {name} is off: {why}; metrics.jsonl has all rows"]
    forever.set()
