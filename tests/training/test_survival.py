"""Runs that are stopped, killed or damaged: their files, the error lines, and resuming to the bit."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import endurance
import jax
import numpy as np
import pytest
from endurance import Trial, endure
from refusals import by_table, refused
from training_runs import assert_same_models, read_rows, steps_only, train_with_signal

import moezoo
from moezoo.cli.train import main
from moezoo.config.build import build_execution
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.config.run_folders import RUNNING, announcement, steps, trainer
from moezoo.moe.dispatch import Ragged
from moezoo.terminal.progress import BatchCounter
from moezoo.training import checkpoint
from moezoo.training import train as module
from moezoo.training.build import build_step
from moezoo.training.checkpoint import FORMAT, Checkpoints, read_about, restore
from moezoo.training.files import replace_file
from moezoo.training.loop import Loop
from moezoo.training.metrics import MetricsLog, read_metrics
from moezoo.training.saved_arrays import SavedArray

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
SECONDS = 600  # far above what any process here takes
COMMON = ("mesh=fsdp2_ep4", "checkpoint_every=4", "eval_every=0", "steps=12")


@pytest.fixture(scope="module", autouse=True)
def _steps_only():
    with steps_only():
        yield


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Twelve undisturbed steps."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return moezoo.train(moezoo.compose(*tiny, *COMMON, f"run_dir={folder}"))


def read_arrays(folder, step, *overrides):
    """Return every array of a checkpoint with its path, restored to one device or as `overrides` set."""
    cfg = moezoo.saved_config(folder, *(overrides or ("mesh=single", "dispatch=gather", "rules=fsdp_ep")))
    target = build_step(cfg, build_execution(cfg)).arguments[0]
    checkpoints = folder / "checkpoints"
    saved = restore(checkpoints, step, read_about(checkpoints, step), model=target.model, training=target[1:])
    return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(saved)]


def assert_same(one, other):
    """Every row and every parameter of two runs are the same to the bit."""
    assert read_rows(one.folder) == read_rows(other.folder)
    assert_same_models(one.model, other.model)


def test_signals_end_a_run_after_the_current_step(tiny, whole, tmp_path, monkeypatch):
    """Stopped by SIGTERM, resumed, stopped by Ctrl-C, and resumed to the end of the undisturbed run."""
    first = (*tiny, *COMMON, f"run_dir={tmp_path}/a")
    again = (f"resume={tmp_path}/a",)
    for number, step, saved, overrides in (
        (signal.SIGTERM, 6, [4, 6], first),
        (signal.SIGINT, 9, [8, 9], again),
    ):
        before = signal.getsignal(number)
        stopped = train_with_signal(monkeypatch, step, number, *overrides)
        name = signal.Signals(number).name
        assert f"{name} after step {step}" in str(stopped)
        assert str(stopped).endswith(f"resume={tmp_path}/a")
        assert stopped.code == 128 + number
        assert signal.getsignal(number) is before
        assert steps(tmp_path / "a" / "checkpoints") == saved
    assert_same(moezoo.train(moezoo.compose(*again)), whole)


def test_one_command_starts_a_run_and_continues_it(tiny, whole, tmp_path, monkeypatch, capsys):
    """With resume=auto: over what a run left that was killed before its first checkpoint, and from the newest one."""
    words = (*tiny, *COMMON, f"run_dir={tmp_path}/a", "resume=auto")
    (tmp_path / "a" / "checkpoints" / "unfinished.4").mkdir(parents=True)
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(as_mapping(moezoo.compose(*tiny))))
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1}\n')
    with refused(f"run_dir={tmp_path}/a already holds a run"):
        moezoo.train(moezoo.compose(*words[:-1]))
    for kept in ("config.yaml", "checkpoints/best"):  # what no run writes
        foreign = tmp_path / "foreign" / kept
        shutil.copytree(tmp_path / "a", tmp_path / "foreign")
        foreign.unlink(missing_ok=True)
        foreign.write_text("layers: [1]")
        with refused(f"run_dir={tmp_path}/foreign already holds a run"):
            moezoo.train(moezoo.compose(*words[:-2], f"run_dir={tmp_path}/foreign", "resume=auto"))
        assert foreign.read_text() == "layers: [1]"
        shutil.rmtree(tmp_path / "foreign")
    before = moezoo.compose(*words)
    train_with_signal(monkeypatch, 6, signal.SIGTERM, *words)
    with refused(f"run_dir={tmp_path}/a", "continue it with resume="):  # a configuration from before the run was saved
        moezoo.train(before)
    assert moezoo.compose(*words, "steps=99").steps == 99
    assert_same(moezoo.train(moezoo.compose(*words)), whole)
    assert main(words) == 0
    assert f"{tmp_path}/a is complete: step 12 is its last" in capsys.readouterr().out
    with refused(f"resume={tmp_path}/a", "step 12", "set steps above 12"):
        moezoo.train(moezoo.compose(*words))


def test_a_signal_in_the_last_step_is_not_lost(tiny, tmp_path, monkeypatch):
    stopped = train_with_signal(monkeypatch, 12, signal.SIGINT, *tiny, *COMMON, f"run_dir={tmp_path}/a")
    assert "SIGINT after step 12, saved" in str(stopped)
    assert "steps above 12" in str(stopped)
    assert stopped.code == 130
    assert steps(tmp_path / "a" / "checkpoints") == [8, 12]


def test_a_signal_ends_an_evaluation(tiny, tmp_path, monkeypatch):
    """The rest of it is left out: its step is logged without it and saved, and the continued run has the others."""
    called = []

    def send(self, done, total):
        called.append((done, total))
        if done == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(BatchCounter, "__call__", send)
        with pytest.raises(moezoo.Stopped, match="SIGTERM after step 6, saved"):
            moezoo.train(moezoo.compose(*tiny, *COMMON, "eval_every=6", f"run_dir={tmp_path}/a"))
    assert called == [(0, 2), (1, 2)]
    assert steps(tmp_path / "a" / "checkpoints") == [4, 6]
    moezoo.train(moezoo.compose(f"resume={tmp_path}/a"))
    assert ["val_loss" in row for row in read_rows(tmp_path / "a")] == [False] * 11 + [True]


class Broken:
    """A compiled step that fails."""

    program: Any = None

    def __call__(self, state: Any, batch: Any) -> None:
        raise ZeroDivisionError


def test_a_run_without_a_step_leaves_nothing(tiny, tmp_path, monkeypatch):
    """A signal or an error before the first step ends: new folders are removed, others stay without its files."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    compiled = Loop._compile

    def interrupted(self):
        assert (self.checkpoints.folder.parent / "config.yaml").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        return compiled(self)

    for end, error in ((interrupted, moezoo.Stopped), (lambda _: Broken(), ZeroDivisionError)):
        monkeypatch.setattr(Loop, "_compile", end)
        for folder in ("new/run", "mine"):
            with pytest.raises(error):
                moezoo.train(moezoo.compose(*tiny, *COMMON, f"run_dir={tmp_path}/{folder}"))
            assert sorted(tmp_path.rglob("*")) == [tmp_path / "mine", tmp_path / "mine" / "notes.txt"]


