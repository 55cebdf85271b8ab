import contextlib
import copy
import itertools
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import getbase, setbase
from refusals import by_table

from moezoo.config.compose import as_mapping, compose, compose_onto, from_mapping, to_yaml
from moezoo.config.other_names import RENAMED
from moezoo.config.overrides import read, read_yaml
from moezoo.errors import UserError
from moezoo.models import DeepSeekConfig
from moezoo.moe.dispatch import Gather
from moezoo.nn.yarn import Yarn
from moezoo.optim import SGD
from moezoo.parallel.mesh import MeshShape
from moezoo.training.saved import saved_config


@pytest.fixture(scope="module")
def saved():
    return as_mapping(compose())


@pytest.fixture(scope="module")
def deepseek():
    return as_mapping(compose("model=deepseek"))


def refused(function, *arguments):
    """Return the one line with which `function` refuses its arguments."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    assert caught.value.__cause__ is None  # a notebook would print the cause too
    for internal in ("https://", "omegaconf", "full_key", "ConfigStore", "Traceback", "--multirun"):
        assert internal not in message
    return message


# What composes


def test_groups_then_keys_whatever_their_order():
    cfg = compose("mesh.fsdp=2", "mesh=fsdp2_ep4", "steps=3", "dispatch=gather", "optimizer=sgd", "mesh.expert=1")
    assert cfg.mesh == MeshShape(fsdp=2)
    assert (cfg.steps, cfg.dispatch, cfg.optimizer) == (3, Gather(), SGD())


def test_sections_inside_a_section():
    """A key that is not set has the model's default, not that of the section's class."""
    cfg = compose("model=deepseek", "model.router.groups=2", "model.yarn.factor=4")
    assert cfg.model == DeepSeekConfig(router=replace(DeepSeekConfig().router, groups=2), yarn=Yarn(4.0))
    mapping = as_mapping(cfg)
    assert (mapping["model"]["router"]["groups"], mapping["model"]["yarn"]["factor"]) == (2, 4.0)
    assert from_mapping(mapping) == compose_onto(mapping) == cfg
    partly = {**mapping, "model": {"family": "deepseek", "router": {"groups": 2}, "yarn": {"factor": 4}}}
    assert from_mapping(partly) == cfg


def test_a_value_may_refer_to_a_default():
    assert compose("run_dir=runs/${model.embed}").run_dir == "runs/128"
    assert compose("model=deepseek", "run_dir=${model.router.score}").run_dir == "sigmoid"


def test_the_last_value_of_a_key_holds():
    assert compose("steps=3", "steps=4").steps == 4


def test_values_are_typed_and_replaced_not_merged():
    cfg = compose(
        "optimizer.learning_rate=1", "model.window=7", "rules.compute={}", 'run_dir="a=b"', "optimizer.clip_norm=null"
    )
    assert type(cfg.optimizer.learning_rate) is float
    assert vars(cfg.model)["window"] == 7
    assert cfg.rules.compute == {}
    assert cfg.run_dir == "a=b"
    assert cfg.optimizer.clip_norm is None


def test_one_value_may_refer_to_another():
    cfg = compose("run_dir=runs/${model.embed}_${seed}", "model.embed=64", "seed=5")
    assert cfg.run_dir == "runs/64_5"


@pytest.mark.parametrize("plus", ["", "+"])
def test_rules_take_new_logical_axes(saved, plus):
    cfg = compose_onto(saved, f"{plus}rules.store.vocab=[tensor]", "rules.store.embed=[fsdp]")
    assert cfg.rules.store["vocab"] == ("tensor",)
    assert cfg.rules.store["embed"] == ("fsdp",)
    assert cfg.rules.store["expert"] == ("expert",)


def test_nothing_is_written_and_no_folder_changed_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose("mesh=ep8")
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_inside_a_program_that_uses_hydra():
    with hydra.initialize_config_module("moezoo.conf", job_name="theirs", version_base="1.3"):
        setbase("1.2")
        theirs, base = GlobalHydra.instance().hydra, getbase()
        before = hydra.compose("train", ["steps=7"])
        assert compose("mesh=ep8").mesh.expert == 8
        refused(compose, "mesh=epp8")
        assert GlobalHydra.instance().hydra is theirs
        assert (getbase(), JobRuntime.instance().get("name")) == (base, "theirs")
        assert hydra.compose("train", ["steps=7"]) == before
    compose()


def test_a_config_survives_being_saved(tmp_path):
    cfg = compose("model.window=3", "mesh=ep8", "optimizer=sgd", "run_dir=runs/08", "rules.batch=[]")
    (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(cfg)))
    mapping = read_yaml(tmp_path / "config.yaml")
    assert mapping == as_mapping(cfg)
    assert from_mapping(mapping) == compose_onto(mapping) == cfg


def test_overrides_on_top_of_a_saved_config():
    mapping = as_mapping(compose("steps=3", "mesh=ep8", "optimizer.beta1=0.5"))
    cfg = compose_onto(mapping, "mesh=single", "dispatch=gather", "model.layers=2")
    assert cfg == compose("steps=3", "optimizer.beta1=0.5", "dispatch=gather", "model.layers=2")
    assert mapping == as_mapping(compose("steps=3", "mesh=ep8", "optimizer.beta1=0.5"))


# What is refused

ASKED = [  # before anything is composed
    (["mesh=epp8"], ["mesh=epp8", "no such mesh", "'ep8'"]),
    (["mesh=ep4"], ["mesh=ep4", "no such mesh", "mesh.expert=4"]),
    (["mesh=fsdp2_ep8"], ["no such mesh", "mesh.fsdp=2 mesh.expert=8"]),
    (["lr=1e-3"], ["'lr'", "'optimizer.learning_rate'"]),
    (["batch=16"], ["'batch'", "'batch_size'"]),
    (["model.d_model=3"], ["model.d_model", "'model.embed'"]),
    (["mesh=foo"], ["mesh=foo", "valid: ep8, fsdp2_ep4, fsdp4_ep2, fsdp8, single"]),
    (["mesh=null"], ["mesh=null", "valid: ep8"]),
    (["mesh=3"], ["mesh=3", "valid: ep8"]),
    (["mesh="], ["mesh=:", "valid: ep8"]),
    (["mesh=[ep8,single]"], ["mesh=[ep8, single]", "no such mesh"]),
    (["mesh={expert:4}"], ["mesh={expert: 4}", "no such mesh"]),
    (["rules=fsdp_e"], ["rules=fsdp_e", "'fsdp_ep'", ".yaml"]),
    (["mesh=ep8", "mesh=single"], ["mesh=single", "mesh=ep8", "choose one"]),
    (["mesh=ep8,single"], ["mesh=ep8,single", "one configuration", "loop"]),
    (["steps=range(1,3)"], ["steps=range(1,3)", "one configuration"]),
    (["steps=glob(*)"], ["steps=glob(*)", "one configuration"]),
    (["rules.batch=data,fsdp"], ["rules.batch=data,fsdp", "rules.batch=[a,b]"]),
    (["steps"], ["steps:", "found no '='", "steps=VALUE"]),
    (["steps 5"], ["steps 5", "found no '='", "KEY=VALUE"]),
    (["ep8"], ["ep8:", "mesh=ep8"]),
    ([""], ["KEY=VALUE"]),
    (["=3"], ["=3", "found nothing"]),
    (["st eps=3"], ["st eps=3", "'st eps'"]),
    (["hydra/launcher=x"], ["hydra/launcher=x", "'hydra/launcher'"]),
    (["mesh@foo=ep8"], ["mesh@foo=ep8", "'mesh@foo'"]),
    (["steps=[1"], ["steps=[1", "cannot be read", "brackets"]),
    (["run_dir=a=b"], ["run_dir=a=b", "'run_dir=\"a=b\"'"]),
    (["run_dir=${"], ["run_dir=${", "cannot be read"]),
    (["steps=foo(3)"], ["steps=foo(3)", "cannot be read"]),
    (["steps=3\nseed=4"], [r"steps=3\nseed=4", 'found 2; pass each apart: "steps=3", "seed=4"']),
    (["steps=" + "9" * 5000], ["cannot be read"]),
    (["steps=" + "[" * 300], ["cannot be read"]),
    (["+steps=1"], ["+steps=1", "cannot add", "steps=1"]),
    (["+foo=1"], ["foo", "no key 'foo'", "valid: adapter, batch_size"]),
    (["+steps=5"], ["+steps=5", "cannot add", "write steps=5"]),
    (["++steps=5"], ["++steps=5", "'++' cannot add", "write steps=5"]),
    (["++rules.store.vocab=[fsdp]"], ["'++' cannot add", "write rules.store.vocab=[fsdp]"]),
    (["~model"], ["~model", "nothing can be removed", "model=VALUE"]),
    (["~model=mixtral"], ["~model=mixtral", "nothing can be removed"]),
]

SET = [  # when keys are set
    ("modle=mixtral", ["modle", "'model'"]),
    ("model.layer=3", ["model.layer:", "model mixtral", "'layers'"]),
    ("step=3", ["step:", "'steps'"]),
    ("layers=3", ["layers:", "'model.layers'"]),
    ("nothing_like_it=3", ["nothing_like_it", "valid: adapter, batch_size, ", "steps"]),
    ("hydra.run.dir=x", ["hydra.run.dir", "no key 'hydra'"]),
    ("dispatch.foo=1", ["dispatch.foo", "dispatch ring", "valid: buffer_factor"]),
    ("data.path=x", ["data.path", "data python_stdlib", "valid: eval_sequences"]),
    ("mesh.exprt=1", ["mesh.exprt", "'expert'"]),
    ("steps.foo=3", ["steps.foo", "steps=VALUE"]),
    ("model.layers.foo=3", ["model.layers.foo", "model.layers=VALUE"]),
    ("rules.store.embed.foo=3", ["rules.store.embed.foo", "rules.store.embed=VALUE"]),
    ("execution=3", ["execution=3", "section", "execution.dtype=VALUE"]),
    ("execution={dtype:float32}", ["execution={dtype: float32}", "section"]),
    ("model.family=mixtral", ["model.family=mixtral", "model=NAME"]),
    ("optimizer.name=sgd", ["optimizer.name=sgd", "optimizer=NAME"]),
    ("steps=${nope}", ["steps=${nope}", "refers to nothing", "${KEY}"]),
    ("steps=${steps}", ["steps=${steps}", "refers to nothing"]),
    ("run_dir=x${oc.env:NO_SUCH_VARIABLE}", ["run_dir=x${oc.env:NO_SUCH_VARIABLE}", "refers to nothing"]),
    ("rules.batch=[${nope}]", ["rules.batch=[${nope}]", "refers to nothing"]),
    ("steps=???", ["steps=???", "refers to nothing"]),
    ("steps=abc", ["steps=abc", "whole number", "found text"]),
    ("steps=1.5", ["steps=1.5", "whole number", "found a decimal number"]),
    ("steps=true", ["steps=true", "whole number", "found true or false"]),
    ("steps=", ["steps=:", "whole number", "found nothing"]),
    ("steps=[1]", ["steps=[1]", "whole number", "found a list"]),
    ("steps=${model}", ["steps={family: mixtral", "whole number", "found names and values"]),
    ("model.layers=null", ["model.layers=null", "whole number", "found null"]),
    ("model.window=x", ["model.window=x", "whole number", "or null", "found text"]),
    ("execution.dtype=float16", ["execution.dtype=float16", "float32, bfloat16"]),
    ("execution.remat=null", ["execution.remat=null", "full, offload, dots, none"]),
    ("optimizer.learning_rate=nan", ["optimizer.learning_rate=nan", "no finite number"]),
    ("run_dir=2026", ["run_dir=2026", "text, or null", "found a whole number", "quotes"]),
    ("run_dir=", ["run_dir=:", "text", "found nothing"]),
    ("rules.store.embed=fsdp", ["rules.store.embed=fsdp", "a list", "found text"]),
    ("rules.batch=[1]", ["rules.batch[0]=1", "text", "found a whole number"]),
    ("rules.store=3", ["rules.store=3", "names and their values", "found a whole number"]),
    ("rules.store.foo=[fsdp]", ["rules.store.foo", "no such logical axis"]),
    ("rules.store.embed=[fsd]", ["rules.store.embed", "'fsd'", "'fsdp'"]),
    ("model.experts_per_token=9", ["model.experts_per_token=9", "model.experts=8"]),
    ("model.groups=2", ["model.groups", "no key 'groups' in model mixtral"]),
]

RANGES = {
    "at least 1": ["batch_size=0", "execution.microbatches=0", "mesh.expert=0"],
    "at most 2147483647": ["steps=3000000000", "batch_size=3000000000", "model.window=4000000000"],
    "at least 2": ["seq_len=1"],
    "at least 0": [
        "steps=-1",
        "eval_every=-1",
        "checkpoint_every=-1",
        "log_every=-1",
        "data.eval_sequences=-1",
        "optimizer.weight_decay=-0.1",
        "schedule.warmup_steps=-1",
    ],
    "at least 0 and at most 4294967295": ["seed=-1"],
    "at least 0 and at most 1": ["schedule.final_ratio=1.5", "schedule.final_ratio=-0.5"],
    "at least 0 and below 1": ["optimizer.beta1=1", "optimizer.beta2=-0.1"],
    "above 0": ["optimizer.learning_rate=0", "optimizer.epsilon=0", "optimizer.clip_norm=0"],
}
SET += [(override, [override, must]) for must, overrides in RANGES.items() for override in overrides]


@pytest.mark.parametrize(("overrides", "parts"), ASKED, ids=[" ".join(overrides)[:30] for overrides, _ in ASKED])
def test_refuses_what_cannot_be_asked(overrides, parts, saved):
    message = refused(compose, *overrides)
    assert [part for part in parts if part not in message] == []
    assert refused(compose_onto, saved, *overrides) == message


@pytest.mark.parametrize(("override", "parts"), SET, ids=[override for override, _ in SET])
def test_refuses_keys_and_values(override, parts, saved):
    """What `read` finds before the configuration is composed has the same message."""
    message = refused(compose_onto, saved, override)
    assert [part for part in parts if part not in message] == []
    with contextlib.suppress(UserError):
        read([override])
        return
    assert refused(read, [override]) == message


@by_table(
    """
    override => start
    model.router.scor=softmax => model.router.scor: there is no key 'scor' in model.router; did you mean
    model.router.score=hard => model.router.score=hard: expected one of softmax, sigmoid
    model.router.score.x=1 => model.router.score.x: model.router.score is one value
    model.router=3 => model.router=3: model.router is a section
    model.router={groups:1} => model.router={groups: 1}: model.router is a section
    model.router.groups=0 => model.router.groups=0 must be at least 1
    model.router.groups=3 => model.experts=16 is not divisible by model.router.groups=3
    model.router.kept_groups=5 => model.router.kept_groups=5 exceeds model.router.groups=4; choose at most 4
    model.router.groups=16 => model.router.group_score=sum_of_top2 needs two experts
    model.experts_per_token=9 => model.experts_per_token=9 exceeds the 8 experts of model.router.kept_groups=2
    model.experts_per_token=17 => model.experts_per_token=17 exceeds model.experts=16
    model.router.bias_rate=-1 => model.router.bias_rate=-1 must be at least 0
    model.yarn.factor=0.5 => model.yarn.factor=0.5 must be at least 1
    model.yarn.length=0 => model.yarn.length=0 must be at least 1
    model.load_balance=-1 => model.load_balance=-1 must be at least 0
    """
)
def test_refuses_keys_and_values_of_sections_inside(override, start, deepseek):
    assert refused(compose_onto, deepseek, override).startswith(start)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_refused_with_its_new_name(old, new, deepseek):
    """In an override, and in a saved configuration."""
    message = f"{old} is now {new}"
    assert refused(compose_onto, deepseek, f"{old}=1") == message
    mapping = copy.deepcopy(deepseek)
    section, name = new.removeprefix("model.").split(".")
    mapping["model"][old.removeprefix("model.")] = mapping["model"][section].pop(name)
    assert refused(from_mapping, mapping) == message


def test_an_older_run_is_left_to_the_version_that_reads_it(tmp_path, deepseek):
    mapping = copy.deepcopy(deepseek)
    mapping["model"]["yarn_factor"] = 1.0
    (tmp_path / "config.yaml").write_text(to_yaml(mapping))
    for key, message in (
        ("resume", refused(compose, f"resume={tmp_path}")),
        ("run_dir", refused(saved_config, tmp_path)),
    ):
        assert message.startswith(f"{key}={tmp_path}: moezoo 0.1 saved this run")
        assert "(model.yarn_factor is now model.yarn.factor)" in message


@pytest.mark.parametrize("override", ["steps=abc", "steps=${nope}", "dispatch.foo=1", "model.router=3"])
def test_refuses_alike_from_the_start_and_on_top(override, deepseek):
    assert refused(compose, "model=deepseek", override) == refused(compose_onto, deepseek, override)


def test_a_value_that_is_no_section_does_not_become_one(saved):
    assert "steps={a: 2}: expected a whole number" in refused(compose_onto, saved, "steps={a:1}", "steps.a=2")
    assert compose_onto(saved, "steps={a:1}", "steps=2").steps == 2
    assert "names and their values" in refused(compose_onto, saved, "rules.store=3")
    assert "rules.store.embed" in refused(compose_onto, saved, "rules.store=3", "rules.store.embed=[fsdp]")


def test_refuses_keys_of_a_class_that_was_not_chosen():
    message = refused(compose, "optimizer=sgd", "optimizer.beta1=0.5")
    assert message.startswith(
        "optimizer.beta1: there is no key 'beta1' in optimizer sgd; valid: clip_norm, learning_rate"
    )
    assert message.endswith("; optimizer=adamw and optimizer=muon have it")


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda m: m.pop("steps"), "steps is missing; set it to a whole number"),
        (lambda m: m.update(stepps=3), "stepps: there is no key 'stepps'; did you mean 'steps'?"),
        (lambda m: m["dispatch"].update(name="rign"), "dispatch.name=rign: no such dispatch; did you mean 'ring'?"),
        (lambda m: m["model"].pop("family"), "model.family is missing; set it to one of deepseek, mixtral"),
        (lambda m: m.update(model=3), "model=3: expected a section with keys, found a whole number"),
        (lambda m: m.update(execution=None), "execution=null: expected a section with keys, found null"),
    ],
)
def test_refuses_a_damaged_saved_config(change, start, saved):
    mapping = copy.deepcopy(saved)
    change(mapping)
    assert refused(from_mapping, mapping).startswith(start)
    assert refused(compose_onto, mapping, "mesh=ep8").startswith(start)


def test_short_texts_compose_or_are_refused_in_one_line(saved):
    pieces = ["", "steps", "=", "3", "null", "[", "'", "${", "}", ",", "+", "~", " ", "é", "\\", "???"]
    for parts in itertools.product(["steps="], pieces, pieces):
        with contextlib.suppress(UserError):
            compose_onto(saved, "".join(parts))
    for parts in itertools.product(pieces, repeat=2):
        with contextlib.suppress(UserError):
            read(["".join(parts)])
