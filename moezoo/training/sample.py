"""The sample at the end of a run: the model continues a text that it was not trained on."""

from typing import NamedTuple

import jax
import numpy as np

from moezoo.config.settings import TrainConfig
from moezoo.data import Source, validation_batches
from moezoo.generation.generate import generate
from moezoo.models.base import LanguageModel
from moezoo.parallel.execution import Execution

_TEMPERATURE = 0.7
# The most tokens of a sample, prompt included: each new one is a pass over all layers.
_LONGEST = 256


class Sample(NamedTuple):
    """A prompt from the validation split, and the model's continuation of it."""

    prompt: str
    continuation: str


def sample(model: LanguageModel, source: Source, cfg: TrainConfig, execution: Execution) -> Sample:
    """Continue the start of a validation row, to `seq_len` or 256 tokens, at temperature 0.7, by the run's seed."""
    source = next(iter(source.parts.values()))  # of a mixture the first
    (batch, *_) = validation_batches(source, seq_len=cfg.seq_len, batch_size=1, limit=1)
    longest = min(cfg.seq_len, _LONGEST)
    first_document = int((np.asarray(batch.segments) == 1).sum())
    length = max(1, min(longest // 4, first_document))
    ids = generate(
        model,
        np.asarray(batch.tokens)[:, :length],
        max_new_tokens=max(1, longest - length),
        execution=execution,
        temperature=_TEMPERATURE,
        vocab=source.vocab,
        key=jax.random.key(cfg.seed),
    )
    return Sample(source.decode(ids[0, :length]), source.decode(ids[0, length:]))