def test_a_continued_run_without_a_step_keeps_its_folder(copy, whole, monkeypatch):
    monkeypatch.setattr(Loop, "_compile", lambda _: Broken())
    with pytest.raises(ZeroDivisionError):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/8", f"run_dir={copy}/other"))
    assert not (copy / "other").exists()
    with pytest.raises(ZeroDivisionError):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/8"))
    assert read_rows(copy) == read_rows(whole.folder)[:8]
    assert steps(copy / "checkpoints") == [8]


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copy"))


def test_going_back_forgets_later_steps(copy, whole, monkeypatch):
    """From step 8 in the same folder, stopped before the next save: the old step 12 is not what it resumes from."""
    train_with_signal(monkeypatch, 9, signal.SIGTERM, f"resume={copy}/checkpoints/8", "log_every=2")
    assert steps(copy / "checkpoints") == [8, 9]
    other = moezoo.train(moezoo.compose(f"resume={copy}"))
    assert [row["step"] for row in read_rows(other.folder)] == [*range(1, 9), 10, 12]
    assert read_rows(other.folder)[:8] == read_rows(whole.folder)[:8]
    assert_same_models(other.model, whole.model)


def test_the_files_of_a_killed_run_are_repaired(copy, whole):
    """Rows after the last checkpoint, one of them incomplete, and an unfinished save."""
    checkpoints, log = copy / "checkpoints", copy / "metrics.jsonl"
    os.rename(checkpoints / "12", checkpoints / "unfinished.12")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:10]) + lines[10].replace("loss", "lost") + lines[11][:30])
    assert_same(moezoo.train(moezoo.compose(f"resume={copy}")), whole)
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["12", "8"]


