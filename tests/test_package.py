"""What is installed, and what importing it does."""

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moezoo

ROOT = Path(__file__).parent.parent
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def test_packages_are_the_folders():
    """Setuptools does not find linked folders, and an editable install does not notice that one is missing."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"moezoo"}
    for top, name in (("moezoo", "moezoo"), ("models", "moezoo.models"), ("kernels", "moezoo.kernels")):
        for path in (ROOT / top).rglob("__init__.py"):
            parts = path.parent.relative_to(ROOT / top).parts
            if top != "moezoo" or not (parts and parts[0] in ("models", "kernels", "conf")):
                found.add(".".join((name, *parts)))
    assert set(listed) == found | {"moezoo.conf"}


@pytest.mark.parametrize("name", ["models", "kernels", "conf"])
def test_top_level_folders_are_linked_inside_the_package(name):
    """In a source distribution the folder is inside, and the link at the top."""
    assert (ROOT / "moezoo" / name).is_symlink() != (ROOT / name).is_symlink()
    assert (ROOT / "moezoo" / name).samefile(ROOT / name)


def test_public_names():
    """Every public name can be used and listed, and another name is refused as in any module."""
    assert set(moezoo.__all__) <= set(dir(moezoo))
    assert all(hasattr(moezoo, name) for name in moezoo.__all__)
    assert not hasattr(moezoo, "nothing_such")
    namespace: dict = {}
    exec("from moezoo import *", namespace)
    assert set(moezoo.__all__) <= set(namespace)


STEPS = """
import sys
import moezoo
print("jax" in sys.modules)

from moezoo.parallel.mesh import has_started
moezoo.train
heavy = "grain matplotlib optax orbax safetensors tensorflow tensorstore tokenizers torch transformers".split()
print(*sorted(set(heavy) & set(sys.modules)))

moezoo.compose("mesh=ep8")
print(has_started())

print(moezoo.make_mesh(moezoo.MeshShape(fsdp=2, expert=3)).devices.size)
"""


def test_a_fresh_process_imports_late_and_shows_as_many_cpu_devices_as_a_mesh_needs():
    """`import moezoo` imports no JAX, its names nothing that takes long, and composing starts no device."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == ["False", "", "False", "6"], done.stderr


# Modules whose distribution has another name.
DISTRIBUTIONS = {
    "backports": "backports.zstd",
    "hydra": "hydra-core",
    "ml_dtypes": "ml-dtypes",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
}


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module that is installed."""
    paths = [path for top in ("moezoo", "models", "kernels") for path in (ROOT / top).rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in paths}


def test_what_is_imported_is_required():
    """Every imported library is a dependency or in an extra, and not only something that a dependency brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    required = {re.split(r"[\[<>=; ]", line)[0] for line in itertools.chain(project["dependencies"], extras)}
    imported = set()
    for node in itertools.chain.from_iterable(map(ast.walk, parsed().values())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.partition(".")[0] for name in names}
    # `compression` is in the standard library from Python 3.14 on.
    libraries = imported - {"moezoo", "compression", *sys.stdlib_module_names}
    assert {DISTRIBUTIONS.get(name, name) for name in libraries} - required == set()


# What only the repository has. README.md is also the model card of a folder.
REPOSITORY_ONLY = re.compile(
    r"(?<![\w/.])(?:docs|scripts|tests|benchmarks|notebooks)/\S+|README(?!\.md)|CONTRIBUTING|pip install -e"
)


def test_texts_name_only_what_a_wheel_has():
    """A message or a help names a page only as one of the repository. Docstrings are for readers of the source."""
    found = []
    for path, tree in parsed().items():
        bodies = [node.body[0] for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and node.body]
        docstrings = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = re.sub(r"docs/\w+\.md of the repository", "", node.value)
                found += [f"{path.relative_to(ROOT)}: {match}" for match in REPOSITORY_ONLY.findall(text)]
    assert found == []


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("Scripts/moezoo.exe", "error: "),
        ("-m", "error: "),
        (str(Path(moezoo.__file__).parents[1] / "scripts" / "train.py"), "error: "),
        ("moezoo-trials/mine.py", "ImportError: "),
    ],
)
@pytest.mark.parametrize(
    ("made", "line_of"),
    [
        ("platform = 'win32'", "moezoo does not run on Windows itself; install WSL2"),
        ("version_info, sys.version = (3, 10, 13), '3.10.13 (main)'", "moezoo needs Python 3.11 or newer, and "),
    ],
    ids=["Windows", "Python 3.10"],
)
def test_where_moezoo_does_not_run_is_said_in_a_line(command, shown, made, line_of):
    """A command ends with the line alone; a program of the user's own can catch the error."""
    code = f"import sys; sys.{made}; sys.argv[0] = {command!r}; import moezoo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *trace, line = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"{shown}{line_of}")
    assert bool(trace) == (shown == "ImportError: ")
