"""A sample for the end of a run: plain sampling that runs the whole window for every token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moezoo.collectives import psum
from moezoo.data import Source, validation_batches
from moezoo.execution import Execution
from moezoo.nn.attention import Place
from moezoo.nn.language_model import LanguageModel
from moezoo.settings import TrainConfig

_TEMPERATURE = 0.7


class Sample(NamedTuple):
    """A prompt from the validation split, and what the model wrote after it."""

    prompt: str
    continuation: str


def sample(model: LanguageModel, source: Source, cfg: TrainConfig, run: Execution) -> Sample:
    """Continue the start of a validation window up to `seq_len` tokens, at temperature 0.7; the seed decides.

    As many windows as a step has sequences run side by side, so that the mesh splits them as in training.
    """
    assert run.mesh is not None
    split: Any = run.tokens_spec

    def local(model: LanguageModel, tokens: Array, place: Place, last: Array) -> Array:
        hidden, _ = model.trunk(model.embed(tokens, run), place, run)
        # One device along the sequence has the last token; what the others compute is left out.
        here = place.position == last
        scores = model.head(jnp.where(here[:, :, None], hidden, 0).sum(1, keepdims=True), run)[:, 0]
        return psum(jnp.where(here.any(1, keepdims=True), scores, 0), run.sequence_axes)

    specs: Any = (run.specs(model), split, Place(split, split), PartitionSpec())
    rows = PartitionSpec(run.batch_axes or None)
    logits = jax.jit(jax.shard_map(local, mesh=run.mesh, in_specs=specs, out_specs=rows))

    count = cfg.batch_size
    (batch, *_) = validation_batches(source, seq_len=cfg.seq_len, batch_size=count, limit=count)
    prompt = max(1, cfg.seq_len // 4)
    ids = np.where(np.arange(cfg.seq_len) < prompt, np.asarray(batch.tokens), 0).astype(np.int32)
    positions = np.broadcast_to(np.arange(cfg.seq_len, dtype=np.int32), ids.shape)
    place = Place(jnp.asarray(positions), jnp.ones(ids.shape, jnp.int32))
    random = np.random.default_rng(cfg.seed)
    for at in range(prompt, cfg.seq_len):
        scores = jax.device_get(logits(model, ids, place, np.int32(at - 1))).astype(np.float64)
        # The largest of scores plus Gumbel noise is a draw from their softmax.
        ids[:, at] = (scores / _TEMPERATURE + random.gumbel(size=scores.shape))[:, : source.vocab].argmax(1)
    return Sample(source.decode(ids[0, :prompt]), source.decode(ids[0, prompt:]))
