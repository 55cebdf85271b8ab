"""A damaged config.yaml: one line that names the file, for every damage."""

import dataclasses
import math
import os
import sys

import pytest
from refusals import refused

import moezoo
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.config.overrides import read_yaml
from moezoo.optim.base import Schedule
from moezoo.optim.sgd import SGD
from moezoo.training.saved import check_model, list_changes, list_rate_change

GOOD = to_yaml(as_mapping(moezoo.compose("model.layers=2")))
LENGTH = "seq_len: 128"
BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))

DAMAGED = {
    "nothing": ("", "model is missing"),
    "spaces": (" \n\n", "model is missing"),
    "zeros": ("\0" * 100, "broken YAML"),
    "binary": (b"\xff\xfe\x00" * 9, "is not UTF-8 text"),
    "cut at a line": (GOOD[: GOOD.index("mesh:")], "mesh is missing"),
    "cut in a line": (GOOD[: GOOD.index("fsdp_ep") + 3], "is missing"),
    "cut in a list": ("steps: [1, 2", "broken YAML in line 1"),
    "a list": ("- model\n- mesh\n", "found a list"),
    "a word": ("model", "mesh is missing"),
    "a number": ("3", "the value cannot be read"),
    "a type": (GOOD.replace(LENGTH, "seq_len: long"), "seq_len=long: expected a whole number"),
    "a range": (GOOD.replace(LENGTH, "seq_len: 1"), "seq_len=1 must be at least 2"),
    "a reference": (GOOD.replace(LENGTH, "seq_len: ${seed}"), "seq_len=${seed}: expected a whole number"),
    "a size": (GOOD.replace("layers: 2", "layers: -2"), "model.layers=-2 must be"),
    "a section": (GOOD.replace("guard:", "guard: 3\nother:"), "other: there is no key 'other'"),
    "a strategy": (GOOD.replace("name: ring", "name: [ring]"), "dispatch.name=[ring]: no such dispatch"),
    "a key": (f"{GOOD}\nfoo: 3\n", "there is no key 'foo'"),
    "escapes": (GOOD.replace(LENGTH, r'seq_len: "\e[31mred"'), r"seq_len='\x1b[31mred'"),
    "digits": (GOOD.replace(LENGTH, "seq_len: " + "9" * 5000), "value has 5000 digits"),
    "a tag": ("steps: !!python/object/apply:os.mkdir [pwned]\n", "broken YAML in line 1"),
    "bytes": (GOOD.replace(LENGTH, "seq_len: !!binary aGVsbG8="), "seq_len=b'hello'"),
    "depth": ("a: " + "[" * 100_000, "the value cannot be read"),
    "closed depth": ("a: " + "[" * 500 + "]" * 500, "the value cannot be read"),
    "a bomb": (f"a0: &a0 [x, x, x]\n{BOMB}", "stand for more than 100000 values"),
    "a circle": ("a: &a [*a]\n", "stand for more than 100000 values"),
    "a large file": (f"{GOOD}# {'x' * 2**20}\n", "has more than 1048576 bytes"),
    "a pipe": (os.mkfifo, "is a pipe, not a file"),
    "a folder": (os.mkdir, "is a folder, not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_the_message_names_the_file(tmp_path, damage):
    content, part = DAMAGED[damage]
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        content(path)
    limit = sys.getrecursionlimit()
    for load in (lambda: moezoo.compose(f"resume={path.parent}"), lambda: moezoo.load_run(path.parent)):
        with refused(str(path), part, "to another run"):
            load()
    assert sys.getrecursionlimit() == limit
    assert not (tmp_path / "pwned").exists()


def test_the_undamaged_file_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text(GOOD)
    assert moezoo.saved_config(tmp_path).model.layers == 2


def test_settings_that_an_older_run_does_not_have_are_the_defaults(tmp_path):
    """They are also no change in a run that continues it."""
    saved = as_mapping(moezoo.compose("model.layers=2"))
    del saved["mesh"]["axis_types"], saved["execution"]["delta_rule"]
    (tmp_path / "config.yaml").write_text(to_yaml(saved))
    assert moezoo.saved_config(tmp_path).mesh.axis_types == "auto"
    assert moezoo.saved_config(tmp_path).execution.delta_rule is None
    cfg = moezoo.compose(f"resume={tmp_path}", "mesh.axis_types=explicit")
    assert list_changes(cfg, saved) == ["mesh.axis_types: auto before, explicit now"]
    assert list_changes(moezoo.compose(f"resume={tmp_path}"), saved) == []


def test_aliases_of_a_rules_file_are_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: &x [1, 2]\nb: *x\nc: {<<: {d: *x}}\n")
    assert read_yaml(tmp_path / "mine.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}


def test_a_model_saved_without_a_newer_setting_is_the_same_model(tmp_path):
    """Its default is what such a run had; another value is another model."""
    cfg = moezoo.compose("model=mixtral")
    saved = as_mapping(cfg)
    del saved["model"]["llama3"]
    check_model(cfg, {"config": saved}, tmp_path)
    with refused("model.llama3.factor=8.0 but", f"{tmp_path} was saved with model.llama3.factor=1.0"):
        check_model(moezoo.compose("model=mixtral", "model.llama3.factor=8"), {"config": saved}, tmp_path)


def test_the_rate_of_a_longer_schedule_is_named():
    """A cosine from 1 at step 10 to 0.1: at 0 of 90 steps, at the end, and a third of the way there."""
    words = ("schedule=cosine", "schedule.warmup_steps=10", "optimizer.learning_rate=0.02")
    before = moezoo.compose(*words, "steps=101")
    after, saved = moezoo.compose(*words, "steps=281"), as_mapping(before)
    found = list_rate_change(after, saved, 100)
    wanted = 0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)
    assert found == [
        f"learning rate at step 100: 0.002 by the settings before, {wanted:.6g} now; "
        "schedule=constant optimizer.learning_rate=0.002 keeps the old one"
    ]
    assert list_rate_change(before, saved, 100) == []
    (line,) = list_rate_change(after, saved, 90)  # what it says to write changes nothing
    kept = moezoo.compose(*line.partition("; ")[2].removesuffix(" keeps the old one").split(), "steps=281")
    assert list_rate_change(kept, saved, 90) == []
    zero = as_mapping(moezoo.compose(*words, "steps=101", "schedule.final_ratio=0"))
    (line,) = list_rate_change(after, zero, 100)
    assert line.endswith(" now")


@dataclasses.dataclass(frozen=True)
class Halved(Schedule):
    """A schedule of the user's own: after the warm-up a part of the peak."""

    warmup_steps: int = 0
    part: float = 0.5

    def after_warmup(self, rate, since, left):
        return rate * self.part


@dataclasses.dataclass(frozen=True)
class OwnRule(SGD):
    """An update rule of the user's own."""


def test_the_rate_of_a_schedule_of_the_user():
    """Its own options count, and the rate of an update rule of the user's. Another class is not imported."""
    cfg = moezoo.compose("schedule=constant", "optimizer=sgd", "optimizer.learning_rate=0.02", "steps=100")
    own = dataclasses.replace(cfg, schedule=Halved(), optimizer=OwnRule(learning_rate=0.02))
    saved = as_mapping(own)
    assert list_rate_change(own, saved, 10) == []
    (line,) = list_rate_change(dataclasses.replace(own, schedule=Halved(part=0.25)), saved, 10)
    assert line.startswith("learning rate at step 10: 0.01 by the settings before, 0.005 now; schedule=constant ")
    (line,) = list_rate_change(cfg, saved, 10)
    assert line == f"learning rate at step 10: not compared, as schedule={__name__}.Halved of the run is not imported"
    (line,) = list_rate_change(own, as_mapping(cfg), 10)
    assert line.startswith("learning rate at step 10: 0.02 by the settings before, 0.01 now")
