"""What TensorBoard, W&B and MLflow have of a run that was killed and continued: each step once, and the last one."""

# pyright: reportMissingImports=false

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from training_runs import steps_only

import moezoo
from moezoo.trackers import TRACKERS, RunStart
from moezoo.trackers.background import Background

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytest.importorskip("mlflow")

from readers import read_mlflow, read_tensorboard, read_wandb

# Libraries of others warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("tensorboard", "wandb", "mlflow")
GROUPS = {"loss": "loss", "val_loss": "loss", "seconds_computing": "speed"}  # in TensorBoard
SIZES = ["layers=1", "embed=16", "heads=2", "kv_heads=1", "head_dim=8", "expert_mlp=8", "vocab=32"]
DATA = ["vocab=32", "documents=40", "eval_sequences=8"]
TINY = [*(f"model.{word}" for word in SIZES), "data=synthetic", *(f"data.{word}" for word in DATA), "mesh=single"]
TINY += ["dispatch=gather", "seq_len=16", "log_every=1", "eval_every=4", "checkpoint_minutes=0"]


def figures(folder, name, figure="loss"):
    """What a tracker has of a figure."""
    if name == "tensorboard":
        return read_tensorboard(folder / name, f"{GROUPS.get(figure, 'run')}/{figure}")
    if name == "wandb":
        return read_wandb(folder / name, figure)
    return read_mlflow(f"sqlite:///{folder}/mlflow/mlflow.db", figure)


def row(step, loss=None):
    return {"step": step, "time": 1.7e9 + step, "loss": 1 / step if loss is None else loss, "by": {"wiki": step}}


def write(folder, name, history, steps, loss=None):
    """Let a tracker write a part of a run: the rows so far, and those of `steps`."""
    lines = []
    writer = Background(TRACKERS[name](), RunStart(folder, {"steps": 9}, [("model", "small")], history), lines.append)
    for step in steps:
        writer.row(row(step, loss), np.ones((1, 4)))
    writer.finish()
    assert lines == []


def once(steps, loss=None):
    return {step: [pytest.approx(1 / step if loss is None else loss, rel=1e-6)] for step in steps}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_killed_goes_on_at_its_checkpoint(tmp_path, name):
    """At step 5 of 8, where later rows are others; then at its end, and with rows that the tracker never got."""
    write(tmp_path, name, [], range(1, 9))
    assert figures(tmp_path, name) == once(range(1, 9))
    write(tmp_path, name, [row(step) for step in range(1, 6)], range(6, 10), loss=7.0)
    assert figures(tmp_path, name) == once(range(1, 6)) | once(range(6, 10), 7.0)
    history = [row(step, 7.0 if step > 5 else None) for step in range(1, 12)]
    write(tmp_path, name, history, [12], loss=7.0)
    assert figures(tmp_path, name) == once(range(1, 6)) | once(range(6, 13), 7.0)
    assert figures(tmp_path, name, "by/wiki") == {step: [step] for step in range(1, 13)}


def test_a_run_keeps_its_identity(tmp_path):
    """Unless MLflow has rows that it cannot remove."""
    for name in ("wandb", "mlflow"):
        write(tmp_path, name, [], [1, 2])
        first = (tmp_path / name / "id").read_text()
        write(tmp_path, name, [row(1), row(2)], [3])
        assert (tmp_path / name / "id").read_text() == first
        write(tmp_path, name, [row(1)], [2])
        assert ((tmp_path / name / "id").read_text() == first) == (name == "wandb")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Eight steps; then again from the checkpoint at step 6, to ten, as after a kill."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    with contextlib.chdir(folder.parent):
        moezoo.train(
            moezoo.compose(*TINY, "steps=8", "checkpoint_every=3", f"run_dir={folder}", f"tracker=[{','.join(NAMES)}]")
        )
        with steps_only():
            again = moezoo.train(moezoo.compose(f"resume={folder}/checkpoints/6", f"run_dir={folder}", "steps=10"))
    return again


@pytest.mark.parametrize("name", NAMES)
def test_a_real_run_is_in_each(runs, name):
    rows = [json.loads(line) for line in (runs.folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in rows] == list(range(1, 11))
    for figure in ("loss", "seconds_computing", "peak_bytes", "val_loss"):
        wanted = {each["step"]: [pytest.approx(each[figure], rel=1e-6)] for each in rows if figure in each}
        assert figures(runs.folder, name, figure) == wanted, figure
    assert {path.name for path in runs.folder.parent.iterdir()} == {"a"}


def test_pictures_configuration_and_summary_are_there(tmp_path):
    from matplotlib.figure import Figure
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Figure(figsize=(2, 1), dpi=100).savefig(tmp_path / "loss.png")
    for name in NAMES:
        writer = Background(TRACKERS[name](), RunStart(tmp_path, {"steps": 9}, [("model", "small")], []), print)
        writer.row(row(3), None)
        writer.picture(tmp_path / "loss.png")
        writer.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (image,) = events.Images("pictures/loss")
    assert (image.step, image.width, image.height) == (3, 200, 100)
    assert image.encoded_image_string == (tmp_path / "loss.png").read_bytes()
    for tag, part in (("config/text_summary", b"steps: 9"), ("summary/text_summary", b"model       small")):
        assert part in events.Tensors(tag)[0].tensor_proto.string_val[0]
    assert [event.wall_time for event in events.Scalars("loss/loss")] == [row(3)["time"]]
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [path.read_bytes() for path in run.rglob("*.png")] == [(tmp_path / "loss.png").read_bytes()]
    assert b"small" in next(run.glob("*.wandb")).read_bytes()
    client, name = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db"), (tmp_path / "mlflow" / "id").read_text()
    found = client.get_run(name.split()[1])
    assert (found.info.status, found.info.run_name) == ("FINISHED", tmp_path.name)
    assert "model       small" in found.data.tags["mlflow.note.content"]
    assert {each.path for each in client.list_artifacts(found.info.run_id)} == {"config.yaml", "loss.png"}


def test_nothing_is_imported_before_the_first_row():
    code = "import sys, moezoo; moezoo.compose('tracker=[tensorboard,wandb,mlflow]').tracker.check(); "
    code += "print(*{'tensorboardX', 'wandb', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "\n"