@pytest.mark.newer
def test_kills_signals_and_flipped_bits(tmp_path, capsys):
    """`scripts/endurance.py` in short: separate processes, killed in a step and in a save; a flipped bit, a signal."""
    trial = Trial(str(tmp_path / "runs"), kills=2, signals=0, flips=1, moments=1)
    fine = endure(trial, (), print)
    out = capsys.readouterr().out
    assert fine, out
    assert out.count("fine") == 6  # four events, and the comparison of rows and arrays
    assert "WRONG" not in out


def test_a_full_disk(copy, whole, tmp_path):
    """A separate file system without room for another checkpoint: a run does not begin.

    One that began while there was room ends, and the previous checkpoint is complete.
    """
    shutil.rmtree(copy / "checkpoints" / "12")
    refused = shlex.join([sys.executable, str(TRAIN), "resume=disk/copy"])
    began = (
        "import moezoo.training.train as t; t.check_disk = lambda *_: None; from moezoo.__main__ import run_script; "
    )
    train = shlex.join([sys.executable, "-c", f"{began}run_script('train')", "resume=disk/copy"])
    # Leave 64 kB for the other files of a run; a checkpoint is larger.
    fill = "cp -r copy disk && head -c $(($(stat -f -c '%a * %S' disk) - 65536)) /dev/zero > disk/full"
    mount = f"mkdir disk && mount -t tmpfs -o size=16m none disk && {fill}"
    script = f"{mount} && {{ {refused}; {train}; code=$?; cp -r disk/copy after; exit $code; }}"
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2, done
    checkpoints = f"{tmp_path}/disk/copy/checkpoints"
    before, after = done.stderr.splitlines()
    assert before.startswith("error: run_dir=disk/copy: checkpoints need "), before
    assert after.startswith(f"error: {checkpoints}: a checkpoint could not be written (no space left on the ")
    assert after.endswith("step 8")
    assert steps(tmp_path / "after" / "checkpoints") == [8]
    assert_same(moezoo.train(moezoo.compose(f"resume={tmp_path}/after")), whole)


LEFT = """
from moezoo.cli.command import ConfiguredCommand, execute
from moezoo.errors import UserError
from moezoo.training import checkpoint

async def async_serialize_from_host():
    async def write_fragment(): pass
    return write_fragment()

async def of_a_user(): pass

def task(arguments):
    checkpoint._silence_orbax()
    left = [async_serialize_from_host(), of_a_user()]
    try:
        async_serialize_from_host().send(None)
    except StopIteration as done:
        left.append(done.value)
    left.append(left)  # is collected at exit
    raise UserError("no space left")

execute(ConfiguredCommand("train", "", task, description=""), [], "train")
"""


