"""Mistakes on the command line that only a whole set-up can find: one line, exit code 2, nothing written.

`tests/config` has the mistakes in overrides alone, `tests/data` those in data.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import by_table

from moezoo.config.compose import as_mapping, compose, to_yaml

ROOT = Path(__file__).parents[2]
TRAIN, COMMAND, ENDURANCE = (
    ROOT / f"{name}.py" for name in ("scripts/train", "moezoo/__main__", "tests/training/endurance")
)


def refuse(capsys, monkeypatch, script, *arguments) -> str:
    """Return the one line that a script prints for these arguments."""
    before = sorted(Path.cwd().rglob("*"))
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before
    return err


@by_table(
    """
    arguments => parts
    mesh=ep8 model.experts=6 => mesh.expert=8 ... model.experts=6 ... (mesh=ep8)
    mesh=fsdp8 model.embed=36 => mesh.fsdp=8 ... model.embed=36
    mesh=ep8 dispatch.chunks=500 => dispatch.chunks=500 ... 128 tokens per device and micro-step ... at most 128
    dispatch.chunks=0 => dispatch.chunks=0 must be at least 1
    mesh=fsdp2_ep4 batch_size=4 => batch_size=4 ... mesh.fsdp=2 ... mesh.expert=4 ... (mesh=fsdp2_ep4)
    mesh.expert=8 mesh.data=1 model.experts=6 => mesh.expert=8 splits ... mesh.fsdp=4 mesh.expert=2 has as many devices
    batch_size=8 execution.microbatches=3 => batch_size=8 ... execution.microbatches=3
    mesh=ep8 execution.microbatches=2 => batch_size=8 ... 16 ... execution.microbatches=2 x mesh.expert=8
    mesh.context=2 seq_len=127 => seq_len=127 ... mesh.context=2
    rules.store.heads=[fsdp] rules.store.embed=[] mesh.fsdp=8 => mesh.fsdp=8 ... model.heads=4
    model.heads=3 => model.heads=3 ... model.kv_heads=2
    model.experts_per_token=9 => model.experts_per_token=9 ... model.experts=8
    mesh.expert=3 batch_size=9 => mesh.expert=3 ... model.experts=8 ... mesh.expert=1
    steps=5 schedule.warmup_steps=6 => schedule.warmup_steps=6 ... steps=5
    mesh.tensor=2 => mesh.tensor=2 ... fsdp_ep ... 'tensor'
    mesh=ep8 rules=pure_fsdp => mesh.expert=8 ... pure_fsdp
    mesh.expert=16 => mesh.expert=16 ... 16 devices ... 8
    mesh=ep8 rules.store.expert_embed=[expert] => 'expert' ... 'expert_embed' ... fsdp_ep
    rules.compute.expert=[fsdp] => rules.compute.expert=[fsdp] ... rules.store.expert=[expert]
    rules.store.embd=[fsdp] => rules.store.embd ... 'embed'
    data=synthetic data.vocab=300 => data.vocab=300 ... model.vocab=256
    data=text => data.path ... data=text
    data=text data.path=/dev/zero => data.path=/dev/zero is a device ... give a text file
    data=tokens data.path=. => data.path=. is a folder ... give a .npy file
    data=synthetic data.documents=2000000000 => data.documents=2000000000 ... GiB ... (data=synthetic)
    model=deepseek_v3 mesh=ep8 => 671,026,404,352 parameters ... 9,999.2 GiB ... this machine ... (model=deepseek
    model.embed=1000000000 => model.embed=1000000000 ... 5,967.9 GiB ... this machine
    model.embed=1000000000000 => model.embed=1000000000000 ... 2147483647
    mesh.expert=100000000000 => mesh.expert=100000000000 ... 2147483647
    batch_size=16000000 => batch_size=16000000 ... 1,007.1 GiB ... this machine
    batch_size=100000000000000000000 => batch_size=100000000000000000000 ... 2147483647
    resume=nowhere => resume=nowhere
    """
)
def test_train_refuses_in_one_line(capsys, monkeypatch, arguments, parts):
    line = refuse(capsys, monkeypatch, TRAIN, *arguments.split())
    for part in parts.split(" ... "):
        assert part in line


def test_a_tokenizer_larger_than_the_vocabulary(capsys, monkeypatch, tmp_path):
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(300)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("w1 w2 " * 500)
    line = refuse(capsys, monkeypatch, TRAIN, "data=text", "data.path=text.txt", "data.tokenizer=tokenizer.json")
    assert "300" in line
    assert "model.vocab=256" in line


def test_a_platform_that_is_not_there():
    lines = ["train.py", "bench.py grouped_matmul", "bench.py attention", "bench.py train_step"]
    code = f"""
import runpy, sys
for line in {lines}:
    sys.argv = f"{TRAIN.parent}/{{line}}".split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert end.code == 2, line
"""
    settings = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = done.stderr.splitlines()
    assert len(found) == len(lines), done.stderr
    for line in found:
        assert line.startswith("error: JAX_PLATFORMS=nonsense: JAX cannot start there (")
        assert "set JAX_PLATFORMS=cpu to run on virtual CPU devices" in line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("left", ["metrics.jsonl", "config.yaml", "checkpoints", "held_out.txt"])
def test_a_folder_that_holds_a_run_stays_as_it_is(capsys, monkeypatch, tmp_path, left):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / left).write_text("precious")
    line = refuse(capsys, monkeypatch, TRAIN, "run_dir=old")
    assert "run_dir=old" in line
    assert "resume=old" not in line  # there is no checkpoint to continue from
    assert (folder / left).read_text() == "precious"


def test_resume_of_a_run_without_checkpoints(capsys, monkeypatch, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text(to_yaml(as_mapping(compose())))
    assert "resume=old: no checkpoint there" in refuse(capsys, monkeypatch, TRAIN, "resume=old")


@by_table(
    """
    arguments => part
    => name one model: run_dir=FOLDER of a run, or folder=FOLDER in
    run_dir=nowhere => run_dir=nowhere
    run_dir=a folder=b => run_dir=a and folder=b name two models; leave one of them out
    mesh=ep8 => name one model: run_dir=FOLDER
    # A key of the command and of a configuration.
    run_dir=a xyzzy=1 => , rules, run_dir, schedule,
    run_dirr=runs/a => run_dirr: there is no key 'run_dirr'; did you mean 'run_dir'?
    """
)
def test_evaluate_refuses_in_one_line(capsys, monkeypatch, arguments, part):
    assert part in refuse(capsys, monkeypatch, COMMAND, "evaluate", *arguments.split())


@pytest.mark.parametrize(
    ("argument", "part"),
    [("kill=3", "kill: there is no key 'kill'; did you mean 'kills'?"), ("model.layer=2", "did you mean 'layers'?")],
)
def test_endurance_makes_no_folder_for_a_mistake(capsys, monkeypatch, argument, part):
    assert part in refuse(capsys, monkeypatch, ENDURANCE, "folder=new", argument)
