"""A run small enough to be repeated."""

import jax
import pytest

from moezoo.endurance import TINY


@pytest.fixture
def shared_cache(monkeypatch, pytestconfig):
    """Processes of their own compile what no earlier one has."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytestconfig.cache.mkdir(f"jax-{jax.__version__}-processes")))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides of a tiny run, of which twenty steps show that something is learned."""
    return (*TINY, "optimizer.learning_rate=0.01", "schedule.warmup_steps=2", "log_every=1")
