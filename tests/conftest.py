"""What holds for every test.

- JAX has 8 virtual CPU devices, with the threads and limits of collectives that users have.
- Implicit promotion of dtypes and ranks is an error, as is every warning (`pyproject.toml`).
- With MOEZOO_CHECK_TYPES=1, as in a part of CI, calls of functions check their annotations in the files of moezoo that
  annotate arrays: a fifth of the time of tests that trace. pyright alone checks those of other files.
- Each test has its own working directory.
"""

import copy
import gc
import glob
import importlib.metadata
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs without the Python lines that made their operations, which compilation copies and hashes often.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from jax._src import cache_key, compiler
from jaxtyping import install_import_hook
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Test programs run for a moment only, so LLVM optimises them little. This does not change what they compute.
flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# Generate code of a program as one module: it is too small for work on its parts to pay.
flags += ["--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags += ["--xla_cpu_use_fusion_emitters=false"]  # later versions have no such flag
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
root = Path(__file__).parents[1]
# As in scripts/bench.py: the path is removed again, because libraries look for packages `kernels` and `models`.
sys.path.insert(0, str(root))
import benchmarks  # noqa: E402, F401

sys.path.remove(str(root))
if os.environ.get("MOEZOO_CHECK_TYPES") == "1":
    files = glob.glob("moezoo/**/*.py", root_dir=root, recursive=True)
    arrays = [file.removesuffix(".py").replace("/", ".") for file in files if "jaxtyping" in (root / file).read_text()]
    install_import_hook(arrays, "beartype.beartype")
# The threads and the limits of waiting that users have, which depend on how JAX starts.
from moezoo.parallel.mesh import start  # noqa: E402

assert len(start(8)) == 8

# A shell starts jobs in the background with SIGINT ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes many small objects, and each garbage collection visits all objects. Collect rarely: with a tenth of this
# number it took 5% to 11% of the time of tests that trace, and memory was the same.
gc.set_threshold(1_000_000, 20, 100)

# No deadline: the first example of a test compiles. `derandomize`: every run tries the same examples.
settings.register_profile("moezoo", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("moezoo")


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes `-n auto` starts: one per usable core, at most one per 4 GiB, at least one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, memory // 2**32))


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs between tests, processes and runs; not with jax 0.10 (`moezoo.parallel.cache`)."""
    if not jax.__version__.startswith("0.10."):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir(f"jax-{jax.__version__}")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("home"))  # of processes that tests start


# Not `--dist loadgroup`: with pytest 9.2 and xdist 3.8, the mark `xdist_group` has no effect.
class ByFile(LoadFileScheduling):
    """Send the tests of a file to one process, where they share compiled programs.

    Planted errors and notebooks share nothing.
    """

    def _split_scope(self, nodeid: str) -> str:
        apart = "test_mutations" in nodeid or "test_notebooks" in nodeid
        return nodeid if apart else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Return what distributes the tests."""
    return ByFile(config, log)


# Parts of the names of the tests that take longest. They start first, so that all processes end at about the same time.
LONGEST = (
    "test_notebooks",
    "test_slurm",
    "test_step_parity",
    "test_transformers",
    "tests/benchmarks/",
    "tests/vendors/",
    "tests/training/",
    "tests/parity/",
    "test_interpreted_steps",
    "test_tensor_cores",
    "test_running",
    "tests/tools/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, and give tests marked `full` no time limit."""
    items.sort(key=lambda item: [name not in item.nodeid for name in LONGEST])
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.timeout(0))


_COMPILED: dict[Any, Any] = {}  # programs of this process, with jax 0.10


@pytest.fixture(scope="session", autouse=True)
def _compile_once():
    """Compile a program once per process: a resumed run, for instance, has that of the run before.

    Later versions of JAX load it from a folder (`pytest_configure`). Runs in separate processes compile on their own.
    """
    if not jax.__version__.startswith("0.10."):
        yield
        return
    really_compile = compiler.backend_compile_and_load

    def load(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        used = np.array(list(devices))
        key = (cache_key.get(module, used, options, backend), *(device.id for device in used))
        if host_callbacks or key not in _COMPILED:
            _COMPILED[key] = really_compile(backend, module, devices, options, host_callbacks)
        return _COMPILED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "backend_compile_and_load", load)
        yield


# Each compiled program maps some regions of memory, of which Linux allows a process 65,530. One that had run nine
# tenths of all tests died while it compiled.
_MOST_REGIONS = 15_000


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Forget compiled programs after a file that leaves very many."""
    yield
    regions = Path("/proc/self/maps")
    if regions.exists() and regions.read_bytes().count(b"\n") > _MOST_REGIONS:
        _COMPILED.clear()
        jax.clear_caches()
        gc.collect()


_COMPOSED: dict[Any, Any] = {}  # what Hydra made of each choice of the entries in `conf`
_COMPOSING = ("test_compose", "test_conf.py", "test_saved_config.py")  # files with tests of composing


@pytest.fixture(autouse=True)
def _compose_once(monkeypatch, request):
    """Let Hydra compose the same entries of `conf` once per process, which takes 0.2 s; not in tests of composing."""
    from moezoo.config import compose, overrides

    if request.node.path.name.startswith(_COMPOSING):
        return
    really_compose = compose._compose_groups

    def composed(choices, checks):
        if any(overrides.is_own(group, name) for group, name in choices.items()):
            return really_compose(choices, checks)
        key = tuple(choices.items())
        if key not in _COMPOSED:
            _COMPOSED[key] = really_compose(choices, checks)
        return copy.deepcopy(_COMPOSED[key])

    monkeypatch.setattr(compose, "_compose_groups", composed)


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path, monkeypatch):
    """Run each test in its own directory: a training run without `run_dir` writes below the working directory."""
    monkeypatch.chdir(tmp_path)
