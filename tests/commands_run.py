"""What tests of commands use: fixtures that tests/cli and tests/tools import."""

import contextlib
import shlex
import sys
from pathlib import Path

import pytest
from refusals import check_line

import moezoo.interrupts as interrupts
from moezoo.__main__ import main
from moezoo.models.family import MADE


@pytest.fixture(autouse=True, scope="module")
def families_of_a_file_stay_in_it():
    """Messages of other tests list the families that there are."""
    before = dict(MADE)
    yield
    MADE.clear()
    MADE.update(before)


@pytest.fixture(autouse=True)
def signals_keep_their_effect(monkeypatch):
    """A command that runs in this process does not take over its signals."""
    monkeypatch.setattr(interrupts, "ending", contextlib.nullcontext)


@pytest.fixture
def console(monkeypatch, capsys):
    """Run the console command in this process; returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["/bin/moezoo", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refuses(console):
    """Check that a command ends with code 2 and the line of an error that `check_line` accepts, and writes nothing."""

    def check(words, line):
        before = sorted(Path.cwd().rglob("*"))
        code, out, err = console(*shlex.split(words))
        assert (code, out, err[-1:]) == (2, "", "\n")
        check_line(err[:-1], f"error: {line}")
        assert sorted(Path.cwd().rglob("*")) == before

    return check


@pytest.fixture(scope="session")
def small_run() -> tuple[str, ...]:
    """Overrides of a run of one step on two devices; the same sizes everywhere share compiled programs."""
    model = ("model.layers=1", "model.embed=16", "model.heads=2", "model.kv_heads=1", "model.head_dim=8")
    sizes = ("model.expert_mlp=8", "model.vocab=32", "data=synthetic", "data.vocab=32", "data.documents=40")
    return *model, *sizes, "seq_len=16", "steps=1", "eval_every=0", "data.eval_sequences=8", "mesh.expert=2"