def test_python_does_not_warn_of_writes_that_a_failed_save_leaves():
    """Orbax leaves coroutines, sometimes; Python warns of those that never ran when it collects them."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=SECONDS)
    error, *others = done.stderr.splitlines()
    assert (done.returncode, error) == (2, "error: no space left")
    assert "'of_a_user' was never awaited" in others[0]
    assert not [line for line in others if "write_fragment" in line or "async_serialize" in line]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOSPC, "no space left"),
        (errno.EIO, "Input/out"),
    ],
)
def test_the_reason_of_a_failed_save_is_not_cut_off(tmp_path, monkeypatch, number, words):
    """It stands at the end of a long line of a library, which names the file first."""
    where = f'OUT_OF_RANGE: Error writing "{"a" * 100}" at local file "{"b" * 200}"'
    line = f"{where} [OS error {number}: {os.strerror(number)}]"

    def fail() -> None:
        raise ValueError(f"{line}\nmore")

    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 4)
    monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", fail)
    state = {"model": {"a": np.zeros(1, np.float32)}}
    with pytest.raises(moezoo.UserError, match=rf"checkpoint could not be written \(.*{words}.*\); there is no"):
        checkpoints.save(1, state, {"versions": {}, "config": {}, "loader": {}})


@pytest.mark.weekly
def test_few_open_files_and_small_files(tiny, tmp_path):
    """The reason stands somewhere in a long line of a library, which names the file first."""
    code = """
import resource, sys
kind, most, *sys.argv = sys.argv[1:]
from moezoo.training import loop
train = loop.Loop.train
def limited(*arguments):
    resource.setrlimit(getattr(resource, kind), (int(most), int(most)))
    return train(*arguments)
loop.Loop.train = limited
from moezoo.__main__ import run_script
run_script("train")
"""
    for kind, most, words in (("RLIMIT_NOFILE", 24, "ulimit -n"), ("RLIMIT_FSIZE", 20_000, "ulimit -f")):
        command = [sys.executable, "-c", code, kind, str(most), "train", *tiny, "steps=1", "schedule.warmup_steps=0"]
        command += ["mesh=single", f"run_dir={tmp_path}/{kind}", "cache_dir=null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: "), done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    """A disk that accepts a part of a row; earlier rows stay readable."""
    log, write = MetricsLog(tmp_path / "metrics.jsonl", [{"step": 1}]), os.write

    def full(file, content):
        if len(content) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:8])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(moezoo.UserError, match=r"metrics.jsonl: cannot be written \(No space left on device\)"):
        log.row({"step": 22})
    assert read_metrics(tmp_path / "metrics.jsonl", until=30) == [{"step": 1}]


def test_a_log_that_was_removed(tmp_path):
    log = MetricsLog(tmp_path / "run.jsonl", [])
    log.row({"step": 1})
    (tmp_path / "run.jsonl").unlink()
    with refused(f"{tmp_path}/run.jsonl: ", "removed", "start again"):
        log.row({"step": 2})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_checkpoints_that_was_removed(tmp_path):
    """Orbax would make it again, and save a run without its other files."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=0)
    (tmp_path / "checkpoints").rmdir()
    state = {"model": {"x": np.zeros(2)}, "training": {"y": np.zeros(2)}}
    checkpoints.save(1, state, {"versions": {}, "config": {}, "loader": {}})
    with refused(f"{tmp_path}/checkpoints: ", "was removed", "no earlier one"):
        checkpoints.close()


def test_every_wait_of_a_save_is_bounded(tmp_path, monkeypatch):
    """The processes may wait for each other when they begin it, when it ends, and when the run ends."""
    bounds, inside = [], []

    @contextlib.contextmanager
    def within(seconds, message):
        bounds.append((seconds, message))
        inside.append(1)
        yield
        inside.pop()

    def waits(kind, name):
        really = getattr(kind, name)

        def wait(*args, **kwargs):
            waited.append((name, len(inside)))
            return really(*args, **kwargs)

        monkeypatch.setattr(kind, name, wait)

    waited = []
    monkeypatch.setattr(checkpoint.distributed, "within", within)
    checkpoints = Checkpoints(tmp_path / "checkpoints", count=1, size=3 * 10**9)
    for kind, name in ((checkpoints._orbax, "save"), (checkpoints, "_join"), (checkpoint.distributed, "together")):
        waits(kind, name)
    waits(checkpoints._orbax, "close")
    state = {"model": {"x": np.zeros(2)}, "training": {"y": np.zeros(2)}}
    checkpoints.save(1, state, {"versions": {}, "config": {}, "loader": {}})
    checkpoints.wait()
    checkpoints.close()
    assert waited == [(name, 1) for name in ("save", "_join", "together", "_join", "close")]
    bound = f"{tmp_path}/checkpoints: a checkpoint could not be written (the processes did not finish it within 360 s)"
    assert [(seconds, message.partition(";")[0]) for seconds, message in bounds] == [(420, bound)] * 3


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    """A disk that is full after a part."""

    def write(path):
        path.write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "config.yaml", write)
    assert list(tmp_path.iterdir()) == []


