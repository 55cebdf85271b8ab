"""`train_step peer=transformers`: both programs train alike, and a difference between them is an error."""

import copy
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from test_bench import bench

from benchmarks import one_trainer, train_peer
from benchmarks.one_trainer import train_here, train_in_pytorch
from benchmarks.parts import PEER_STEPS
from moezoo.config.compose import compose
from moezoo.errors import UserError
from moezoo.models import build_model
from moezoo.parallel.axes import count_parameters

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")

SIZES = "model.vocab=64 model.embed=32 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=16"
SIZES += " model.expert_mlp=32 batch_size=2 seq_len=16 execution.remat=none optimizer.clip_norm=0.1"
OURS = f"model=gpt_oss {SIZES} model.window=8"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """PyTorch's threads wait for each other in busy loops, which is slow next to other tests."""
    monkeypatch.setattr(one_trainer, "processors", lambda: 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with every kind of parameter that decays or does not: weights, scales, biases, sinks, an embedding."""
    folder = tmp_path_factory.mktemp("peer")
    cfg = compose(*OURS.split(), *train_peer._FIXED)
    train_peer.write(folder, cfg, train_peer.settings_of(cfg, OURS.split(), "fused"))
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return results(train_here, folder, settings(folder))


def settings(folder):
    return json.loads((folder / "settings.json").read_text())


def results(make, folder, chosen):
    """Return the losses and lengths after three steps."""
    trainer = make(folder, chosen, np.load(folder / "tokens.npy"))
    return {"losses": [trainer.step(number) for number in range(3)], **trainer.lengths()}


@pytest.mark.parametrize("fused", [True, False])
def test_train_alike(folder, ours, fused):
    chosen = settings(folder)
    chosen["adamw"]["fused"] = fused
    theirs = results(train_in_pytorch, folder, chosen)
    train_peer.check("tiny", ours, theirs)
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-6)
    for kind in ("parameters", "first moments", "second moments"):
        assert ours[kind] == pytest.approx(theirs[kind], rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"decay": 0.0}, "parameters"),
        ({"clip": None}, "parameters"),
        ({"clip": 0.101}, "first moments"),
        ({"adamw": {"lr": 2.1e-3}}, "losses"),
        ({"adamw": {"betas": [0.9, 0.951]}}, "second moments"),
        ({"adamw": {"betas": [0.901, 0.95]}}, "first moments"),
        ({"adamw": {"eps": 1e-6}}, "losses"),
    ],
)
def test_differences_are_found(folder, ours, changed, found):
    """Also small ones, and those that hardly move the loss."""
    chosen = copy.deepcopy(settings(folder))
    for key, value in changed.items():
        chosen[key] = {**chosen[key], **value} if isinstance(value, dict) else value
    with pytest.raises(
        UserError, match=f"step=tiny: {found} of 3 steps differ by .*; leave out words that only moezoo"
    ):
        train_peer.check("tiny", ours, results(train_in_pytorch, folder, chosen))


def test_turns(capsys):
    """Figures of two processes follow from their turns."""
    options = ["peer=transformers", f"step={OURS}", "samples=3", "turn=2", "out=s"]
    code, out, err = bench(capsys, "train_step", *options)
    assert code == 0
    assert "next to transformers, float32, " in out
    assert f"{OURS}: turn 3/3" in err
    ours, theirs = json.loads(Path("s/rows.json").read_text())
    assert [(row["implementation"], row["attention"]) for row in (ours, theirs)] == [
        ("moezoo", "moezoo"),
        ("transformers", "eager"),
    ]
    assert len(ours["losses"]) == len(theirs["losses"]) == 3 + 3 * 2
    assert ours["losses"][-1] < ours["losses"][0] - 0.1
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
    assert 0 <= ours["difference"] < 1e-6
    for row in (ours, theirs):
        assert (row["part"], row["step"], row["dtype"], row["adamw"]) == ("train_step", OURS, "float32", "fused")
        assert (row["turns"], row["steps_per_turn"]) == (3, 2)
        assert 0 < row["ms"] < 10e3
        assert 0 < row["cpu_ms"] < 1.2 * row["processors"] * (row["ms"] + row["ms_spread"])
        assert 1e6 < row["peak_bytes"] < 2e9
    assert (theirs["ratio"], theirs["cpu_ratio"], theirs["difference"]) == (1, 1, 0)


def test_ratios_are_of_adjacent_turns(monkeypatch, tmp_path):
    """A machine that is three times as slow in one turn of both moves no ratio."""

    class Process:
        attention = "any"

        def __init__(self, who, folder, held):
            self._seconds = iter([1, 2, 6, 2] if who == "moezoo" else [1, 1, 3, 4])

        def ask(self, question):
            if question is None:
                return dict.fromkeys(("parameters", "first moments", "second moments"), 1.0)
            seconds = next(self._seconds)
            return {"seconds": seconds, "cpu_seconds": 3 * seconds, "losses": [1.0] * question, "peak_bytes": seconds}

    monkeypatch.setattr(train_peer, "Process", Process)
    keys = type("Keys", (), {"samples": 3, "turn": 1, "adamw": "fused"})
    ours, theirs = train_peer.compare({"step": "x"}, tmp_path, keys)
    assert (ours["ms"], ours["cpu_ms"], ours["peak_bytes"]) == (2000, 6000, 2)
    assert (theirs["ms"], ours["ratio"], ours["cpu_ratio"]) == (3000, 2, 2)


def test_a_process_that_ends_early(capsys, monkeypatch):
    """One line says which, and why."""
    monkeypatch.setattr(train_peer, "settings_of", lambda *_: {"words": ["mesh=epp8"]})
    code, out, err = bench(capsys, "train_step", "peer=transformers", f"step={OURS}")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: moezoo ended with code 1 (mesh=epp8: no such mesh; did you mean")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["peer=transformers", "step=mixtral_116m"], "step=mixtral_116m: not known; did you mean 'mixtral_115m'?"),
        (
            ["peer=transformers", f"step={OURS} optimizer=sgd"],
            "trains with AdamW on one device; choose optimizer=adamw",
        ),
        (["peer=transformers", f"step={OURS} mesh=ep8"], "trains with AdamW on one device; choose optimizer=adamw"),
        (["peer=transformers", "dtype=bfloat16"], "dtype=bfloat16: peer= compares turns in float32"),
        (["peer=transformers", "seconds=3"], "seconds=3.0: peer= compares turns in float32; choose turn= and samples="),
        (["turn=3"], "turn=3: peer= is not given"),
        (["peer=torch"], "peer=torch: expected one of transformers, or null, found torch"),
    ],
)
def test_mistakes_get_one_line(capsys, options, line):
    code, out, err = bench(capsys, "train_step", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert line in err


def test_needs_the_peers(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = bench(capsys, "train_step", "peer=transformers")
    assert (code, err) == (2, "error: not installed: torch, transformers; pip install 'moezoo[peers]'\n")


def test_named_steps_have_as_many_parameters_as_their_names():
    for name, words in PEER_STEPS.items():
        c = compose(*words.split()).model
        shapes = jax.eval_shape(lambda c=c: build_model(c, key=jax.random.key(0)))
        parameters, _ = count_parameters(shapes, c.experts_per_token)
        assert name.endswith(f"_{parameters / 1e6:.0f}m")
