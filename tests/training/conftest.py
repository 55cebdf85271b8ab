"""Runs small enough to be repeated."""

import jax
import pytest

# Two layers of the default model at the smallest sizes that eight devices divide, on data of known structure.
_TINY = (
    "model.vocab=32",
    "model.embed=32",
    "model.layers=2",
    "model.expert_mlp=16",
    "seq_len=16",
    "optimizer.learning_rate=0.01",
    "schedule=constant",
    "schedule.warmup_steps=2",
    "checkpoint_minutes=0",
    "log_every=1",
)
_SYNTHETIC = (
    "data=synthetic",
    "data.vocab=32",
    "data.documents=200",
    "data.document_length=100",
    "data.eval_sequences=16",
)


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(pytestconfig):
    """Separate processes share a compilation cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = pytestconfig.cache.mkdir(f"jax-{jax.__version__}-processes")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
        yield


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides of a tiny run, which learns something in twelve steps. Its program does not depend on `steps`."""
    return (*_TINY, *_SYNTHETIC, "model.head_dim=8")


@pytest.fixture(scope="session")
def tiny_text() -> tuple[str, ...]:
    """Overrides of a tiny run on text; data.path is missing."""
    return (*_TINY, "model.vocab=256", "model.head_dim=8", "data=text", "data.eval_sequences=4")


@pytest.fixture(scope="session")
def tiny_deepseek() -> tuple[str, ...]:
    """Overrides of a tiny DeepSeek, with a choice bias and micro-steps, on eight devices."""
    return (
        "model=deepseek",
        *_TINY,
        *_SYNTHETIC,
        "model.heads=2",
        "model.q_lora=16",
        "model.kv_lora=8",
        "model.nope_dim=8",
        "model.rope_dim=8",
        "model.value_dim=8",
        "model.mlp=32",
        "model.experts=8",
        "model.experts_per_token=2",
        "model.router.groups=1",
        "model.router.kept_groups=1",
        "model.router.group_score=max",
        "mesh=fsdp2_ep4",
        "execution.microbatches=2",
        "batch_size=16",
    )