def test_endurance_takes_the_settings_of_its_example():
    cfg = endurance.configure(*endurance.COMMAND.examples[1].split())
    assert (cfg.mesh.fsdp, cfg.mesh.expert, type(cfg.dispatch), cfg.model.layers) == (1, 8, Ragged, 2)


def test_folders_of_endurance_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder, parts in ((tmp_path / "file" / "x", ["Not a directory"]), ("/proc/x", []), (tmp_path, ["not empty"])):
        with refused(f"folder={folder}", *parts):
            endure(Trial(str(folder)), (), print)


def test_continues_elsewhere_and_from_an_older_step(whole, tmp_path):
    """In another folder, which gets the whole history; the first folder does not change."""
    before = read_rows(whole.folder)
    other = moezoo.train(moezoo.compose(f"resume={whole.folder}/checkpoints/8", f"run_dir={tmp_path}/b"))
    assert_same(other, whole)
    assert read_rows(whole.folder) == before
    assert steps(whole.folder / "checkpoints") == [8, 12]


def test_continues_on_another_mesh(whole, tmp_path):
    """The other mesh starts from the saved bits; losses, parameters and moments then agree within 1e-6 for four steps.

    Float32 gradients of these steps differ from those of float64 by up to 6e-7 of the largest, on every mesh.
    The largest of a thousand such errors is a few times the usual one, and a square doubles it. Moments are therefore
    compared as vectors, in the 2-norm, which averages the errors of their entries; other arrays entry by entry.
    """
    overrides = ("mesh=fsdp8", "rules=pure_fsdp", "dispatch=gather")
    for (path, a), (_, b) in zip(read_arrays(whole.folder, 8, *overrides), read_arrays(whole.folder, 8), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)
    other = moezoo.train(moezoo.compose(f"resume={whole.folder}/checkpoints/8", f"run_dir={tmp_path}/b", *overrides))
    for ours, theirs in zip(read_rows(other.folder), read_rows(whole.folder), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for (path, a), (_, b) in zip(read_arrays(other.folder, 12), read_arrays(whole.folder, 12), strict=True):
        order = 2 if ".mu." in path or ".nu." in path else np.inf
        a, b = (x.astype(np.float64).ravel() for x in (a, b))
        assert np.linalg.norm(a - b, order) <= 1e-6 * np.linalg.norm(b, order), path


def damage(file, how):
    """Flip a bit of a file, cut it or remove it, or write what `how` says: of about.json some keys or all of it."""
    content = bytearray(file.read_bytes() if file.exists() else b"")
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[:-1])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif file.name == "about.json":  # with a checksum that fits
        about, sums = json.loads(how), file.parent / "sha256.json"
        file.write_text(json.dumps(json.loads(content) | about if about else about))
        fits = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
        sums.write_text(json.dumps(json.loads(sums.read_text()) | fits))
    else:
        file.write_text(how)


