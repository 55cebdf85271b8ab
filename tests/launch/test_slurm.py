"""The script for Slurm, with stubs of `srun` and `scontrol`: what it starts, when it queues again, how it goes on."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import read_rows

from moezoo.config.run_folders import steps

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm.sh"
# Starts two processes on this machine as Slurm numbers them, and returns the highest of their exit codes.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=2
for process in 0 1; do
  SLURM_PROCID=$process SLURM_LOCALID=$process "$@" > out$process 2> err$process &
  tasks+=($!)
done
echo "${tasks[@]}" > tasks.partial; mv tasks.partial tasks
highest=0
for task in "${tasks[@]}"; do code=0; wait $task || code=$?; highest=$((code > highest ? code : highest)); done
exit $highest
"""
# The command without the sample and the pictures at its end, which take as long as the steps. With UNDISTURBED, a
# folder, the same processes first train that run to its end.
TRAIN = """
import contextlib, os, sys
import moezoo
from training_runs import steps_only
from moezoo.__main__ import run_script

if __name__ == "__main__":
    with steps_only():
        if "UNDISTURBED" in os.environ and "MOEZOO_SUPERVISED" in os.environ:  # and does not only watch another
            words = [word for word in sys.argv[1:] if not word.startswith("run_dir=")]
            with contextlib.redirect_stdout(sys.stderr):
                moezoo.train(moezoo.compose(*words, f"run_dir={os.environ['UNDISTURBED']}"))
        run_script("train")
"""
SIZES = ("model.vocab=32", "model.embed=32", "model.layers=1", "model.expert_mlp=16", "model.head_dim=8", "seq_len=16")
SYNTHETIC = ("data=synthetic", "data.vocab=32", "data.documents=200", "data.document_length=100")
LOGGED = ("steps=50", "log_every=1", "eval_every=0", "data.eval_sequences=16", "checkpoint_minutes=0")
RUN = (*SIZES, *SYNTHETIC, *LOGGED, "schedule=constant", "mesh.expert=2", "distributed.start_seconds=300")


@pytest.fixture
def cluster(tmp_path):
    """Commands of Slurm in this folder, and its variables; those that a caller of the tests has are left out."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\necho "$@" >> scontrol.log\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "JAX_LOCAL"))}
    return {**ours, "PATH": f"{tmp_path}:{ours['PATH']}", "SLURM_JOB_ID": "77", "RUN_DIR": "run"}


def queued(folder):
    """How often a job was queued again."""
    log = folder / "scontrol.log"
    return log.read_text().splitlines() if log.exists() else []


def script(variables, *arguments):
    """Run the script to its end."""
    return subprocess.run([SCRIPT, *arguments], env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (1, 0, False), (2, 0, False), (143, 99, True), (3, 0, True), (137, 4, True), (3, 5, False)],
)
def test_what_the_exit_code_of_a_run_leads_to(cluster, tmp_path, code, restarts, again):
    """A run that was stopped goes on, and one that lost a process does so a number of times; a mistake ends the job."""
    (tmp_path / "ends").write_text(f"#!/bin/bash\nexit {code}\n")
    (tmp_path / "ends").chmod(0o755)
    done = script({**cluster, "TRAIN": "ends", "SLURM_RESTART_COUNT": str(restarts), "MAX_RESTARTS": "5"})
    assert queued(tmp_path) == ["requeue 77"] * again
    assert done.returncode == (0 if again else code)


def test_what_it_starts(cluster, tmp_path):
    """The settings of the caller and three more; all GPUs of a node for its only process, and else those of Slurm."""
    (tmp_path / "shows").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "${JAX_LOCAL_DEVICE_IDS-none}"\n')
    (tmp_path / "shows").chmod(0o755)
    given = {**cluster, "TRAIN": "shows first", "SLURM_GPUS_ON_NODE": "4"}
    for tasks, devices in (("1", "0,1,2,3"), ("4", "none")):
        assert script({**given, "SLURM_NTASKS_PER_NODE": tasks}, "data.path=a b").returncode == 0
        words = (tmp_path / "out1").read_text().splitlines()
        assert words == ["first", "data.path=a b", "run_dir='run'", "resume=auto", "distributed=auto", devices]
    del given["RUN_DIR"]
    assert "RUN_DIR" in script(given).stderr
    options = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.M)
    assert "--requeue" in options
    assert [int(each.partition("@")[2]) >= 120 for each in options if each.startswith("--signal=TERM@")] == [True]


@contextlib.contextmanager
def submitted(variables, run_dir, **more):
    """Start the script with a run of two processes; they end with the block."""
    with socket.socket() as free:  # JAX takes the port from the job's number
        for job in range(4096):
            with contextlib.suppress(OSError):
                free.bind(("localhost", 61440 + job))
                break
    Path("train.py").write_text(TRAIN)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "training")))
    own = {"RUN_DIR": run_dir, "TRAIN": f"{sys.executable} train.py", "SLURM_JOB_ID": str(job), "PYTHONPATH": paths}
    own |= {"JAX_COMPILATION_CACHE_DIR": f"{Path.cwd()}/programs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    job = subprocess.Popen([SCRIPT, *RUN], env={**variables, **own, **more}, start_new_session=True)
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.weekly
def test_a_preempted_run_goes_on(cluster, tmp_path):
    """Stopped by Slurm's signal, it is queued again, and has each row once, to the bit that of an undisturbed run."""
    with submitted(cluster, "cut", UNDISTURBED="whole") as job:
        while not any(line.startswith("step 3/") for line in lines(tmp_path / "out0")):
            assert job.poll() is None, (tmp_path / "err0").read_text()
            time.sleep(0.02)
        for task in (tmp_path / "tasks").read_text().split():  # Slurm signals all processes, and not the script
            os.kill(int(task), signal.SIGTERM)
        assert job.wait(300) == 0, (tmp_path / "err0").read_text()
    assert len(queued(tmp_path)) == 1
    (stopped,) = steps(tmp_path / "cut" / "checkpoints")
    assert 3 <= stopped < 50
    with submitted(cluster, "cut", SLURM_RESTART_COUNT="1") as job:
        assert job.wait(300) == 0, (tmp_path / "err0").read_text()
    assert any(line.startswith("resume") and line.endswith(f"from step {stopped}") for line in lines(tmp_path / "out0"))
    rows = read_rows(tmp_path / "cut")
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert rows == read_rows(tmp_path / "whole")
    assert len(queued(tmp_path)) == 1


def lines(path):
    """The lines that a process has printed so far."""
    return path.read_text().splitlines() if path.exists() else []
