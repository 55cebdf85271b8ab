"""What is installed, and what importing it does."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter."""
    import os

    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_packages_are_the_folders():
    """Setuptools finds none of the linked folders, and an editable install does not notice one that is missing."""
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


def test_importing_starts_no_device_and_nothing_heavy():
    """What takes long to import is imported where it is used."""
    heavy = {
        "grain",
        "matplotlib",
        "optax",
        "orbax",
        "safetensors",
        "tensorflow",
        "tokenizers",
        "torch",
        "transformers",
    }
    started = "from moezoo.parallel.mesh import has_started; print(has_started(), end=' ')"
    assert python(f"import sys, moezoo; {started}; print(sorted({heavy} & set(sys.modules)))") == "False []"


def test_composing_starts_no_device():
    started = "from moezoo.parallel.mesh import has_started; print(has_started())"
    assert python(f"import moezoo; moezoo.compose('mesh=ep8'); {started}") == "False"


def test_a_mesh_shows_as_many_cpu_devices_as_it_needs():
    code = "import moezoo\nprint(moezoo.make_mesh(moezoo.MeshShape(fsdp=2, expert=3)).devices.size)"
    assert python(code) == "6"
