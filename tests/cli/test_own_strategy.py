"""`dispatch=package.module.Class`: a user's own strategy, from the command line, from `compose` and as a value."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

import moezoo
from moezoo.cli import generate
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.config.overrides import read_yaml
from moezoo.moe.dispatch import Gather

STRATEGY = """
import dataclasses
from typing import ClassVar

from moezoo.moe.dispatch import Dispatch, Gather


@dataclasses.dataclass(frozen=True)
class Mine(Dispatch):
    '''Do what `gather` does, by calling it.'''

    label: str = "none"
    moves: ClassVar = "weights"

    def rows(self, tokens, k, group):
        return Gather().rows(tokens, k, group)

    def dispatch(self, tokens, assignment, group):
        return Gather().dispatch(tokens, assignment, group)

    def combine(self, rows, state, group):
        return Gather().combine(rows, state, group)
"""
NAME = "own_strategy.Mine"


@pytest.fixture(autouse=True)
def strategy(tmp_path, monkeypatch):
    """The strategy as a file in the current folder, which is not on the path, as for a script."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    yield
    for name in {"own_strategy", "other"} & set(sys.modules):
        del sys.modules[name]
    importlib.invalidate_caches()


def refusal(*overrides, function=moezoo.compose):
    with pytest.raises(moezoo.UserError) as caught:
        function(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_trains_evaluates_and_resumes(console, small_run):
    """A run folder imports nothing: a command that continues or reads it names the strategy again, or another."""
    code, out, err = console("train", *small_run, f"dispatch={NAME}", "dispatch.label=first", "run_dir=run")
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("dispatch "))
    assert f"{NAME}: " in line
    assert "; label=first" in line
    assert read_yaml("run/config.yaml")["dispatch"] == {"name": NAME, "chunks": 1, "label": "first"}
    mine = sys.modules.pop("own_strategy").Mine
    for arguments in (["train", "resume=run", "steps=3"], ["evaluate", "run_dir=run"]):
        code, out, err = console(*arguments)
        assert (code, out) == (2, "")
        assert f"write dispatch={NAME} again" in err
        assert err.count("\n") == 1
    assert NAME in refusal("run", function=moezoo.load_run)
    assert NAME in refusal("run_dir=run", "prompt=1", function=generate.configure)
    assert NAME in refusal("resume=run")
    assert "own_strategy" not in sys.modules

    # Named again, it keeps the options of the run; another strategy has its own options.
    assert vars(moezoo.saved_config("run", f"dispatch={NAME}").dispatch)["label"] == "first"
    assert vars(moezoo.saved_config("run", f"dispatch={NAME}", "dispatch.label=x").dispatch)["label"] == "x"
    cfg = moezoo.compose("resume=run", "dispatch=gather", "steps=2")
    assert cfg.dispatch == Gather()
    # A notebook gives the value itself.
    cfg = dataclasses.replace(cfg, dispatch=mine("second"))
    assert moezoo.execution(cfg).dispatch == mine("second")
    assert dataclasses.replace(moezoo.execution(cfg), dispatch=mine()).dispatch == mine()
    run = moezoo.train(cfg)
    assert [row["step"] for row in run.history] == [1, 2]
    assert read_yaml("run/config.yaml")["dispatch"] == {"name": NAME, "chunks": 1, "label": "second"}
    out = console("evaluate", "run_dir=run", f"dispatch={NAME}")[1]
    assert f"{run.evaluation.loss:.6f}" in out


def test_a_value_whose_class_no_command_can_find_is_not_trained():
    class Outer:
        @dataclasses.dataclass(frozen=True)
        class Mine(Gather):
            pass

    cfg = dataclasses.replace(moezoo.compose("run_dir=run"), dispatch=Outer.Mine())
    assert moezoo.execution(cfg).dispatch == Outer.Mine()
    message = refusal(cfg, function=moezoo.train)
    assert message.startswith(f"dispatch={__name__}.test_")
    assert "Mine is defined inside a function or a class" in message
    assert "at the top of a module" in message
    assert not Path("run").exists()


def test_a_run_of_a_notebook_says_how_to_go_on(monkeypatch, tmp_path):
    """A class of a script or a notebook is recorded, and found again only there."""
    monkeypatch.syspath_prepend(tmp_path)
    main = vars(importlib.import_module("own_strategy"))["Mine"]
    monkeypatch.setattr(main, "__module__", "__main__")
    cfg = dataclasses.replace(moezoo.compose(), dispatch=main("first"))
    (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(cfg)))
    assert read_yaml("config.yaml")["dispatch"]["name"] == "__main__.Mine"
    message = refusal(f"resume={tmp_path}")
    for part in ("write dispatch=__main__.Mine again there", "dispatch=module.Mine"):
        assert part in message
    monkeypatch.setattr(sys.modules["__main__"], "Mine", main, raising=False)
    assert moezoo.saved_config(tmp_path, "dispatch=__main__.Mine").dispatch == cfg.dispatch


def test_help_and_the_configuration_show_it(console):
    _, out, _ = console("train", f"dispatch={NAME}", "--help")
    assert "dispatch.label=none" in out
    assert "package.module.Class" in out
    assert f"name: {NAME}" in console("train", f"dispatch={NAME}", "--cfg", "job")[1]
    assert console("train", f"dispatch={NAME}", "dispatch.lable=2")[2] == (
        f"error: dispatch.lable: there is no key 'lable' in dispatch {NAME}; did you mean 'label'?\n"
    )
    assert "dispatch.chunks=x: expected a whole number" in console("train", f"dispatch={NAME}", "dispatch.chunks=x")[2]


@pytest.mark.parametrize(
    ("name", "code", "parts"),
    [
        ("nowhere.Mine", "", ["no module 'nowhere'", "dispatch=package.module.Class"]),
        ("other.part.Mine", "", ["no module 'other.part'"]),
        ("other.", "", ["expected the path of a class"]),
        ("other.Mien", STRATEGY, ["other.py", "no class 'Mien'", "did you mean 'Mine'?"]),
        ("other.Mine", "", ["no class 'Mine'", "it has no strategy"]),
        ("other.Mine", "Mine = 3", ["Mine is not a strategy", "moezoo.moe.dispatch.Dispatch"]),
        ("other.Mine", "import nothing_such", ["import of other fails", "nothing_such", "other.py, line 1"]),
        ("other.Mine", "1 / 0", ["import of other fails", "ZeroDivisionError: division by zero", "other.py, line 1"]),
        ("other.Mine", "class Mine(", ["import of other fails", "SyntaxError", "other.py, line 1"]),
        ("other.Mine", STRATEGY.replace("rows(", "row("), ["Mine lacks rows"]),
        ("other.Mine", STRATEGY.replace('"weights"', '"both"'), ["Mine.moves must be"]),
        ("other.Mine", STRATEGY.replace("@dataclasses.dataclass(frozen=True)", ""), ["Mine is not a dataclass"]),
        ("other.Mine", STRATEGY.replace("(frozen=True)", ""), ["import of other fails", "frozen"]),
        ("other.Mine", STRATEGY.replace("label: str =", "label: bytes ="), ["Mine.label", "class attribute"]),
        ("other.Mine", STRATEGY.replace("label: str", 'label: "Srt"'), ["types of Mine's fields", "Srt"]),
        ("other.Mine", STRATEGY.replace(' = "none"', ""), ["dispatch.label is missing"]),
    ],
)
def test_mistakes_are_one_line(tmp_path, name, code, parts):
    (tmp_path / "other.py").write_text(code)
    message = refusal(f"dispatch={name}")
    assert message.startswith("dispatch")
    assert [part for part in parts if part not in message] == []
