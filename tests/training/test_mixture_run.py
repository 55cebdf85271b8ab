"""Runs on a mixture: resumed in the middle, with figures of each source."""

import dataclasses
import json

import numpy as np
import pytest
from refusals import refused
from training_runs import assert_same_models, repeatable, steps_only

import moezoo
from moezoo.data import Jsonl, Text, load, train_batches
from moezoo.data.epochs import PackedEpochs

ONE_DEVICE = ("mesh=single", "dispatch=gather", "model.layers=1", "model.vocab=256", "seed=3")
SOURCES = (
    "data=mixture",
    "data.eval_sequences=5",
    "data.sources.lines.name=jsonl",
    "data.sources.lines.path=lines.jsonl",
    "data.sources.lines.packing=whole",
    "data.sources.text.name=text",
    "data.sources.text.path=text.txt",
    "data.sources.text.weight=2",
)


@pytest.fixture
def overrides(tiny) -> list[str]:
    with open("lines.jsonl", "w") as file:
        file.writelines(json.dumps({"text": chr(65 + i % 26) * (1 + i * i % 15)}) + "\n" for i in range(150))
    with open("text.txt", "w") as file:
        file.write("some text of words " * 60)
    return [each for each in tiny if not each.startswith("data")] + [*ONE_DEVICE, *SOURCES]


def test_a_mixture_resumed_in_the_middle(overrides, capsys, monkeypatch):
    monkeypatch.setattr(PackedEpochs, "warnings", lambda self: ["much is lost"])
    words = (*overrides, "steps=6", "eval_every=0", "checkpoint_every=4")
    with steps_only():
        whole = moezoo.train(moezoo.compose(*words, "run_dir=whole"))
        printed = capsys.readouterr().out
        resumed = moezoo.train(moezoo.compose("resume=whole/checkpoints/4", "run_dir=resumed"))
    assert_same_models(resumed.model, whole.model)
    assert repeatable(resumed.history) == repeatable(whole.history)
    assert resumed.evaluation == whole.evaluation

    cfg = moezoo.compose(*overrides)
    source = load(cfg.data, seq_len=cfg.seq_len, seed=cfg.seed, vocab=256)
    batches = train_batches(source, seq_len=cfg.seq_len, batch_size=cfg.batch_size, seed=cfg.seed)
    tokens = np.cumsum([(next(batches).segments > 0).sum() for _ in range(6)]).tolist()
    assert [sum(row["tokens_by_source"].values()) for row in whole.history] == tokens
    last, evaluation = whole.history[-1], whole.evaluation
    assert min(last["tokens_by_source"].values()) > 100
    assert last["val_loss_by_source"] == {name: own.loss for name, own in evaluation.by_source.items()}
    assert evaluation.tokens == sum(own.tokens for own in evaluation.by_source.values())
    sums = sum(own.loss * own.tokens for own in evaluation.by_source.values())
    np.testing.assert_allclose(evaluation.loss, sums / evaluation.tokens)
    # The loss of a source is that of the same model on this source alone.
    sources = {"lines": Jsonl(path="lines.jsonl", packing="whole"), "text": Text(path="text.txt")}
    for name, own in evaluation.by_source.items():
        alone = dataclasses.replace(sources[name], eval_sequences=5)
        found = moezoo.evaluate(whole.model, dataclasses.replace(cfg, data=alone))
        assert (found.loss, found.tokens) == (own.loss, own.tokens)
        counted = f"over {own.tokens:,} bytes; trained on {last['tokens_by_source'][name]:,} bytes"
        assert any(f"{name}: {own.loss:.4f} nats per byte {counted}" in line for line in printed.splitlines())
    assert "\nwarning:    lines: much is lost\n" in printed
    assert "mixture of lines 33.3%, text 66.7% of the rows" in printed

    with refused("data.sources.text.weight=3", "has data.sources.text.weight=2", "cannot change during a run"):
        moezoo.train(moezoo.compose("resume=whole", "steps=9", "data.sources.text.weight=3"))
    with open("text.txt", "a") as file:
        file.write("more")
    with refused("resume=whole was trained on data with sha256", "use the same data"):
        moezoo.train(moezoo.compose("resume=whole", "steps=9"))
