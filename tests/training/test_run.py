"""What a run's settings decide: initial values, the order of the data, and the figures that it prints."""

import itertools
import time
import types

import jax
import numpy as np
from training_runs import assert_same_models

import moezoo
from moezoo.config.build import blueprint_of, build_execution
from moezoo.data import load, train_batches, trigram_loss, validation_batches
from moezoo.training import loop
from moezoo.training import train as module
from moezoo.training.build import build_model_on_mesh


def test_a_model_on_a_mesh_has_the_seed_and_dtype_of_the_run(tiny):
    cfg = moezoo.compose(*tiny, "mesh=fsdp2_ep4", "seed=3", "execution.param_dtype=bfloat16")
    wanted = jax.jit(lambda key: moezoo.build_model(cfg.model, key=key, dtype="bfloat16"))(jax.random.key(3))
    assert_same_models(build_model_on_mesh(blueprint_of(cfg), build_execution(cfg), 3), wanted)


def test_figures_of_a_run(tiny, monkeypatch, capsys):
    """With a clock that advances by half a second per look: around reading, a step of 8 x 16 tokens, and a save."""
    looks, asked, read = itertools.count(), [], module.read_batches
    clock = types.SimpleNamespace(perf_counter=lambda: next(looks) / 2, monotonic=time.monotonic, time=lambda: 7)
    monkeypatch.setattr(loop, "time", clock)

    def read_and_note(source, epochs, **settings):
        asked.append((settings["batch_size"], settings["start"], epochs.read(np.arange(8)).tokens.tolist()))
        return read(source, epochs, **settings)

    monkeypatch.setattr(module, "read_batches", read_and_note)
    overrides = ("mesh=single", "dispatch=gather", "model.layers=1", "model.z_loss=0", "seed=3")
    cfg = moezoo.compose(*tiny, *overrides, "steps=5", "log_every=3", "eval_every=0")
    run = moezoo.train(cfg)
    assert [(row["step"], row["tokens_per_second"]) for row in run.history] == [(1, 128), (3, 128), (5, 128)]
    spent = [[row[f"seconds_{what}"] for what in ("waiting", "computing", "saving")] for row in run.history]
    assert spent == [[0.5, 0.5, 0.5]] * 3
    assert [row["time"] for row in run.history] == [7, 7, 7]
    assert 2**25 < run.history[0]["peak_bytes"] <= run.history[1]["peak_bytes"] < 2**40
    assert all(row["z_loss"] == 0 < row["load_balance_loss"] for row in run.history)

    source = load(cfg.data, seq_len=16, seed=3, vocab=32)
    batch = next(train_batches(source, seq_len=16, batch_size=8, seed=3))
    assert asked == [(8, 0, batch.tokens.tolist())]
    baseline = trigram_loss(source, limit=16, seq_len=16)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("baseline")]
    assert f"{baseline:.3f}" in line
    first = next(validation_batches(source, seq_len=16, batch_size=1, limit=1))
    assert run.sample.prompt == source.decode(np.asarray(first.tokens)[0, :4])
