"""Runs that are stopped, killed or damaged: what they leave, what is told, and that nothing else changes."""

import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import moezoo
from moezoo.cli.endurance import Trial, endure
from moezoo.config.build import build_execution
from moezoo.config.compose import as_mapping, to_yaml
from moezoo.training import checkpoint, report
from moezoo.training.build import build_step
from moezoo.training.checkpoint import FORMAT, read_about, restore, steps
from moezoo.training.metrics import MetricsLog, read_metrics

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
SECONDS = 600  # far above what anything here takes, far below forever
COMMON = ("mesh=fsdp2_ep4", "checkpoint_every=4", "eval_every=0", "steps=12", "schedule=constant")


def numbers(path):
    """Rows without the figure that a clock decides."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Twelve steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return moezoo.train(moezoo.compose(*tiny, *COMMON, f"run_dir={folder}"))


def arrays(folder, step, overrides="mesh=single dispatch=gather rules=fsdp_ep"):
    """All that a checkpoint holds, restored to one device or as `overrides` say, with its path."""
    cfg = moezoo.saved_config(folder, *overrides.split())
    target = build_step(cfg, build_execution(cfg)).arguments[0]
    checkpoints = folder / "checkpoints"
    saved = restore(checkpoints, step, read_about(checkpoints, step), model=target.model, training=target[1:])
    return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(saved)]


def same(one, other):
    """Two runs: every row, every parameter, to the bit."""
    assert numbers(one.folder) == numbers(other.folder)
    for a, b in zip(jax.tree.leaves(one.model), jax.tree.leaves(other.model), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def interrupt_after(monkeypatch, last, number):
    """Send this process a signal in the middle of the loop, after step `last`."""
    step = report.Progress.step

    def interrupted(self, at):
        step(self, at)
        if at == last:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(report.Progress, "step", interrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step(tiny, whole, tmp_path, monkeypatch, number):
    before = signal.getsignal(number)
    interrupt_after(monkeypatch, 6, number)
    name = signal.Signals(number).name
    with pytest.raises(
        moezoo.Stopped, match=rf"^stopped by {name} after step 6, saved; continue with resume=.*/a$"
    ) as at:
        moezoo.train(moezoo.compose(*tiny, *COMMON, f"run_dir={tmp_path}/a"))
    assert at.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert steps(tmp_path / "a" / "checkpoints") == [4, 6]
    monkeypatch.undo()
    same(moezoo.train(moezoo.compose(f"resume={tmp_path}/a")), whole)


@pytest.fixture
def copy(whole, tmp_path):
    """A folder that may be harmed."""
    return Path(shutil.copytree(whole.folder, tmp_path / "copy"))


def test_going_back_forgets_what_came_later(copy, whole, monkeypatch):
    """From step 8 in the same folder, and stopped before it saves: step 12 of before is not what it goes on from."""
    interrupt_after(monkeypatch, 9, signal.SIGTERM)
    with pytest.raises(moezoo.Stopped):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/8", "optimizer.learning_rate=0.02"))
    monkeypatch.undo()
    assert steps(copy / "checkpoints") == [8, 9]
    other = moezoo.train(moezoo.compose(f"resume={copy}"))
    assert [row["step"] for row in numbers(other.folder)] == list(range(1, 13))
    assert numbers(other.folder)[:8] == numbers(whole.folder)[:8]
    assert numbers(other.folder)[8]["learning_rate"] == pytest.approx(0.02)


def test_what_a_killed_run_leaves_is_mended(copy, whole):
    """Rows after its last checkpoint, a torn one among them, and a save that was going on."""
    checkpoints, log = copy / "checkpoints", copy / "metrics.jsonl"
    os.rename(checkpoints / "12", checkpoints / "unfinished.12")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:10]) + lines[10].replace("loss", "lost") + lines[11][:30])
    same(moezoo.train(moezoo.compose(f"resume={copy}")), whole)
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["12", "8"]


def test_kills_signals_and_flipped_bits(tmp_path, shared_cache, capsys):
    """`moezoo endurance` in short: processes of their own, killed in a step and during a save."""
    trial = Trial(str(tmp_path / "runs"), kills=2, signals=1, flips=1)
    fine = endure(trial, (), print)
    out = capsys.readouterr().out
    assert fine, out
    assert out.count("fine") == 6
    assert "WRONG" not in out


def test_a_full_disk(copy, whole, tmp_path, shared_cache):
    """A file system of its own without room for another checkpoint: it ends the run, and the one before is whole."""
    shutil.rmtree(copy / "checkpoints" / "12")
    train = shlex.join([sys.executable, str(TRAIN), "resume=disk/copy"])
    # 64 kB for what else a run writes; a checkpoint is larger.
    fill = "cp -r copy disk && head -c $(($(stat -f -c '%a * %S' disk) - 65536)) /dev/zero > disk/full"
    mount = f"mkdir disk && mount -t tmpfs -o size=16m none disk && {fill}"
    script = f"{mount} && {{ {train}; code=$?; cp -r disk/copy after; exit $code; }}"
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2, done
    checkpoints = f"{tmp_path}/disk/copy/checkpoints"
    told = f"error: {checkpoints}: a checkpoint could not be written (no space left on the disk); the last good one is"
    assert done.stderr == f"{told} step 8\n"
    assert steps(tmp_path / "after" / "checkpoints") == [8]
    same(moezoo.train(moezoo.compose(f"resume={tmp_path}/after")), whole)


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    """A disk that takes a part of a row; what is there stays readable."""
    log, write = MetricsLog(tmp_path / "metrics.jsonl", [{"step": 1}]), os.write

    def full(file, content):
        if len(content) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:8])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(moezoo.UserError, match=r"metrics.jsonl: cannot be written \(No space left on device\)"):
        log.write({"step": 22})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl", until=30) == [{"step": 1}]


def test_micro_steps_and_choice_bias_continue_to_the_bit(tiny, tmp_path):
    """The bias is moved by counts of all micro-steps; data are read a micro-batch at a time."""
    small = [override for override in tiny if "head_dim" not in override]
    common = (*small, "model=deepseek", "mesh=fsdp2_ep4", "execution.microbatches=2", "batch_size=16", "steps=6")
    first = moezoo.train(moezoo.compose(*common, "checkpoint_every=3", f"run_dir={tmp_path}/a"))
    again = moezoo.train(moezoo.compose(f"resume={tmp_path}/a/checkpoints/3", f"run_dir={tmp_path}/b"))
    same(again, first)
    assert np.asarray(again.model.stacks[1].blocks[0].feed_forward.router.choice_bias).any()  # type: ignore[attr-defined]


def test_continues_elsewhere_and_from_an_older_step(whole, tmp_path):
    """In another folder, which holds the whole history; the first stays as it is."""
    before = numbers(whole.folder)
    other = moezoo.train(moezoo.compose(f"resume={whole.folder}/checkpoints/8", f"run_dir={tmp_path}/b"))
    same(other, whole)
    assert numbers(whole.folder) == before
    assert steps(whole.folder / "checkpoints") == [8, 12]


@pytest.mark.parametrize(
    "overrides", ["mesh=ep8 dispatch=ragged", "mesh=single dispatch=gather", "mesh=fsdp8 rules=pure_fsdp"]
)
def test_continues_on_another_mesh(whole, tmp_path, overrides):
    """The other mesh starts from the saved bits; losses, parameters and moments then agree within 1e-6 for four steps.

    Float32 gradients of these steps differ from those of float64 by up to 6e-7 of the largest, on every mesh.
    Each entry of an array has such an error, so the largest of a thousand is a few times the usual one, and a square
    doubles it. A moment is therefore compared as a vector, in the 2-norm, which averages the errors of its entries.
    All else is compared entry by entry.
    """
    for (path, a), (_, b) in zip(arrays(whole.folder, 8, overrides), arrays(whole.folder, 8), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)
    other = moezoo.train(
        moezoo.compose(f"resume={whole.folder}/checkpoints/8", f"run_dir={tmp_path}/b", *overrides.split())
    )
    for ours, theirs in zip(numbers(other.folder), numbers(whole.folder), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for (path, a), (_, b) in zip(arrays(other.folder, 12), arrays(whole.folder, 12), strict=True):
        order = 2 if ".mu." in path or ".nu." in path else np.inf
        a, b = (x.astype(np.float64).ravel() for x in (a, b))
        assert np.linalg.norm(a - b, order) <= 1e-6 * np.linalg.norm(b, order), path


def damaged(folder, how):
    """A copy of nothing: the newest checkpoint itself, harmed in one way; the file that was."""
    newest = folder / "checkpoints" / "12"
    files = [p for p in sorted(newest.rglob("*")) if p.is_file() and p.stat().st_size > 20 and p.name != "sha256.json"]
    file = max(files, key=lambda p: p.stat().st_size)
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    return file.relative_to(newest).as_posix()


@pytest.mark.parametrize(
    ("how", "told"),
    [("flipped", "is not as it was written"), ("truncated", "is not as it was written"), ("lost", "is missing")],
)
def test_damage_is_told_and_an_older_step_offered(copy, how, told):
    name = damaged(copy, how)
    checkpoints = copy / "checkpoints"
    line = f"{checkpoints}/12 is damaged: {name} {told}; step 8 is whole: {checkpoints}/8"
    with pytest.raises(moezoo.UserError) as error:
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))
    assert str(error.value) == line
    with pytest.raises(moezoo.UserError) as error:
        moezoo.load_run(copy)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("sha256.json", None, "is no whole checkpoint: sha256.json is missing"),
        ("sha256.json", "{", "is damaged: sha256.json cannot be read"),
        ("sha256.json", "[1]", "is damaged: sha256.json cannot be read"),
        ("more.txt", "", "is damaged: more.txt is not one of its files"),
    ],
)
def test_foreign_files(copy, file, content, told):
    path = copy / "checkpoints" / "12" / file
    path.unlink(missing_ok=True) if content is None else path.write_text(content)
    with pytest.raises(moezoo.UserError) as error:
        read_about(copy / "checkpoints", 12)
    assert str(error.value).startswith(f"{copy}/checkpoints/12 {told}; step 8 is whole")


def forged(folder, change):
    """A checkpoint whose about.json says something else, with a checksum that fits."""
    path = folder / "about.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(change(told)))
    sums = json.loads((folder / "sha256.json").read_text())
    sums["about.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "sha256.json").write_text(json.dumps(sums))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: [],
        lambda told: {},
        lambda told: None,
        lambda told: told | {"format": "1"},
        lambda told: told | {"config": []},
        lambda told: told | {"arrays": []},
        lambda told: told | {"arrays": {"model": 1}},
        lambda told: told | {"versions": []},
    ],
)
def test_what_another_program_wrote(copy, change):
    forged(copy / "checkpoints" / "12", change)
    with pytest.raises(moezoo.UserError, match=r"12 is no checkpoint of moezoo: about.json does not say what it sho"):
        read_about(copy / "checkpoints", 12)


def test_a_step_under_another_name(copy):
    os.rename(copy / "checkpoints" / "12", copy / "checkpoints" / "200")
    with pytest.raises(moezoo.UserError, match=r"200 is the checkpoint of step 12 under another name; rename it; step"):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=210"))


def test_another_models_checkpoint(copy):
    """Of the same shapes: what it was trained as differs."""
    (copy / "config.yaml").write_text(to_yaml(as_mapping(moezoo.saved_config(copy, "model.rope_base=500.0"))))
    with pytest.raises(moezoo.UserError, match=r"^model.rope_base=500.0 but .*12 was saved with model.rope_base="):
        moezoo.load_run(copy)
    with pytest.raises(moezoo.UserError, match=r"^model.rope_base=500.0 but the run at resume=.* has model.rope_base="):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))


def test_one_run_at_a_time(copy):
    handle = os.open(copy, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = numbers(copy)
    with pytest.raises(moezoo.UserError, match=r"copy: another process is training there; wait for its end, or stop"):
        moezoo.train(moezoo.compose(f"resume={copy}/checkpoints/8"))
    os.close(handle)
    assert numbers(copy) == before
    assert steps(copy / "checkpoints") == [8, 12]


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_version_is_not_guessed_at(copy, monkeypatch, other):
    monkeypatch.setattr(checkpoint, "FORMAT", other)
    told = f"12 has checkpoint format {FORMAT} and this moezoo reads format {other}; moezoo [0-9.]+ reads it$"
    with pytest.raises(moezoo.UserError, match=told):
        moezoo.load_run(copy)
    with pytest.raises(moezoo.UserError, match=told):
        moezoo.train(moezoo.compose(f"resume={copy}", "steps=14"))


def test_only_training_runs_in_several_processes(whole):
    with pytest.raises(moezoo.UserError, match=r"^distributed: only training runs in several processes; leave it out$"):
        moezoo.load_run(whole.folder, "distributed=auto")


def test_no_such_step(whole):
    with pytest.raises(moezoo.UserError, match=r"checkpoints/9: no such checkpoint; there are 8, 12$"):
        moezoo.train(moezoo.compose(f"resume={whole.folder}/checkpoints/9", "steps=14"))


def test_nothing_is_pickled(whole):
    """Neither written nor read: arrays are orbax's, the rest is JSON."""
    text = (Path(moezoo.__file__).parent / "training" / "checkpoint.py").read_text()
    assert "pickle" not in text
    for file in (whole.folder / "checkpoints").rglob("*"):
        assert file.is_dir() or not file.read_bytes().startswith(b"\x80")
