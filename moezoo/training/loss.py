"""The losses of one micro-step, inside `shard_map`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from moezoo.data import Batch
from moezoo.models.base import LanguageModel
from moezoo.moe.routing import Routing, reduce_routing
from moezoo.nn.positions import make_context
from moezoo.parallel.collectives import psum, vary_like
from moezoo.parallel.context_parallel import Place
from moezoo.parallel.execution import Execution

# The most logits in memory at the same time: rows of a chunk times vocabulary.
_CHUNK_LOGITS = 2**22


class Losses(NamedTuple):
    """The losses of a micro-step over all devices; `cross_entropy` is the sum over predicted tokens, in nats."""

    cross_entropy: Float[Array, ""]
    routing: Routing


def chunk_rows(tokens: int, vocab: int) -> int:
    """Return the number of tokens whose logits exist at the same time, of `tokens` on a device."""
    return max(1, min(tokens, _CHUNK_LOGITS // vocab))


@jax.named_scope("head")
def cross_entropy(
    model: LanguageModel, hidden: Float[Array, "batch seq embed"], labels: Int[Array, "batch seq"], execution: Execution
) -> Float[Array, ""]:
    """Return the sum over this device's tokens of -log p(label), in nats; tokens with a label below 0 do not count.

    Logits exist for one chunk of tokens at a time, in the backward pass too, never as [tokens, vocab].
    """
    rows = chunk_rows(labels.size, model.vocab)
    pad = -labels.size % rows
    tokens = jnp.pad(rearrange(hidden, "b s d -> (b s) d"), ((0, pad), (0, 0)))
    targets = jnp.pad(labels.reshape(-1), (0, pad), constant_values=-1)
    chunks = (rearrange(tokens, "(n c) d -> n c d", c=rows), targets.reshape(-1, rows))

    def whole(unembedding: Any, chunks: tuple[Array, Array]) -> Float[Array, ""]:
        unembedding = execution.whole(unembedding)

        @jax.checkpoint
        def add(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
            tokens, targets = chunk
            logits = unembedding(tokens)
            label = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.bool)  # all false below 0
            nats = jax.nn.logsumexp(logits, axis=-1) - jnp.where(label, logits, 0).sum(-1)
            return total + jnp.where(targets >= 0, nats, 0).sum(), None

        return jax.lax.scan(add, vary_like(jnp.zeros(()), tokens, targets), chunks)[0]

    # The gathered weight is not kept for the backward pass, which gathers it again.
    return jax.checkpoint(whole)(model.unembedding, chunks)


def losses(model: LanguageModel, batch: Batch, execution: Execution) -> Losses:
    """Return the losses over all devices, from this device's part of the batch and of the parameters."""
    context = make_context(Place(batch.positions, batch.segments), execution)
    out = model.layers(model.embed(batch.tokens, execution), context, execution)
    assert out.sums is not None
    local = cross_entropy(model, out.x, batch.labels, execution)
    with jax.named_scope("loss"):
        nats = psum(local, execution.token_axes)
    routing = reduce_routing(out.sums, model.routing_config, execution.batch_axes, execution.sequence_axes)
    return Losses(nats, routing)
