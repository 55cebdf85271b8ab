"""A run small enough to be repeated."""

import pytest

# Small in every size; the data has a known structure, so that twenty steps show that something is learned.
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
    "optimizer.learning_rate=0.01",
    "schedule.warmup_steps=2",
    "log_every=1",
)


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides of a tiny run."""
    return TINY
