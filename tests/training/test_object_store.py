"""A run in an object store: the same rows and arrays as on a disk, and no checkpoint before its last file."""

import builtins
import json
import signal

import jax
import pytest
from object_store import object_store
from refusals import refused
from training_runs import assert_same_models, read_rows, repeatable, steps_only, train_with_signal

import moezoo
from moezoo.config.run_folders import steps
from moezoo.host.remote import as_path
from moezoo.training import checkpoint
from moezoo.training.checkpoint import Checkpoints
from moezoo.training.metrics import read_metrics

RUN = ("mesh=fsdp2_ep4", "checkpoint_every=2", "eval_every=0", "steps=8", "frozen=['*.experts.gate']")


@pytest.fixture(scope="module", autouse=True)
def _steps_only():
    with steps_only():
        yield


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "buckets") as store:
        yield store


def test_a_run_in_a_store_is_that_on_a_disk(tiny, store, tmp_path, monkeypatch):
    """Also stopped, and continued by the same command, over a checkpoint that is not complete."""
    disk = moezoo.train(moezoo.compose(*tiny, *RUN, f"run_dir=file://{tmp_path}/disk"))
    words = (*tiny, *RUN, "run_dir=gs://bucket/run", "resume=auto")
    stopped = train_with_signal(monkeypatch, 5, signal.SIGTERM, *words)
    assert str(stopped).endswith("resume=gs://bucket/run")
    folder = as_path("gs://bucket/run")
    assert steps(folder / "checkpoints") == [4, 5]
    left = store.at("gs://bucket/run/checkpoints/7/model/d/left")
    left.parent.mkdir(parents=True)
    left.write_text("half")
    again = moezoo.train(moezoo.compose(*words))
    assert not left.exists()
    assert steps(folder / "checkpoints") == [6, 8]
    assert repeatable(read_metrics(folder / "metrics.jsonl", until=99)) == read_rows(disk.folder)
    assert_same_models(again.model, disk.model)
    loaded, cfg = moezoo.load_run("gs://bucket/run/checkpoints/8")
    assert_same_models(jax.device_get(loaded), jax.device_get(disk.model))
    assert cfg.run_dir is None
    with refused("run_dir=gs://bucket/run already holds a run", "resume=gs://bucket/run"):
        moezoo.train(moezoo.compose(*words[:-1]))

    sums = store.at("gs://bucket/run/checkpoints/8/sha256.json")
    sums.write_text(json.dumps({"about.json": "", **json.loads(sums.read_text())}).replace('": "', '": "0', 1))
    with refused("gs://bucket/run/checkpoints/8 is damaged", "step 6 is complete"):
        moezoo.load_run("gs://bucket/run")
    sums.unlink()  # it was never complete
    with refused("run_dir=gs://bucket/run/checkpoints/8: no such checkpoint", "there are 6"):
        moezoo.load_run("gs://bucket/run/checkpoints/8")


def test_a_checkpoint_ends_before_its_files_are_removed(store, monkeypatch):
    """A process that dies while it removes an old one leaves nothing that looks complete."""
    checkpoints = as_path("gs://bucket/checkpoints")
    for name in ("sha256.json", "about.json"):
        (checkpoints / "3" / name).write_text("{}")
    monkeypatch.setattr(checkpoint, "remove_folder", lambda folder: None)
    assert steps(checkpoints) == [3]
    checkpoint.remove_beyond(checkpoints, 2)
    assert steps(checkpoints) == []
    assert (checkpoints / "3" / "about.json").exists()


def test_what_cannot_be_in_a_store_is_refused(tiny, store):
    for words, parts in (
        (["run_dir=s3://bucket/run"], ["s3://bucket/run", "gs://"]),
        *(
            ([f"run_dir={near}"], [near, "file:///FOLDER"])
            for near in ("GS://b/x", "gs:/b/x", "file://localhost/x", "gs://")
        ),
        (["init_from=gs://bucket/run"], ["init_from=gs://bucket/run", "run_dir and resume"]),
        (["run_dir=gs://bucket/run", "tracker=recorders.Recorder"], ["run_dir=gs://bucket/run", "leave tracker out"]),
    ):
        with refused(*parts):
            moezoo.train(moezoo.compose(*tiny, *RUN, *words))
    assert not store.root.exists()


def test_a_missing_library_is_named(monkeypatch):
    really_import = builtins.__import__

    def without(name, *args, **options):
        if name == "gcsfs":
            raise ImportError(name)
        return really_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with refused("gs://bucket/run", 'pip install "moezoo[gcs]"'):
        moezoo.load_run("gs://bucket/run")


def test_rows_are_there_before_their_checkpoint(tiny, store, monkeypatch):
    """A run that is killed after a save has every row until then."""
    save, found = Checkpoints.save, {}

    def saved(self, step, trees, about, best=None):
        found[step] = [row["step"] for row in read_metrics(self.folder.parent / "metrics.jsonl", until=99)]
        save(self, step, trees, about, best)

    monkeypatch.setattr(Checkpoints, "save", saved)
    moezoo.train(moezoo.compose(*tiny, *RUN, "run_dir=gs://bucket/run"))
    assert found == {step: list(range(1, step + 1)) for step in (2, 4, 6, 8)}
