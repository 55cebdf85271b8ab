"""`KEY=package.module.Class`: what a user plugs in, from the command line, from `compose` and as a value."""

import dataclasses
import functools
import importlib
import operator
import sys
from pathlib import Path

import pytest
from refusals import by_table

import moezoo
from moezoo.cli import generate
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.config.overrides import read_yaml
from moezoo.kernels import attention
from moezoo.kernels.grouped_matmul import BACKENDS as GROUPED_MATMUL
from moezoo.kernels.grouped_matmul import register
from moezoo.moe.dispatch import Gather
from moezoo.parallel.kernels import add_backend
from moezoo.parallel.mesh import MeshShape

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
# Something of each kind, and a family of another's configurations.
OTHERS = """
import dataclasses

from moezoo.data import Synthetic
from moezoo.models import MixtralConfig, mixtral
from moezoo.models.family import Family, alike
from moezoo.nn.context_parallel import GatherKept
from moezoo.optim import SGD, Constant, Schedule


@dataclasses.dataclass(frozen=True)
class Source(Synthetic):
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class Rule(SGD):
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class Rate(Constant):
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class Way(GatherKept):
    label: str = "none"


@dataclasses.dataclass(frozen=True)
class Config(MixtralConfig):
    label: str = "none"


Model = Family("mine", Config, alike, mixtral.make_block, mixtral.HUB)
Taken = Family("taken", MixtralConfig, alike, mixtral.make_block, mixtral.HUB)


@dataclasses.dataclass(frozen=True)
class Short(Schedule):
    def after_warmup(self, rate, since, left):
        return rate


@dataclasses.dataclass
class Thawed(Schedule):
    warmup_steps: int = 0

    def after_warmup(self, rate, since, left):
        return rate
"""
KEYS = {
    "model": "others.Model",
    "optimizer": "others.Rule",
    "schedule": "others.Rate",
    "data": "others.Source",
    "execution.context_parallel": "others.Way",
}


