"""The wheel and the source distribution: what they hold, that equal files give equal bytes, and that the wheel runs.

Builds run in copies of the repository, with the setuptools of this environment. The fresh environment sees the
dependencies of this one, so what pyproject.toml lists as dependencies is not proven here (`tests/test_package.py`).
"""

import email
import glob
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.newer

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# What git ignores. No pattern has a folder in it, except for one whose last part suffices.
JUNK = [Path(line).name for line in (ROOT / ".gitignore").read_text().split()]
LINKED = ("conf", "kernels", "models")
BUILD = "import os, sys, setuptools.build_meta as b; os.umask(int(sys.argv[3])); getattr(b, sys.argv[1])(sys.argv[2])"


class Built(NamedTuple):
    """The copies, and of each distribution the path that two builds gave."""

    first: Path
    second: Path
    sources: tuple[Path, Path]
    wheels: tuple[Path, Path]


def copy_tree(target: Path) -> Path:
    """Copy what git would track."""
    return shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(".git", *JUNK))


def build(kind: str, tree: Path, umask: int = 0o022) -> Path:
    """Build "sdist" or "wheel" in a copy and return the path of the file."""
    target = tree.parent / f"{tree.name}-{kind}"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target), str(umask)],
        cwd=tree,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    first, second = copy_tree(folder / "first"), copy_tree(folder / "second")
    for tree in (first, second):
        (tree / "kernels" / "blocks.json").write_text("{}")  # measured on a GPU, so not every checkout has it
    # The same files with other modes and times, and with what work leaves in a checkout.
    for path in [second, *second.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o700 if path.stat().st_mode & 0o100 else 0o600)
            os.utime(path, (1e9, 1e9))
    for name in ("build/lib/moezoo/gone.py", "runs/a/metrics.jsonl", "tests/__pycache__/a.pyc", ".ci/venv/a.txt"):
        (second / name).parent.mkdir(parents=True, exist_ok=True)
        (second / name).touch()
    (second / "moezoo.egg-info").mkdir()
    (second / "moezoo.egg-info" / "SOURCES.txt").write_text("runs/a/metrics.jsonl\n")
    sources = build("sdist", first), build("sdist", second, umask=0o077)
    # As on a file system without symbolic links.
    with tarfile.open(sources[0]) as tar:
        tar.extractall(folder, [member for member in tar if not member.issym()], filter="data")
    wheels = build("wheel", second, umask=0o077), build("wheel", folder / f"moezoo-{VERSION}")
    return Built(first, second, sources, wheels)


def test_equal_files_give_equal_bytes(built):
    """Also with other modes, times and left-overs; and a source distribution gives the wheel of its tree."""
    for one, other in (built.sources, built.wheels):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()


def test_the_wheel_holds_all_of_the_package_and_nothing_else(built):
    package = glob.glob("moezoo/**", root_dir=built.first, recursive=True)
    expected = {name for name in package if (built.first / name).is_file()}
    assert {"moezoo/py.typed", "moezoo/kernels/blocks.json", "moezoo/conf/model/mixtral.yaml"} <= expected
    about = f"moezoo-{VERSION}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    with zipfile.ZipFile(built.wheels[0]) as wheel:
        assert set(wheel.namelist()) == expected | {f"{about}/{name}" for name in names}
        assert {stat.S_IMODE(member.external_attr >> 16) for member in wheel.infolist()} <= {0o644, 0o664}
        assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = email.message_from_bytes(wheel.read(f"{about}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_source_distribution_holds_the_repository(built):
    """Files that are linked into the package are there, and links stand at the top."""
    tree = glob.glob("**", root_dir=built.first, recursive=True, include_hidden=True)
    made = ("moezoo.egg-info/", "moezoo-")  # by the build
    files = {name for name in tree if (built.first / name).is_file() and not name.startswith(made)}
    with tarfile.open(built.sources[0]) as tar:
        members = {member.name.partition("/")[2]: member for member in tar}
    held = {name for name, member in members.items() if member.isfile() and not name.startswith(made)}
    assert held - {"PKG-INFO", "setup.cfg"} == {name for name in files if name.split("/")[0] not in LINKED}
    assert {name: member.linkname for name, member in members.items() if member.issym()} == {
        name: f"moezoo/{name}" for name in LINKED
    }
    assert {(member.uid, member.uname, member.mtime) for member in members.values()} == {(0, "", 1700000000)}


def test_a_checkout_without_links_is_refused_in_one_line(built, tmp_path):
    """Git writes a link as a file that holds its target where the file system has none."""
    (tmp_path / "moezoo").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "moezoo" / "conf").write_text("../conf")
    done = subprocess.run([sys.executable, "setup.py", "bdist_wheel"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: moezoo/conf is not a folder")
    assert "core.symlinks=true" in line


STEPS = """
import importlib.metadata, importlib.util, pathlib, sys
import moezoo
assert pathlib.Path(moezoo.__file__).is_relative_to(sys.prefix), moezoo.__file__
print([name for name in ("benchmarks", "conf", "kernels", "models", "tests") if importlib.util.find_spec(name)])
print(moezoo.compose("model=mixtral_8x7b").model.layers)
"""


def test_the_wheel_runs_in_a_fresh_environment_from_an_empty_folder(built, tmp_path):
    """Without a checkout: help, a preset, training, and a continuation by what was trained."""
    fresh, empty = tmp_path / "fresh", tmp_path / "empty"
    venv.create(fresh, symlinks=True)
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = ["-m", "pip", "--python", str(fresh), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, str(built.wheels[0])], env=environment, check=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    # A .pth file in a folder that a .pth file adds is not read, so an editable install there stays out of sight.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    def run(*words: str) -> str:
        done = subprocess.run(
            [fresh / "bin" / words[0], *words[1:]],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "scripts/" not in done.stdout
        return done.stdout

    assert run("python", "-c", STEPS).split("\n")[:2] == ["[]", "32"]
    assert f"moezoo {VERSION}" in run("moezoo", "--version")
    assert "prepare-data" in run("moezoo", "--help")
    assert run("moezoo", "train", "--help").startswith("usage: moezoo train ")
    small = ("mesh=single", "model.layers=1", "model.embed=32", "model.expert_mlp=16", "seq_len=32", "batch_size=2")
    assert "step 2/2" in run("moezoo", "train", *small, "steps=2", "run_dir=run")
    assert run("moezoo", "generate", "run_dir=run", "prompt=def", "max_new_tokens=4").startswith("def")
    assert {path.name for path in empty.iterdir()} == {"run"}


def test_a_checkout_gives_only_what_git_tracks(tmp_path):
    """Notes, keys and runs in folders that are packed stay where they are."""
    tree = copy_tree(tmp_path / "tree")
    for command in (["init", "-q"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    for name in ("docs/secrets.txt", "tests/.env", "moezoo/models/scratch.py", "notes.md"):
        (tree / name).write_text("mine")
    with tarfile.open(build("sdist", tree)) as packed:
        names = packed.getnames()
    held = {name.partition("/")[2] for name in names}
    assert {"moezoo/models/mixtral.py", "docs/start.md", "setup.py", "moezoo/conf/train.yaml"} <= held
    assert not held & {"docs/secrets.txt", "tests/.env", "moezoo/models/scratch.py", "notes.md"}
