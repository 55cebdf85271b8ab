"""Two processes of four devices each train as one process of eight, and end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import moezoo
from moezoo.training.checkpoint import steps

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
COMMON = ("mesh=fsdp2_ep4", "checkpoint_every=4", "eval_every=6", "steps=8", "schedule=constant")
SECONDS = 600  # far above what anything here takes, far below forever


def rows(folder):
    """Rows without the figure that a clock decides."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in found]


def near(ours, theirs):
    """Every figure of every row; sums are made in another order between processes than within one."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.fixture
def start(tmp_path, shared_cache):
    """Start a command as processes 0 and 1, by hand or as Slurm would; none outlives the test."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = []

    def process(number, how, arguments, folder):
        here = (f"distributed={how}", "distributed.heartbeat_seconds=10", "distributed.start_seconds=300")
        slurm = {}
        if how == "manual":
            here += (f"distributed.coordinator=localhost:{port}", "distributed.processes=2")
            here += (f"distributed.process={number}",)
        else:
            slurm = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
            slurm |= {"SLURM_NTASKS": "2", "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        with (tmp_path / f"out{number}").open("w") as out, (tmp_path / f"err{number}").open("w") as err:
            command = [sys.executable, str(TRAIN), *here, *arguments]
            return subprocess.Popen(command, env=os.environ | slurm, stdout=out, stderr=err, cwd=tmp_path / folder)

    def both(*arguments, how="manual", own=("", ""), folders=(".", ".")):
        pair = [process(i, how, (*arguments, *filter(None, own[i : i + 1])), folders[i]) for i in (0, 1)]
        running.extend(pair)
        return pair

    yield both
    for one in running:
        if one.poll() is None:
            one.kill()
        one.wait()


def ends(pair, folder):
    """Exit codes; what each wrote, but for the lines of the library that connects CPUs."""
    codes = [one.wait(SECONDS) for one in pair]
    out = [[x for x in (folder / f"out{i}").read_text().splitlines() if "peer ranks" not in x] for i in (0, 1)]
    return codes, out, [(folder / f"err{i}").read_text() for i in (0, 1)]


def reached(path, line):
    """Wait until a file has a line that begins so."""
    for _ in range(SECONDS * 20):
        if any(found.startswith(line) for found in path.read_text().splitlines()):
            return
        time.sleep(0.05)
    raise AssertionError(path.read_text())


def test_two_processes_train_as_one(start, tiny, tmp_path):
    """Saved together, continued by one and back by two; to the bit where the number of processes is the same."""
    codes, out, errors = ends(start(*tiny, *COMMON, "run_dir=two"), tmp_path)
    assert codes == [0, 0], errors
    assert errors == ["", ""]
    assert out[1] == []
    assert sum(line.startswith("step ") for line in out[0]) == 8 + 1  # one line is the summary's
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "loss.png",
        "expert_load.png",
        "checkpoints",
    }
    assert "distributed:\n  name: none" in (tmp_path / "two" / "config.yaml").read_text()
    two = rows(tmp_path / "two")

    one = moezoo.train(moezoo.compose(*tiny, *COMMON, "run_dir=one"))
    near(two, rows(one.folder))
    saved, _ = moezoo.load_run(tmp_path / "two")
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(one.model), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-6)
    as_one = moezoo.train(moezoo.compose(f"resume={tmp_path}/two/checkpoints/4", "run_dir=as_one"))
    near(rows(as_one.folder), two)

    # Slurm's variables say the same; what was saved by two goes on as if nothing had been.
    codes, _, errors = ends(start("resume=two/checkpoints/4", "run_dir=again", how="auto"), tmp_path)
    assert codes == [0, 0], errors
    assert rows(tmp_path / "again") == two


def test_they_end_together(start, tiny, tmp_path):
    """Of one that goes on from one process's checkpoint: a signal to either ends both; so does a death, in one line."""
    moezoo.train(moezoo.compose(*tiny, *COMMON, "run_dir=one"))
    pair = start("resume=one/checkpoints/4", "run_dir=two", "steps=100000")
    reached(tmp_path / "out0", "step 20/")
    pair[1].send_signal(signal.SIGTERM)
    codes, out, errors = ends(pair, tmp_path)
    assert codes == [143, 143]
    assert errors == ["", ""]
    (at,) = {int(line.split("after step ")[1].split(",")[0]) for one in out for line in one if "stopped by" in line}
    assert steps(tmp_path / "two" / "checkpoints")[-1] == at
    near(rows(tmp_path / "two")[:4], rows(tmp_path / "one")[:4])

    pair = start("resume=two", "steps=100000")
    reached(tmp_path / "out0", f"step {at + 10}/")
    pair[1].kill()
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [3, -signal.SIGKILL]
    saved = steps(tmp_path / "two" / "checkpoints")[-1]
    assert errors[0] == (
        "error: process 1 of the run ended or fell silent, so this one ends too; the last checkpoint is step "
        f"{saved}: start all processes again with resume=two\n"
    )
    assert errors[1] == ""


def one_line_each(errors, *texts):
    assert [text.count("\n") for text in errors] == [1] * len(errors), errors
    for found, wanted in zip(errors, texts, strict=True):
        assert found.startswith(wanted), found


def test_mistakes_end_all_with_a_line_each(start, tiny, tmp_path):
    """Of both, of one alone, and where they were told different things."""
    codes, _, errors = ends(start(*tiny, "mesh=fsdp2_ep4", "batch_size=12"), tmp_path)
    assert codes == [2, 2]
    told = "error: batch_size=12 is not divisible by 8"
    one_line_each(errors, f"process 0: {told}", f"process 1: {told}")

    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "text.txt").write_text("abc " * 1000)
    (tmp_path / "1").mkdir()
    text = [x for x in tiny if not x.startswith("data") and "vocab" not in x]
    pair = start(*text, "mesh=fsdp2_ep4", "data=text", "data.path=text.txt", folders=("0", "1"))
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    one_line_each(errors, "process 0: error: process 1: data.path=text.txt", "process 1: error: data.path=text.txt")

    codes, _, errors = ends(start(*tiny, "mesh=fsdp2_ep4", own=("seed=3", "seed=4")), tmp_path)
    assert codes == [2, 2]
    told = "error: processes were started differently: seed is 3 on process 0 and 4 on process 1; start all"
    one_line_each(errors, f"process 0: {told}", f"process 1: {told}")


def test_a_process_that_nobody_meets(start, tiny, tmp_path):
    """It waits as long as it was told, and gives up in one line."""
    pair = start(*tiny, "mesh=fsdp2_ep4", "distributed.start_seconds=1", "distributed.processes=3")
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    one_line_each(errors, *["error: the processes did not all meet at localhost:"] * 2)
