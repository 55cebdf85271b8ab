"""`pytest -n 0 -m docs`: the commands of the pages run as they are written, in a folder that has what they name.

Without the mark, those run with which a user begins to fine-tune a released model, in this process.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands_run import console as console
from commands_run import signals_keep_their_effect as signals_keep_their_effect
from pages import PAGES, ROOT, Block, read
from workspace import add_runs, make_files

# Programs that no block runs: they install, serve, submit jobs, or are the tests themselves.
NOT_RUN = (
    "gcloud",
    "git",
    "jupyter",
    "mkdocs",
    "pip",
    "pre-commit",
    "pyright",
    "pytest",
    "ruff",
    "srun",
    "tensorboard",
    "xprof",
)
# What runs in place of the programs. Before each, the runs of the folder are as they were, and NEW does not exist.
FIRST = """#!/usr/bin/env bash
case "$1 $2" in "-m venv" | "-m pytest") exit 0 ;; esac
rm -rf NEW
shopt -s nullglob
for run in "$GIVEN"/runs/*; do rm -rf "runs/${run##*/}" && cp -a "$run" runs/; done
"""
BLOCKS = [(name, block) for name in PAGES for block in read(name).shell if not block.not_run]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "files"
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def given(files):
    add_runs(files)
    return files


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    python = f'{FIRST}exec "{sys.executable}"'
    texts = {"python": f'{python} "$@"\n', "python3": f'{python} "$@"\n', "moezoo": f'{python} -m moezoo "$@"\n'}
    for name, text in (texts | dict.fromkeys(NOT_RUN, "#!/bin/sh\n")).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.weekly
def test_a_released_model_is_fine_tuned(files, console, tmp_path, monkeypatch):
    """In two steps of a tiny model, in this process: tests/cli has commands in processes of their own."""
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "here"))
    commands = read("docs/released.md").shell[0].script.replace("\\\n", " ").splitlines()
    for program, *words in map(shlex.split, commands):
        code, _, err = console(*words)
        assert (program, code) == ("moezoo", 0), f"{words}: {err}"


@pytest.mark.docs
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name}:{block.line}" for name, block in BLOCKS])
def test_a_block_runs(name, block, given, programs, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # programs as users have them
    run(name, block, given, programs, tmp_path / "here")


def run(name: str, block: Block, given: Path, programs: Path, here: Path) -> None:
    """Run a block of a page in a new folder. Variables that the blocks before it set are set."""
    shutil.copytree(given, here)
    shutil.copytree(ROOT / "notebooks", here / "notebooks")  # no link, because a block writes one
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "activate").touch()
    for path in ("benchmarks", "conf", "docs", "kernels", "models", "moezoo", "pyproject.toml", "scripts", "tests"):
        (here / path).symlink_to(ROOT / path)
    before = [each.script for each in read(name).shell if each.line < block.line]
    variables = [line for script in before for line in script.splitlines() if re.match('[A-Z]+="', line)]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, "PATH": path, "GIVEN": str(given), "WANDB_MODE": "offline"}
    bash = ["bash", "-euo", "pipefail", "-c", "\n".join([*variables, block.script])]
    done = subprocess.run(bash, cwd=here, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.script}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
