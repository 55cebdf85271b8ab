"""A run small enough to be repeated."""

import jax
import pytest

# Two layers of the default model at the smallest sizes that eight devices divide, on data of known structure.
TINY = (
    "model.vocab=32",
    "model.embed=32",
    "model.layers=2",
    "model.head_dim=8",
    "model.expert_mlp=16",
    "data=synthetic",
    "data.vocab=32",
    "data.documents=200",
    "data.document_length=100",
    "data.eval_sequences=16",
    "seq_len=16",
)


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
