"""Score texts that are given: how likely a model finds their last tokens, on any mesh."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from moezoo.generation.generate import round_up
from moezoo.models.base import LanguageModel
from moezoo.models.choice import choose_dispatch
from moezoo.nn.positions import make_context
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.terminal.progress import OnBatch
from moezoo.training.loss import TokenScores, score_tokens


class Row(NamedTuple):
    """The tokens of a text, of which the last `scored` are scored; there is at least one before them."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The sum of log p of the scored tokens in nats, and whether none of them had a likelier one in its place."""

    log_likelihood: float
    is_greedy: bool


def score_rows(
    model: LanguageModel, rows: Sequence[Row], execution: MeshExecution, batch_size: int, on_batch: OnBatch
) -> list[Score]:
    """Return the score of each row, in their order.

    Rows are sorted by length and read in batches of one size, which are padded to rounded lengths; a program is
    compiled for each such length.

    Args:
        model: The model, laid out for `execution`.
        rows: The rows, of at most `config.longest` tokens and one more.
        execution: How the model runs, for `batch_size` whole rows, with a strategy that drops nothing.
        batch_size: The rows of a batch.
        on_batch: `on_batch(done, total)` is called before each batch and at the end.
    """
    order = sorted(range(len(rows)), key=lambda at: -len(rows[at].tokens))
    scores: list[Any] = [None] * len(rows)
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    for done, batch in enumerate(batches):
        on_batch(done, len(batches))
        width = round_up(len(rows[batch[0]].tokens) - 1)
        tokens, segments, labels = np.zeros((3, batch_size, width), np.int32)
        labels -= 1
        # A batch that is not full repeats its first row.
        for row, at in enumerate(batch + batch[:1] * (batch_size - len(batch))):
            ids, count = rows[at].tokens, len(rows[at].tokens) - 1
            tokens[row, :count], segments[row, :count] = ids[:-1], 1
            labels[row, count - rows[at].scored : count] = ids[len(ids) - rows[at].scored :]
        chosen = choose_dispatch(model.stacks, batch_size, width, execution, "evaluate")
        # Wait for each batch: on the CPU, collectives of several can wait for each other forever (jax 0.10).
        found = jax.device_get(
            jax.block_until_ready(_score(model, *map(jnp.asarray, (tokens, segments, labels)), chosen))
        )
        for row, at in enumerate(batch):
            scored = labels[row] >= 0
            nats = found.nats[row, scored].sum(dtype=np.float64)
            scores[at] = Score(-float(nats), bool(found.is_likeliest[row, scored].all()))
    on_batch(len(batches), len(batches))
    return scores


@functools.partial(jax.jit, static_argnames="execution")
def _score(
    model: LanguageModel,
    tokens: Int[Array, "batch seq"],
    segments: Int[Array, "batch seq"],
    labels: Int[Array, "batch seq"],
    execution: MeshExecution,
) -> TokenScores:
    def local(model: LanguageModel, tokens: Array, at: Coordinates, labels: Array) -> TokenScores:
        out = model.layers(model.embed(tokens, execution), make_context(at, execution, "contiguous"), execution)
        return score_tokens(model, out.x, labels, execution)

    at = Coordinates(jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape), segments)
    split: Any = execution.tokens_spec
    specs = (execution.specs(model), split, Coordinates(split, split), split)
    return execution.run(local, (model, tokens, at, labels), specs, TokenScores(split, split))
