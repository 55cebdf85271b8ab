"""`tracker=`: one, several, one of the user's own; and every mistake in one line before anything runs."""

import dataclasses
import importlib.util
import os

from recorders import Raiser, Recorder
from refusals import refused

import moezoo
from moezoo.config.compose import as_mapping, compose, from_saved, to_yaml
from moezoo.parallel import distributed
from moezoo.trackers import NoTracker, RunStart, Several
from moezoo.trackers.to_tensorboard import TensorBoard
from moezoo.trackers.to_wandb import WandB
from moezoo.training.writers import check_writers, make_writers


def test_several_trackers_have_their_own_settings():
    cfg = compose("tracker.members.wandb.project=mine", "tracker=[tensorboard,wandb]")
    assert cfg.tracker == Several(members={"tensorboard": TensorBoard(), "wandb": WandB(project="mine")})
    assert from_saved(as_mapping(cfg)) == cfg
    assert compose("tracker=wandb", "tracker.entity=us").tracker == WandB(entity="us")


def test_a_class_of_ones_own_stands_in_a_list_too(tmp_path):
    word = "tracker=[tensorboard,recorders.Raiser]"
    cfg = compose(word, "tracker.members.Raiser.when=row")
    assert cfg.tracker == Several(members={"tensorboard": TensorBoard(), "Raiser": Raiser("row")})
    saved = as_mapping(cfg)
    assert saved["tracker"]["members"]["Raiser"] == {"name": "recorders.Raiser", "when": "row"}
    (tmp_path / "config.yaml").write_text(to_yaml(saved))
    with refused(f"{word} was saved with this run", f"write {word} again", "such as tracker=none"):
        moezoo.saved_config(tmp_path)
    assert moezoo.saved_config(tmp_path, word, "tracker.members.Raiser.when=row").tracker == cfg.tracker
    assert moezoo.saved_config(tmp_path, "tracker=none").tracker == NoTracker()


def test_runs_of_older_versions_have_none(tmp_path):
    saved = as_mapping(compose())
    del saved["tracker"], saved["watch"]
    (tmp_path / "config.yaml").write_text(to_yaml(saved))
    cfg = moezoo.saved_config(tmp_path)
    assert (cfg.tracker, cfg.watch) == (NoTracker(), False)


def test_what_cannot_work_is_refused_before_anything_runs(monkeypatch, tmp_path):
    """Also in `moezoo.train`, which leaves no folder."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (tmp_path / "file").touch()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "wandb" else find(name))
    for words, parts in (
        ("tracker=wandb tracker.mode=online", ["tracker.mode=online: W&B has no key here; run wandb login"]),
        (
            f"tracker=wandb tracker.folder={tmp_path}/file/x",
            ["tracker.folder=", "cannot write there (Not a directory)"],
        ),
        (f"tracker=[wandb] tracker.members.wandb.folder={tmp_path}/file/x", ["tracker.members.wandb.folder="]),
        ("tracker=several", ["tracker=several has no members; write tracker=[tensorboard,wandb]"]),
    ):
        with refused(*parts):
            moezoo.train(compose(*words.split(), "run_dir=run"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, library in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        with refused(f"tracker={name} needs {library}; pip install 'moezoo[{name}]', or leave it out"):
            moezoo.train(compose(f"tracker=[{name}]", "run_dir=run"))
    with refused("on_row is a str, expected a function of one row; write on_row=print"):
        check_writers(compose(), "text")  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_writers(compose("tracker=wandb", "tracker.mode=online"), print)
    assert sorted(os.listdir()) == ["file"]


def test_only_the_first_process_writes(monkeypatch, tmp_path):
    cfg = dataclasses.replace(compose(), tracker=Recorder())
    run = RunStart(tmp_path, {}, [], [])
    assert len(list(make_writers(cfg, print, run))) == 2
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    assert list(make_writers(cfg, print, run)) == []
