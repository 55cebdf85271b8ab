import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import getbase, setbase
from refusals import refused

from moezoo.config.compose import as_mapping, compose, compose_onto, from_saved, to_yaml
from moezoo.config.overrides import read, read_yaml
from moezoo.errors import UserError
from moezoo.models import DeepSeekConfig
from moezoo.moe.dispatch import Gather
from moezoo.nn.rotary import Yarn
from moezoo.optim import SGD
from moezoo.parallel.mesh import MeshShape


@pytest.fixture(scope="module")
def saved():
    return as_mapping(compose())


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
    assert from_saved(mapping) == compose_onto(mapping) == cfg
    partly = {**mapping, "model": {"family": "deepseek", "router": {"groups": 2}, "yarn": {"factor": 4}}}
    assert from_saved(partly) == cfg


def test_a_value_may_refer_to_a_default():
    assert compose("run_dir=runs/${model.embed}").run_dir == "runs/128"
    assert compose("model=deepseek", "run_dir=${model.router.score}").run_dir == "sigmoid"


def test_the_last_value_of_a_key_holds():
    assert compose("steps=3", "steps=4").steps == 4
    assert compose("steps={a:1}", "steps=2").steps == 2


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
        with refused("mesh=epp8"):
            compose("mesh=epp8")
        assert GlobalHydra.instance().hydra is theirs
        assert (getbase(), JobRuntime.instance().get("name")) == (base, "theirs")
        assert hydra.compose("train", ["steps=7"]) == before
    compose()


def test_a_config_survives_being_saved(tmp_path):
    cfg = compose("model.window=3", "mesh=ep8", "optimizer=sgd", "run_dir=runs/08", "rules.batch=[]")
    (tmp_path / "config.yaml").write_text(to_yaml(as_mapping(cfg)))
    mapping = read_yaml(tmp_path / "config.yaml")
    assert mapping == as_mapping(cfg)
    assert from_saved(mapping) == compose_onto(mapping) == cfg


def test_overrides_on_top_of_a_saved_config():
    mapping = as_mapping(compose("steps=3", "mesh=ep8", "optimizer.beta1=0.5"))
    cfg = compose_onto(mapping, "mesh=single", "dispatch=gather", "model.layers=2")
    assert cfg == compose("steps=3", "optimizer.beta1=0.5", "dispatch=gather", "model.layers=2")
    assert mapping == as_mapping(compose("steps=3", "mesh=ep8", "optimizer.beta1=0.5"))


def test_short_texts_compose_or_are_refused_in_one_line(saved):
    pieces = ["", "steps", "=", "3", "null", "[", "'", "${", "}", ",", "+", "~", " ", "é", "\\", "???"]
    for parts in itertools.product(["steps="], pieces, pieces):
        with contextlib.suppress(UserError):
            compose_onto(saved, "".join(parts))
    for parts in itertools.product(pieces, repeat=2):
        with contextlib.suppress(UserError):
            read(["".join(parts)])