@by_table(
    """
    file => how => line
    LARGEST => flipped => is damaged: LARGEST has changed
    LARGEST => cut => is damaged: LARGEST has changed
    LARGEST => gone => is damaged: LARGEST is missing
    sha256.json => gone => is not a complete checkpoint: sha256.json is missing
    sha256.json => { => is damaged: sha256.json cannot be read
    sha256.json => [1] => is damaged: sha256.json cannot be read
    more.txt => more => is damaged: more.txt does not belong to it
    about.json => [] => is not a checkpoint of moezoo: about.json
    about.json => {} => is not a checkpoint of moezoo: about.json
    about.json => null => is not a checkpoint of moezoo: about.json
    about.json => {"format": "1"} => is not a checkpoint of moezoo: about.json
    about.json => {"config": []} => is not a checkpoint of moezoo: about.json
    about.json => {"arrays": []} => is not a checkpoint of moezoo: about.json
    about.json => {"arrays": {"model": 1}} => is not a checkpoint of moezoo: about.json
    about.json => {"versions": []} => is not a checkpoint of moezoo: about.json
    """
)
def test_damage_is_reported_and_an_older_step_offered(copy, file, how, line):
    newest = copy / "checkpoints" / "12"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    name = largest.relative_to(newest).as_posix()
    damage(newest / file.replace("LARGEST", name), how)
    expected = f"{newest} {line.replace('LARGEST', name)} ... ; step 8 is complete: {copy}/checkpoints/8"
    with refused(expected):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))
    with refused(expected):
        moezoo.load_run(copy)


def test_a_step_under_another_name(copy):
    os.rename(copy / "checkpoints" / "12", copy / "checkpoints" / "200")
    with pytest.raises(moezoo.UserError, match=r"200 is the checkpoint of step 12; rename the folder"):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=210"))


def test_another_models_checkpoint(copy):
    """The shapes are the same, but a setting of the model differs."""
    (copy / "config.yaml").write_text(to_yaml(as_mapping(moezoo.saved_config(copy, "model.rope_base=500.0"))))
    with pytest.raises(moezoo.UserError, match=r"^model.rope_base=500.0 but .*12 was saved with model.rope_base="):
        moezoo.load_run(copy)
    with pytest.raises(moezoo.UserError, match=r"^model.rope_base=500.0 but the run at resume=.* has model.rope_base="):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))


def test_one_run_at_a_time(copy):
    handle = os.open(copy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = read_rows(copy)
    with pytest.raises(moezoo.UserError, match=r"copy: another process trains here; wait for it to end"):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/8"))
    (copy / RUNNING).write_text('{"process": 7, "host": "elsewhere", "since": "2024-02-03T04:05+00:00"}')
    who = r"process 7 on elsewhere trains here since 2024-02-0\d \d\d:\d5"
    with pytest.raises(moezoo.UserError, match=rf"copy: {who}; wait for it to end, or stop it"):
        moezoo.train(moezoo.compose(f"run_dir={copy}"))
    (copy / RUNNING).write_text(announcement())
    who = rf"process {os.getpid()} on {socket.gethostname()} trains here since "
    assert re.fullmatch(rf"{who}(....-..-.. )?\d\d:\d\d", trainer(copy) or "")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(moezoo.UserError, match=rf"copy: {who}.* and has saved no checkpoint yet; wait for one"):
        moezoo.load_run(copy)
    os.close(handle)
    assert trainer(copy) is None  # of a process that was killed the file stays
    with pytest.raises(moezoo.UserError, match="no checkpoint there"):
        moezoo.load_run(copy)
    assert read_rows(copy) == before


def continue_elsewhere(monkeypatch, folder, *overrides):
    """Let another run continue `folder` and end, right after the set-up of the next run looked there."""
    real = module._prepare

    def prepare(*arguments):
        monkeypatch.setattr(module, "_prepare", real)
        made = real(*arguments)
        moezoo.train(moezoo.compose(f"resume={folder}", *overrides))
        return made

    monkeypatch.setattr(module, "_prepare", prepare)


# The other run saves a later step; or it goes back and saves the same step anew; or the checkpoint is one of many.
@pytest.mark.parametrize(
    ("which", "steps_", "other", "expected"),
    [
        ("", 16, ("steps=14",), "another run has trained here since this one began; start this one again$"),
        ("", 16, ("resume={}/checkpoints/8", "steps=12", "log_every=2"), "another run has trained here"),
        (
            "/checkpoints/8",
            14,
            ("steps=14",),
            r"checkpoints/8 was removed while it was read: a run trains .*try again$",
        ),
    ],
    ids=["later", "again", "removed"],
)
def test_another_run_trains_and_ends_during_the_set_up(copy, monkeypatch, which, steps_, other, expected):
    continue_elsewhere(monkeypatch, copy, *(each.format(copy) for each in other))
    with pytest.raises(moezoo.UserError, match=expected):
        moezoo.train(moezoo.compose(f"resume={copy}{which}", f"steps={steps_}"))
    rows = read_rows(copy)
    assert rows[-1]["step"] == max(steps(copy / "checkpoints")) in (12, 14)
    moezoo.train(moezoo.compose(f"resume={copy}", "steps=15"))


def test_a_checkpoint_that_is_removed_while_it_is_read(copy, monkeypatch):
    """By its checksums, and by orbax."""
    removed = r"checkpoints/12 was removed while it was read: a run trains there.*; try again$"
    real = checkpoint._hash_files

    def hash_files(folder):
        shutil.rmtree(copy / "checkpoints" / "12")
        return real(folder)

    about = read_about(copy / "checkpoints", 12)
    target = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in about["arrays"]["model"].items()}
    monkeypatch.setattr(checkpoint, "_hash_files", hash_files)
    with pytest.raises(moezoo.UserError, match=removed):
        moezoo.load_run(copy)
    with pytest.raises(moezoo.UserError, match=removed):
        restore(copy / "checkpoints", 12, about, model=target)
    with pytest.raises(moezoo.UserError, match=removed):
        SavedArray(copy / "checkpoints" / "12" / "model", "a", np.dtype(np.float32))[0,]


