"""`pytest -n 0 -m docs`: the commands of the pages run as they are written, in a folder that has what they name."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, read
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
for run in "$GIVEN"/runs/*; do rm -rf "runs/${run##*/}" && cp -a "$run" runs/; done
"""
BLOCKS = [(name, block) for name in PAGES for block in read(name).shell if not block.not_run]

pytestmark = [pytest.mark.docs, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "files"
    make_files(folder)
    add_runs(folder)
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    python = f'{FIRST}exec "{sys.executable}"'
    texts = {"python": f'{python} "$@"\n', "python3": f'{python} "$@"\n', "moezoo": f'{python} -m moezoo "$@"\n'}
    for name, text in (texts | dict.fromkeys(NOT_RUN, "#!/bin/sh\n")).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name}:{block.line}" for name, block in BLOCKS])
def test_a_block_runs(name, block, given, programs, tmp_path):
    """Variables that the blocks before it set are set."""
    here = tmp_path / "here"
    shutil.copytree(given, here)
    shutil.copytree(ROOT / "notebooks", here / "notebooks")  # no link, because a block writes one
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "activate").touch()
    for path in ("benchmarks", "conf", "docs", "kernels", "models", "moezoo", "pyproject.toml", "scripts", "tests"):
        (here / path).symlink_to(ROOT / path)
    before = [each.script for each in read(name).shell if each.line < block.line]
    variables = [line for script in before for line in script.splitlines() if re.match('[A-Z]+="', line)]
    settings = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    settings |= {"PATH": f"{programs}{os.pathsep}{settings['PATH']}", "GIVEN": str(given), "WANDB_MODE": "offline"}
    bash = ["bash", "-euo", "pipefail", "-c", "\n".join([*variables, block.script])]
    done = subprocess.run(bash, cwd=here, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.script}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
