"""What is installed, and what importing it does."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moezoo

ROOT = Path(__file__).parent.parent


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
    link = ROOT / "moezoo" / name
    assert link.is_symlink()
    assert link.resolve() == (ROOT / name).resolve()


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
