"""Two processes with two devices each train like one with four, and end together."""

import contextlib
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
from training_runs import read_rows, steps_only

import moezoo
from moezoo.config.run_folders import steps

pytestmark = pytest.mark.newer

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
TWO_TRAINS = Path(__file__).with_name("two_trains.py")
# Rows are windows of one source, and whole documents with padding of the other.
MIXTURE = (
    "data=mixture",
    "data.eval_sequences=8",
    "data.sources.windows={name: synthetic, vocab: 32, documents: 200, document_length: 100}",
    "data.sources.whole={name: synthetic, vocab: 32, documents: 300, document_length: 6, packing: whole, weight: 2}",
)
COMMON = ("mesh.fsdp=2", "mesh.expert=2", "steps=8", "frozen=['*.experts.gate']", "eval_every=6")
COMMON = (*COMMON, "checkpoint_every=4", "checkpoint_keep=3")  # so 4 stays beside 6, the best, and 8
SECONDS = 600  # far above what any process here takes


def assert_near(ours, theirs):
    """Every figure of every row agrees within rounding: sums between processes have another order."""
    assert len(ours) == len(theirs)
    for one, other in zip(map(flat, ours), map(flat, theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


def flat(row):
    """Return a row with a key for the figure of each source of a mixture."""
    parts = {key: value for key, value in row.items() if isinstance(value, dict)}
    figures = {f"{key}.{name}": figure for key, value in parts.items() for name, figure in value.items()}
    return {key: value for key, value in row.items() if key not in parts} | figures


def without_evaluation(rows, step):
    """Return the rows as of a run that is not evaluated at a step."""
    return [{k: v for k, v in row.items() if row["step"] != step or not k.startswith("val_loss")} for row in rows]


@contextlib.contextmanager
def started(folder, *arguments, then=(), how="manual", own=("", ""), folders=(".", ".")):
    """Start a command as processes 0 and 1, numbered by hand or as by Slurm; they end with the block.

    With `then`, lists of arguments, `moezoo.train` runs in the same processes with the arguments of each, except that
    the command runs with the last.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def process(number):
        here = [f"distributed={how}", "distributed.heartbeat_seconds=10", "distributed.start_seconds=300"]
        variables = {"PYTHONIOENCODING": "ascii"}  # the sample is printed with characters that it lacks
        if how == "manual":
            here += [f"distributed.coordinator=localhost:{port}", "distributed.processes=2"]
            here += [f"distributed.process={number}"]
        else:
            variables |= {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
            variables |= {"SLURM_NTASKS": "2", "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        words = [*here, *arguments, *filter(None, own[number : number + 1])]
        later = [word for arguments in then for word in ("then", *here, *arguments)]
        command = [TWO_TRAINS, *words, *later] if then else [TRAIN, *words]
        with (folder / f"out{number}").open("w") as out, (folder / f"err{number}").open("w") as err:
            where = {"cwd": folder / folders[number], "env": os.environ | variables}
            return subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, **where)

    pair = [process(0), process(1)]
    try:
        yield pair
    finally:
        for one in pair:
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


def wait_for_line(path, start, pair):
    """Wait until a file has a line that starts with `start`, or a process has ended."""
    for _ in range(SECONDS * 20):
        if any(line.startswith(start) for line in path.read_text().splitlines()):
            return
        if any(one.poll() is not None for one in pair):
            break
        time.sleep(0.05)
    raise AssertionError(path.read_text())


@pytest.fixture(scope="module")
def mixed(tiny):
    """Overrides of the tiny run, on a mixture."""
    return (*(word for word in tiny if not word.startswith("data")), *MIXTURE)


@pytest.fixture(scope="module")
def one(mixed, tmp_path_factory):
    """Eight steps in this process."""
    with steps_only():
        return moezoo.train(moezoo.compose(*mixed, *COMMON, f"run_dir={tmp_path_factory.mktemp('runs')}/one"))


@pytest.fixture(scope="module")
def both(one, mixed, tmp_path_factory):
    """Two processes, numbered by Slurm, train the run "two", and then go on with that of one process as "again".

    A signal to one of them ends it. Returns the folder, exit codes, lines and errors.
    """
    folder = tmp_path_factory.mktemp("both")
    again = (f"resume={one.folder}/checkpoints/4", "run_dir=again", "steps=100000")
    with started(folder, *mixed, *COMMON, "run_dir=two", then=[again], how="auto") as pair:
        wait_for_line(folder / "out0", "step 12/", pair)
        pair[1].send_signal(signal.SIGTERM)
        return folder, *ends(pair, folder)


def stop_step(out):
    """The step after which both processes print that they stopped."""
    (at,) = {int(line.split("after step ")[1].split(",")[0]) for text in out for line in text if "stopped by" in line}
    return at


def test_two_processes_train_as_one(both, one):
    """A run of two on a mixture, and one that they resumed from one process; and one process resumes that of two."""
    folder, codes, out, errors = both
    assert errors == ["", ""]
    assert codes == [143, 143]
    assert len(out[1]) == 1
    assert [line.split("  ")[0] for line in out[0] if "/8  " in line] == [f"step {i}/8" for i in range(1, 9)]
    names = {path.name for path in (folder / "two").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "routing.png", "expert_load.png", "checkpoints"}
    assert (folder / "received").read_text().split() == [str(step) for step in range(1, 9)]  # by the first alone
    assert "distributed:\n  name: none" in (folder / "two" / "config.yaml").read_text()
    two = read_rows(folder / "two")
    assert_near(two, read_rows(one.folder))
    assert two[-1]["tokens_by_source"] == read_rows(one.folder)[-1]["tokens_by_source"]
    assert min(two[-1]["tokens_by_source"].values()) > 0
    saved, _ = moezoo.load_run(folder / "two")
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(one.model), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-6)
    with steps_only():
        as_one = moezoo.train(moezoo.compose(f"resume={folder}/two/checkpoints/4", f"run_dir={folder}/as_one"))
    assert_near(read_rows(as_one.folder), two)

    assert steps(folder / "again" / "checkpoints")[-1] == stop_step(out)
    assert_near(read_rows(folder / "again")[:8], without_evaluation(read_rows(one.folder), 8))


def test_a_dead_process_ends_both(both, tmp_path):
    """In one line. The run saves by the clock of the first process alone.

    It resumes the run of two, in other processes: every row is the same to the bit, but step 8 is not evaluated.
    """
    run_dir = tmp_path / "two"
    by_clock = ("checkpoint_every=0", "checkpoint_minutes=1e-9", "checkpoint_keep=99")
    resume = f"resume={both[0]}/two/checkpoints/4"
    with started(tmp_path, resume, f"run_dir={run_dir}", "steps=100000", *by_clock) as pair:
        wait_for_line(tmp_path / "out0", "step 12/", pair)
        pair[1].kill()
        codes, _, errors = ends(pair, tmp_path)
    assert codes == [3, -signal.SIGKILL]
    assert read_rows(run_dir)[:8] == without_evaluation(read_rows(both[0] / "two"), 8)
    saved = steps(run_dir / "checkpoints")
    assert saved[0] == 5  # the first save is due before the first step
    assert errors[0].startswith("error: process 1 of the run ended ")
    assert errors[0].endswith(
        f"the last checkpoint is step {saved[-1]}: start all processes again with resume={run_dir}\n"
    )
    assert errors[0].count("\n") == 1
    assert errors[1] == ""


def test_mistakes_end_all_with_a_line_each(tiny, tiny_text, tmp_path):
    """Different settings, different data, a folder that is not shared, and a mistake that one process makes."""
    for name, text in (("0", "abc "), ("1", "abd ")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text * 1000)
    (tmp_path / "0" / "other.txt").write_text("abc " * 1000)
    common = ("mesh=fsdp2_ep4", "steps=2", "run_dir=never")
    different = (*tiny, *common)
    data, missing = ((*tiny_text, *common, f"data.path={name}.txt") for name in ("text", "other"))
    then = [data, different, missing]
    with started(tmp_path, *different, own=("seed=3", "seed=4"), then=then, folders=("0", "1")) as pair:
        codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    for text, other, error in zip(errors, ("process 1: ", ""), ("process 0: ", "process 1: "), strict=True):
        settings, of_data, folder, last = text.splitlines()
        assert settings.startswith("processes were started differently: seed is 3 on process 0 and 4 on process 1; ")
        assert of_data.startswith("processes read different data=text: the sha256 of all token ids is ")
        assert "on process 1, the hash of the training tokens is " in of_data
        assert folder.startswith(f"{other}run_dir=never is not the folder that process 0 has there")
        assert last.startswith(f"{error}error: {other}data.path=other.txt does not exist")
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["other.txt", "text.txt", "text.txt"]


def test_a_process_that_finds_no_other(tiny, tmp_path):
    """It waits for `start_seconds`, and ends with one line."""
    late = ("distributed.start_seconds=1", "distributed.processes=3")
    with started(tmp_path, *tiny, "mesh=fsdp2_ep4", *late) as pair:
        codes, _, errors = ends(pair, tmp_path)
    assert codes == [2, 2]
    for text in errors:
        assert text.count("\n") == 1
        assert text.startswith("error: the processes did not all meet at localhost:")
