"""The benchmarks can time the implementations of PyTorch and transformers."""

import json

import pytest

from benchmarks.parts import PARTS
from moezoo.cli.command import execute

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[peers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")


@pytest.mark.parametrize(
    ("part", "implementations"),
    [
        ("grouped_matmul", {"torch grouped_mm"}),
        ("moe_layer", {"transformers eager", "transformers grouped_mm"}),
    ],
)
def test_peers_are_timed(capsys, part, implementations):
    options = ["shape=tiny", "routing=uniform", "only=torch", "only=transformers", "json=true"]
    with pytest.raises(SystemExit) as caught:
        execute(PARTS[part], [*options, "seconds=0.001", "samples=1"], part)
    assert not caught.value.code
    rows = json.loads(capsys.readouterr().out)
    assert {row["implementation"] for row in rows} == implementations | {"matmul", "batched matmul"}
    assert {row["pass"] for row in rows} == {"forward", "backward", "both"}
    assert all(row["ms"] > 0 for row in rows)


def test_generation_is_timed_next_to_transformers(capsys):
    """The same tokens, by both; what a token reads does not depend on who reads it."""
    words = "mixtral model.vocab=40 model.embed=32 model.layers=2 model.expert_mlp=16"
    options = [f"model={words}", "call=2x5x3", "seconds=0.001", "samples=1", "json=true"]
    with pytest.raises(SystemExit) as caught:
        execute(PARTS["generate"], options, "generate")
    assert not caught.value.code
    ours, theirs = json.loads(capsys.readouterr().out)
    assert (ours["implementation"], theirs["implementation"]) == ("moezoo", "transformers")
    assert ours["same_rows"] == theirs["same_rows"] == 2
    assert ours["ratio"] == pytest.approx(theirs["ms"] / ours["ms"], rel=0.01)
    assert theirs["ratio"] == 1
    # Two layers of attention (4 query and 2 key heads of 32), norms, router and 4 experts; final norm, unembedding.
    layer = 32 * 32 * (4 + 2 + 2 + 4) + 2 * 32 + 32 * 8 + 4 * 3 * 32 * 16
    assert ours["read_bytes"] == theirs["read_bytes"] == 4 * (2 * layer + 32 + 32 * 40)
