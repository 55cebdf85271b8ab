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
    """Continue a validation text, to `seq_len` or 256 tokens, at temperature 0.7, by the run's seed.

    The prompt is what stands before the first predicted token of a document, or else the start of a validation row.
    """
    source = next(iter(source.parts.values()))  # of a mixture the first
    longest = min(cfg.seq_len, _LONGEST)
    prompt = source.question(longest)
    if prompt is None:
        (batch, *_) = validation_batches(source, seq_len=cfg.seq_len, batch_size=1, limit=1)
        first_document = int((np.asarray(batch.segments) == 1).sum())
        prompt = np.asarray(batch.tokens)[0, : max(1, min(longest // 4, first_document))]
    length = len(prompt)
    ids = generate(
        model,
        prompt[None],
        max_new_tokens=max(1, longest - length),
        eos_token_id=list(source.ends) or None,
        execution=execution,
        temperature=_TEMPERATURE,
        vocab=source.vocab,
        key=jax.random.key(cfg.seed),
    )
    end = np.flatnonzero(np.isin(ids[0, length:], source.ends))
    return Sample(source.decode(prompt), source.decode(ids[0, length : length + end[0] if len(end) else None]))
