"""Two processes with four devices each train like one process with eight, and end together."""

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
from training_runs import read_rows

import moezoo
from moezoo.training.checkpoint import steps

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
COMMON = ("mesh=fsdp2_ep4", "checkpoint_every=4", "eval_every=6", "steps=8")
SECONDS = 600  # far above what any process here takes


def assert_near(ours, theirs):
    """Every figure of every row agrees within rounding: sums between processes have another order."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.fixture
def start(tmp_path, shared_cache):
    """Start a command as processes 0 and 1, numbered by hand or as by Slurm; they end with the test."""
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
    """Wait; return exit codes, output without the lines of the library that connects CPUs, and errors."""
    codes = [one.wait(SECONDS) for one in pair]
    # Threads of that library print at the same time, so the ends of their lines may follow each other.
    texts = ((folder / f"out{i}").read_text().splitlines() for i in (0, 1))
    out = [[line for line in text if line and "peer ranks" not in line] for text in texts]
    return codes, out, [(folder / f"err{i}").read_text() for i in (0, 1)]


def wait_for_line(path, start):
    """Wait until a file has a line that starts with `start`."""
    for _ in range(SECONDS * 20):
        if any(line.startswith(start) for line in path.read_text().splitlines()):
            return
        time.sleep(0.05)
    raise AssertionError(path.read_text())


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory):
    """Eight steps in this process."""
    return moezoo.train(moezoo.compose(*tiny, *COMMON, f"run_dir={tmp_path_factory.mktemp('runs')}/one"))


def stop_step(out):
    """The step after which both processes print that they stopped."""
    (at,) = {int(line.split("after step ")[1].split(",")[0]) for text in out for line in text if "stopped by" in line}
    return at


def test_two_processes_train_as_one(start, one, tiny, tmp_path):
    """A run of two, resumed by one; then by two again, whom Slurm numbers, and stopped by a signal to one of them."""
    codes, out, errors = ends(start(*tiny, *COMMON, "run_dir=two"), tmp_path)
    assert codes == [0, 0], errors
    assert errors == ["", ""]
    assert out[1] == []
    assert sum(line.startswith("step ") for line in out[0]) == 8
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "routing.png", "expert_load.png", "checkpoints"}
    assert "distributed:\n  name: none" in (tmp_path / "two" / "config.yaml").read_text()
    two = read_rows(tmp_path / "two")
    assert_near(two, read_rows(one.folder))
    saved, _ = moezoo.load_run(tmp_path / "two")
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(one.model), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-6)
    as_one = moezoo.train(moezoo.compose(f"resume={tmp_path}/two/checkpoints/4", "run_dir=as_one"))
    assert_near(read_rows(as_one.folder), two)

    # With as many processes every row is the same to the bit, except that this run is not evaluated at step 8.
    pair = start("resume=two/checkpoints/4", "run_dir=again", "steps=100000", how="auto")
    wait_for_line(tmp_path / "out0", "step 12/")
    pair[1].send_signal(signal.SIGTERM)
    codes, out, errors = ends(pair, tmp_path)
    assert codes == [143, 143]
    assert errors == ["", ""]
    assert steps(tmp_path / "again" / "checkpoints")[-1] == stop_step(out)
    del two[7]["val_loss"]
    assert read_rows(tmp_path / "again")[:8] == two


def test_a_dead_process_ends_both(start, one, tmp_path):
    """In one line. The run resumes a checkpoint of one process, and saves by the clock of the first one alone."""
    run_dir = tmp_path / "two"
    by_clock = ("checkpoint_every=0", "checkpoint_minutes=1e-9", "checkpoint_keep=99")
    pair = start(f"resume={one.folder}/checkpoints/4", f"run_dir={run_dir}", "steps=100000", *by_clock)
    wait_for_line(tmp_path / "out0", "step 20/")
    pair[1].kill()
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [3, -signal.SIGKILL]
    assert_near(read_rows(run_dir)[:4], read_rows(one.folder)[:4])
    saved = steps(run_dir / "checkpoints")
    assert saved[0] == 5  # the first save is due before the first step
    assert errors[0].startswith("error: process 1 of the run ended ")
    assert errors[0].endswith(
        f"the last checkpoint is step {saved[-1]}: start all processes again with resume={run_dir}\n"
    )
    assert errors[0].count("\n") == 1
    assert errors[1] == ""


def assert_one_line_each(errors, *starts):
    """Each process wrote one line, which starts as given."""
    assert [text.count("\n") for text in errors] == [1] * len(errors), errors
    for found, expected in zip(errors, starts, strict=True):
        assert found.startswith(expected), found


def test_mistakes_end_all_with_a_line_each(start, tiny, tiny_text, tmp_path):
    """A mistake that one process makes, and different settings."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "text.txt").write_text("abc " * 1000)
    (tmp_path / "1").mkdir()
    pair = start(*tiny_text, "mesh=fsdp2_ep4", "data.path=text.txt", folders=("0", "1"))
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    mistake = "data.path=text.txt does not exist"
    assert_one_line_each(errors, f"process 0: error: process 1: {mistake}", f"process 1: error: {mistake}")

    codes, _, errors = ends(start(*tiny, "mesh=fsdp2_ep4", own=("seed=3", "seed=4")), tmp_path)
    assert codes == [2, 2]
    mistake = "error: processes were started differently: seed is 3 on process 0 and 4 on process 1"
    assert_one_line_each(errors, f"process 0: {mistake}", f"process 1: {mistake}")


def test_a_process_that_finds_no_other(start, tiny, tmp_path):
    """It waits for `start_seconds`, and ends with one line."""
    pair = start(*tiny, "mesh=fsdp2_ep4", "distributed.start_seconds=1", "distributed.processes=3")
    codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    assert_one_line_each(errors, *["error: the processes did not all meet at localhost:"] * 2)