@pytest.fixture(autouse=True)
def strategy(tmp_path, monkeypatch):
    """The strategy as a file in the current folder, which is not on the path, as for a script."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    yield
    for name in {"own_strategy", "others", "other"} & set(sys.modules):
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
    for figure in (f"{run.evaluation.loss:.6f} nats", f"{run.evaluation.bits:.6f} bits", "perplexity "):
        assert figure in out


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
    for part in ("there, write dispatch=__main__.Mine again", "dispatch=module.Mine"):
        assert part in message
    monkeypatch.setattr(sys.modules["__main__"], "Mine", main, raising=False)
    assert moezoo.saved_config(tmp_path, "dispatch=__main__.Mine").dispatch == cfg.dispatch


def test_a_name_with_a_dot_has_the_nearest_name(console):
    line = (
        "error: model=qwen3.5: expected the path of a family or a name; did you mean 'qwen3_5'? (or package.module.Fam"
    )
    assert console("train", "model=qwen3.5")[2].startswith(line)


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
        ("other.Mine", "Mine = 3", ["Mine is no strategy", "moezoo.moe.dispatch.Dispatch"]),
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


def values(cfg):
    """What stands under each key."""
    return {key: operator.attrgetter(key)(cfg) for key in KEYS}


def test_every_kind_is_named_set_saved_and_named_again():
    """Nothing of a saved configuration is imported; the same names keep the saved fields."""
    words = [f"{key}={name}" for key, name in KEYS.items()]
    cfg = moezoo.compose(*words, *(f"{key}.label=first" for key in KEYS))
    assert {type(value).__module__ for value in values(cfg).values()} == {"others"}
    assert {vars(value)["label"] for value in values(cfg).values()} == {"first"}
    saved = as_mapping(cfg)
    assert saved["model"]["family"] == "others.Model"
    assert saved["execution"]["context_parallel"] == {"name": "others.Way", "label": "first"}
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(saved))
    del sys.modules["others"]
    message = refusal("resume=run")
    assert [word for word in words if message.count(word) != 2] == []
    for left_out in words:
        named = [word for word in words if word != left_out]
        assert f"write {left_out} again" in refusal("run", *named, function=moezoo.saved_config)
        sys.modules.pop("others")
    assert "others" not in sys.modules
    others = ("model=mixtral", "optimizer=sgd", "schedule=cosine", "data=text", "execution.context_parallel=ring")
    assert moezoo.saved_config("run", *others).execution.context_parallel == "ring"
    assert "others" not in sys.modules
    again = moezoo.saved_config("run", *words)
    assert {vars(value)["label"] for value in values(again).values()} == {"first"}
    assert as_mapping(again) == saved
    changed = moezoo.saved_config("run", *words, *(f"{key}.label=second" for key in KEYS))
    assert {vars(value)["label"] for value in values(changed).values()} == {"second"}


def test_values_are_recorded_as_their_names():
    named = moezoo.compose(*(f"{key}={name}" for key, name in KEYS.items()))
    others = sys.modules["others"]
    way = vars(others)["Way"]()
    execution = dataclasses.replace(named.execution, context_parallel=way)
    classes = {"model": "Config", "optimizer": "Rule", "schedule": "Rate", "data": "Source"}
    own = {key: vars(others)[name]() for key, name in classes.items()}
    cfg = dataclasses.replace(moezoo.compose(), execution=execution, **own)
    assert cfg == named
    assert as_mapping(cfg) == as_mapping(named)
    assert moezoo.execution(dataclasses.replace(cfg, mesh=MeshShape(context=2))).context_parallel == way
    assert moezoo.models.family_of(cfg.model) is vars(others)["Model"]


@by_table(
    """
    word => parts
    data=nowhere.Source => no module 'nowhere' ... data=package.module.Class
    model=nowhere.Model => no module 'nowhere' ... model=package.module.Family
    data=others.Sourse => others.py ... no class 'Sourse' ... did you mean 'Source'?
    model=others.Modle => others.py ... no family 'Modle' ... did you mean 'Model'?
    data=others.Rule => Rule is no data source ... moezoo.data.DataSettings
    model=others.Config => Config is no family ... moezoo.models.Family(
    model=others.Taken => MixtralConfig is the configuration of the family mixtral ... a class of its own
    optimizer=others.Rate => Rate is no update rule ... moezoo.optim.UpdateRule
    schedule=others.Short => Short lacks the field warmup_steps ... moezoo.optim.Schedule
    schedule=others.Thawed => Thawed is not a frozen dataclass
    execution.context_parallel=others.Rule => Rule is no context parallelism ... ContextParallel
    execution.context_parallel=rnig => expected one of gather, ring, found rnig
    data=nothing => no such data ... package.module.Class of your own
    data=others.Source data.lable=x => no key 'lable' in data others.Source ... did you mean 'label'?
    execution.context_parallel=others.Way execution.context_parallel.lable=x
        => no key 'lable' ... others.Way ... 'label'
    execution.context_parallel.label=x => execution.context_parallel is one value
    """
)
def test_mistakes_of_every_kind_are_one_line(word, parts):
    message = refusal(*word.split())
    assert message.startswith(word.split()[-1].split("=")[0].removesuffix(".label"))
    assert [part for part in parts.split(" ... ") if part not in message] == []


def test_a_family_is_recorded_where_its_configuration_is():
    moezoo.compose("model=others.Model")
    others = vars(sys.modules["others"])
    del others["Model"]
    message = refusal(dataclasses.replace(moezoo.compose(), model=others["Config"]()), function=as_mapping)
    assert "the family mine is not at the top of the module of Config" in message


@pytest.mark.parametrize("kernel", ["attention", "delta_rule"])
def test_a_registered_backend_is_a_name(kernel):
    """It is one until the process ends; a run that names it is read where it is registered, or with another."""
    module, key = importlib.import_module(f"moezoo.kernels.{kernel}"), f"execution.{kernel}"
    own, named = module.BACKENDS["reference"]._replace(dtypes=("float32",)), operator.attrgetter(key)
    assert "found mine" in refusal(f"{key}=mine")
    module.register("mine", own)
    try:
        module.register("mine", own)
        cfg = moezoo.compose(f"{key}=mine")
        assert named(cfg) == ("mine",)
        assert refusal("mine", own._replace(dtypes=None), function=module.register).startswith(f"{kernel}: ")
        Path("config.yaml").write_text(to_yaml(as_mapping(cfg)))
        assert named(moezoo.saved_config(".")) == ("mine",)
    finally:
        del module.BACKENDS["mine"]
    message = refusal(".", function=moezoo.saved_config)
    assert f"{key}=[mine]" in message
    assert f"{key}=null" in message
    assert named(moezoo.saved_config(".", f"{key}=null")) is None


def test_backends_that_are_refused():
    own = attention.BACKENDS["reference"]
    assert "another backend 'blocked'" in refusal("blocked", GROUPED_MATMUL["reference"], function=register)
    add = functools.partial(add_backend, "attention", {}, kind=attention.Backend)  # past the suite's type checker
    assert "expected a Backend" in refusal("mine", 3, function=add)
    assert "a word such as mine" in refusal("my own", own, function=add)
