"""Every test runs strictly, on 8 virtual CPU devices, with shapes and dtypes of all annotations checked."""

import gc
import importlib.metadata
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# jax 0.10 sizes the CPU's thread pool by NPROC; with few threads, collectives of several steps can wait forever.
os.environ["NPROC"] = "64"
# Should that happen all the same, end the test instead of hanging.
flags = ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]
# Programs run for moments: translate them to machine code with less care, which leaves what they compute alone.
flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags += ["--xla_cpu_use_fusion_emitters=false"]  # later ones have no such choice
    # A chunked program loaded from the cache below computes other numbers, now and then NaN, with this scheduler.
    flags += ["--xla_cpu_enable_concurrency_optimized_scheduler=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("moezoo", "beartype.beartype")

# Tracing makes many small objects, and a collection of garbage visits all that live: collect rarely.
gc.set_threshold(100_000, 20, 100)

# Compilation takes the time of a first example, so deadlines say nothing; the same examples every run.
settings.register_profile("moezoo", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("moezoo")


def pytest_xdist_auto_num_workers() -> int:
    """Return a process for each core that this one may use, with 4 GiB of memory each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 2**32))


def pytest_configure(config: pytest.Config) -> None:
    """Compile each program once for all tests and processes; another version of JAX has a cache of its own."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir(f"jax-{jax.__version__}")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process waits for it at the end; whole products take their time."""
    items.sort(key=lambda item: "test_notebooks" not in item.nodeid)
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(autouse=True)
def _no_leftover_run_folder(tmp_path, monkeypatch):
    """A run without `run_dir` writes below the working directory: give every test its own."""
    monkeypatch.chdir(tmp_path)
