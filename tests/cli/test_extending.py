"""Every example of docs/extending.md runs as its user runs it: in a copy of docs/examples, with nothing registered."""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import moezoo
from moezoo.kernels.attention import BACKENDS as ATTENTION
from moezoo.kernels.grouped_matmul import BACKENDS as GROUPED_MATMUL

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "extending.md").read_text()
FILES = {path.name: path.read_text() for path in (DOCS / "examples").iterdir() if path.is_file()}
SCRIPTS = sorted(name for name in FILES if name.startswith("try_"))
COMMANDS = re.findall(r"^    moezoo (.+)$", PAGE, re.MULTILINE)
MODEL = ["model.layers=2", "model.embed=16", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.experts=8"]
MODEL += ["model.expert_mlp=8"]
RUN = ["data.eval_sequences=8", "seq_len=32", "steps=1", "eval_every=0"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The examples in the current folder, and nothing of them in the process afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if each)])
    yield
    for backends, name in ((ATTENTION, "plain"), (GROUPED_MATMUL, "per_row")):
        backends.pop(name, None)
    for name in {Path(file).stem for file in FILES} & set(sys.modules):
        del sys.modules[name]
    importlib.invalidate_caches()


def test_the_page_has_an_example_of_each_kind():
    assert len(SCRIPTS) == 5
    assert len(COMMANDS) == 10
    named = set(re.findall(r"\(examples/(\S+?)\)", PAGE))
    # The scripts import one file, and other pages name the chats.
    assert named == set(FILES) - {"small.py", "sums.jsonl", "sums.jinja", "sums.yaml"}


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(script, monkeypatch, capsys):
    """Each prints a difference that is a rounding: logits of size 1, in float32."""
    compose = moezoo.compose
    monkeypatch.setattr(moezoo, "compose", lambda *words: compose(*words, *MODEL))
    runpy.run_path(script, run_name="__main__")
    assert float(capsys.readouterr().out.split("\n")[0]) < 1e-5


def test_one_run_with_all_of_them(console):
    own = "model=alternate.Alternate dispatch=broadcast.Broadcast data=lines.Lines data.path=broadcast.py"
    own += " execution.attention=plain execution.grouped_matmul=per_row"
    own += " tracker=to_csv.CSV tracker.figure=grad_norm"
    own += " optimizer=lion.Lion schedule=linear.Linear execution.context_parallel=pass_around.PassAround"
    for name in ("plain", "per_row"):
        importlib.import_module(name)  # which registers the backend
    code, out, err = console("train", *MODEL, *RUN, *own.split(), "mesh.context=2", "mesh.expert=2", "run_dir=run")
    assert code == 0, err
    for part in (
        "grouped_matmul: per_row",
        "attention: plain",
        "keys by pass_around.PassAround",
        "broadcast.Broadcast: ",
        "model       alternate: ",
    ):
        assert part in out
    assert re.fullmatch(r"1,\d+\.\d+\n", Path("run/figure.csv").read_text())
    model, _ = moezoo.load_run("run", *own.split())
    assert type(model.config).__name__ == "AlternateConfig"


@pytest.mark.full
def test_commands(console):
    for command in COMMANDS:
        name, *words = shlex.split(command)
        sizes = [*(MODEL if "resume" not in command else []), "seq_len=32", "eval_every=0"]
        code, _, err = console(name, *words, *(sizes if name == "train" else []))
        assert code == 0, f"{command}: {err}"