def test_a_folder_with_a_number_is_no_checkpoint(copy):
    (copy / "checkpoints" / "99").mkdir()
    with pytest.raises(moezoo.UserError, match=r"99 is not a complete checkpoint: .*; step 12 is complete: "):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))
    with pytest.raises(moezoo.UserError, match=r"checkpoints/9: no such checkpoint; there are 8, 12$"):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/9", "steps=14"))


def test_a_log_that_cannot_be_read(copy, capsys):
    log = copy / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    log.write_text("".join((rows[0], "garbage\n", rows[2], '{"loss": 1.0}\n', *rows[4:])) + rows[0][:20])
    moezoo.train(moezoo.compose(f"resume={copy}", "steps=13"))
    warned = [line for line in capsys.readouterr().out.splitlines() if "warning:" in line]
    assert len(warned) == 1
    assert "metrics.jsonl: lines 2, 4 cannot be read" in warned[0]
    assert [row["step"] for row in read_rows(copy)] == [1, 3, *range(5, 14)]
    log.unlink()
    log.mkdir()
    with pytest.raises(moezoo.UserError, match=r"metrics.jsonl: cannot be read \(Is a directory\); .* remove it"):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(copy, monkeypatch, other):
    monkeypatch.setattr(checkpoint, "FORMAT", other)
    expected = f"12 has checkpoint format {FORMAT} and this moezoo reads format {other}; moezoo [0-9.]+ reads it$"
    with pytest.raises(moezoo.UserError, match=expected):
        moezoo.load_run(copy)
    with pytest.raises(moezoo.UserError, match=expected):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))


def test_only_training_runs_in_several_processes(whole):
    with pytest.raises(moezoo.UserError, match=r"^distributed: .*leave it out"):
        moezoo.load_run(whole.folder, "distributed=auto")


def test_nothing_is_pickled(whole):
    """No file is a pickle: arrays have orbax's format, the rest is JSON."""
    text = (Path(moezoo.__file__).parent / "training" / "checkpoint.py").read_text()
    assert "pickle" not in text
    for file in (whole.folder / "checkpoints").rglob("*"):
        assert file.is_dir() or not file.read_bytes().startswith(b"\x80")
