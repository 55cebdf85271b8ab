"""The benchmarks can time the implementations of PyTorch and transformers."""

import json

import pytest

from moezoo.cli.bench import COMMAND
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
    options = ["--shapes", "tiny", "--routing", "uniform", "--only", "torch", "transformers", "--json"]
    with pytest.raises(SystemExit) as caught:
        execute(COMMAND, [part, *options, "--seconds", "0.001", "--samples", "1"], "moezoo bench")
    assert not caught.value.code
    rows = json.loads(capsys.readouterr().out)
    assert {row["implementation"] for row in rows} == implementations | {"matmul", "batched matmul"}
    assert {row["pass"] for row in rows} == {"forward", "backward", "both"}
    assert all(row["ms"] > 0 for row in rows)
