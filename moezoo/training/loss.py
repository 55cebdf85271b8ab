"""The losses of one micro-step, inside `shard_map`."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PyTree

from moezoo.data import Batch
from moezoo.models.base import LanguageModel
from moezoo.models.stages import MicroBatches, run_stages
from moezoo.moe.routing import Routing, reduce_routing
from moezoo.nn.positions import make_context
from moezoo.parallel.collectives import InnerGroup, psum, vary, vary_like
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.dropout import Dropout
from moezoo.parallel.kernels import Target
from moezoo.parallel.mesh_execution import MeshExecution
from moezoo.parallel.weight_mover import WeightMover

# About so many logits are in memory at the same time: tokens of a chunk times vocabulary.
_CHUNK_LOGITS = 2**22
# But no fewer tokens: each chunk reads the unembedding and its gradient, and with 512 tokens a weight of two bytes is
# used for 1,024 FLOPs, more than the 200 to 700 that accelerators compute while they read it.
_CHUNK_TOKENS = 512
# On GPUs up to four times as many: each chunk also reads and writes the gradient of the unembedding in float32, and the
# 80 GB or more of those that kernels are for have room for so many bytes of logits and their gradients.
_MOST_GPU_TOKENS, _GPU_BYTES = 2048, 2**32
BYTES_PER_LOGIT = 12  # logits, or the tanh of those with a cap, their exponentials, and the gradient, in float32


class Losses(NamedTuple):
    """The losses of a micro-step over all devices; `cross_entropy` is the sum over predicted tokens, in nats."""

    cross_entropy: Float[Array, ""]
    routing: Routing


class TokenScores(NamedTuple):
    """Of each token -log p(label) in nats, 0 for labels below 0, and whether no other label has a larger logit."""

    nats: Float[Array, "batch seq"]
    is_likeliest: Bool[Array, "batch seq"]


def chunk_rows(tokens: int, vocab: int, target: Target | None = None) -> int:
    """Return the number of tokens whose logits exist at the same time.

    Args:
        tokens: The tokens of a device.
        vocab: The part of the vocabulary that it has.
        target: What the program is compiled for; None if unknown.
    """
    least = _CHUNK_TOKENS
    if target and target.is_gpu:
        fitting = _GPU_BYTES // (BYTES_PER_LOGIT * vocab) // _CHUNK_TOKENS * _CHUNK_TOKENS
        least = max(least, min(_MOST_GPU_TOKENS, fitting))
    return min(tokens, max(least, _CHUNK_LOGITS // vocab))


@jax.named_scope("head")
def cross_entropy(
    model: LanguageModel,
    hidden: Float[Array, "batch seq embed"],
    labels: Int[Array, "batch seq"],
    execution: MeshExecution,
) -> Float[Array, ""]:
    """Return the sum over this device's tokens of -log p(label), in nats; tokens with a label below 0 do not count.

    Logits exist for one chunk of tokens at a time, never as [tokens, vocab], and are made once: if the result is
    differentiated, a chunk's gradients are computed while its logits exist, those of what is trained only. The backward
    pass multiplies them by a number. So weights are gathered once.

    Where devices share the vocabulary, each makes the logits of its part (Shoeybi et al., 2019, arXiv:1909.08053,
    section 3), and numbers per token are exchanged: a pmax and a psum per chunk. The result is the same on all of them.
    """
    return _cross_entropy(execution, *_cut(model, hidden, labels, execution))


@jax.named_scope("head")
def score_tokens(
    model: LanguageModel,
    hidden: Float[Array, "batch seq embed"],
    labels: Int[Array, "batch seq"],
    execution: MeshExecution,
) -> TokenScores:
    """Return what `cross_entropy` sums, of each token of this device, with the same chunks and exchange of numbers."""
    unembedding, *chunks = _cut(model, hidden, labels, execution)
    unembedding, group = WeightMover(execution).gather(unembedding), execution.inner_group("vocab")

    def score(carry: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        nats, _, is_likeliest = _nats(unembedding(chunk[0]), chunk[1], group)
        return carry, (nats, is_likeliest)

    _, scores = _scan(score, None, (chunks[0], chunks[1]))
    return TokenScores(*(x.reshape(-1)[: labels.size].reshape(labels.shape) for x in scores))


def _cut(model: LanguageModel, hidden: Array, labels: Array, execution: MeshExecution) -> tuple[PyTree, Array, Array]:
    """Return the unembedding, and the activations and labels of all tokens in chunks."""
    group = execution.inner_group("vocab")
    own_vocab = model.readout.matrix.shape[-1]
    rows = chunk_rows(labels.size, own_vocab, execution.target)
    pad = -labels.size % rows
    tokens = jnp.pad(rearrange(hidden, "b s d -> (b s) d"), ((0, pad), (0, 0)))
    targets = jnp.pad(labels.reshape(-1), (0, pad), constant_values=-1)
    chunks = rearrange(tokens, "(n c) d -> n c d", c=rows), targets.reshape(-1, rows)
    # Typed as varying here, so that the gradients of both are too.
    unembedding, tokens = WeightMover(execution).vary((model.readout, chunks[0]))
    unembedding = eqx.tree_at(lambda u: u.norm, unembedding, group.enter_parameters(unembedding.norm))
    return unembedding, group.enter(tokens), chunks[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(execution: MeshExecution, unembedding: PyTree, tokens: Array, targets: Array) -> Array:
    unembedding, group = WeightMover(execution).gather(unembedding), execution.inner_group("vocab")

    def add(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        return total + _nats(unembedding(chunk[0]), chunk[1], group)[0].sum(), None

    return _scan(add, vary(jnp.zeros(()), execution.token_axes), (tokens, targets))[0]


def _forward(execution: MeshExecution, *primals: PyTree) -> tuple[Array, tuple[PyTree, list[Array]]]:
    # A leaf that is not `perturbed` needs no gradient: it is not trained or, if activations, nothing before it is.
    unembedding, tokens, targets = jax.tree.map(operator.attrgetter("value"), primals)
    trained, passed_on, _ = jax.tree.map(operator.attrgetter("perturbed"), primals)
    stored, fixed = eqx.partition(unembedding, trained)
    group = execution.inner_group("vocab")
    learned, scatter, fixed = jax.vjp(
        lambda own: eqx.partition(WeightMover(execution).gather(eqx.combine(own, fixed)), trained), stored, has_aux=True
    )

    def add(carry: tuple[Array, PyTree], chunk: tuple[Array, Array]) -> tuple[tuple[Array, PyTree], list[Array]]:
        (total, gradients), (tokens, targets) = carry, chunk
        operands = (learned, tokens) if passed_on else (learned,)
        logits, pull = jax.vjp(lambda learned, x=tokens: eqx.combine(learned, fixed)(x), *operands)
        nats, by_logits, _ = _nats(logits, targets, group)
        by_learned, *by_tokens = pull(by_logits)
        return (total + nats.sum(), jax.tree.map(jnp.add, gradients, by_learned)), by_tokens

    zeros = jax.tree.map(lambda x: vary_like(jnp.zeros_like(x), x), learned)
    start = vary(jnp.zeros(()), execution.token_axes), zeros
    (total, by_learned), by_tokens = _scan(add, start, (tokens, targets))
    return total, (scatter(by_learned)[0], by_tokens)


def _backward(
    execution: MeshExecution, gradients: tuple[PyTree, list[Array]], cotangent: Array
) -> tuple[PyTree, Array | None, None]:
    del execution
    stored, by_tokens = jax.tree.map(lambda x: (x.astype(jnp.float32) * cotangent).astype(x.dtype), gradients)
    return stored, by_tokens[0] if by_tokens else None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _nats(
    logits: Float[Array, "rows vocab"], targets: Int[Array, " rows"], group: InnerGroup
) -> tuple[Array, Array, Array]:
    """Return -log p(target) of each row, 0 for targets below 0, and the gradient of its sum by this device's `logits`.

    The last of the results is whether no logit of a row is larger than the target's.
    """
    counts, columns = targets >= 0, targets[:, None] - group.index * logits.shape[1]
    label = columns == jax.lax.broadcasted_iota(columns.dtype, logits.shape, 1)
    highest = group.largest(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - highest)
    # The denominator, and the target's logit, which is on one device: one sum over the group for both.
    sums = [weights.sum(-1, keepdims=True), jnp.where(label, logits, 0).sum(-1, keepdims=True)]
    total, chosen = jnp.split(group.leave(jnp.concatenate(sums, axis=-1)), 2, axis=-1)
    nats = highest + jnp.log(total) - chosen
    by_logits = jnp.where(counts[:, None], weights / total - label.astype(logits.dtype), 0)
    return jnp.where(counts, nats[:, 0], 0), by_logits, (chosen == highest)[:, 0]


def _scan(step: Callable[..., Any], start: PyTree, chunks: tuple[Array, Array]) -> Any:
    # One chunk needs no loop, into which the compiler would copy the weight.
    return jax.lax.scan(step, start, chunks, unroll=len(chunks[0]) == 1)


def losses(
    model: LanguageModel,
    batch: Batch,
    execution: MeshExecution,
    dropout: Dropout | None = None,
    numbers: Int[Array, " micro"] | None = None,
) -> Losses:
    """Return the losses of one pass over all devices, from this device's part of the batch and of the parameters.

    Args:
        model: This device's part of the model.
        batch: This device's arrays [micro-batches, batch, seq]: without stages one micro-batch, or those of a stage.
        execution: How to run the model.
        dropout: What low-rank pairs drop in this step; each micro-batch drops its own.
        numbers: The number of each micro-batch in the step.
    """
    count, rows, length = batch.tokens.shape
    merged = jax.tree.map(lambda x: x.reshape(-1, length), batch)
    x = model.embed(merged.tokens, execution)
    if execution.stages == 1:
        coordinates = Coordinates(merged.positions, merged.segments)
        context = make_context(coordinates, execution, execution.sequence_order)
        if dropout is not None:
            context = dataclasses.replace(context, dropout=dropout.of(0 if numbers is None else numbers[0]))
        out = model.layers(x, context, execution)
        assert out.sums is not None
        x, sums = out.x, out.sums
        routing = reduce_routing(sums, model.routing_config, execution.batch_axes, execution.sequence_axes)
    else:
        own = MicroBatches(
            Coordinates(batch.positions, batch.segments), jnp.zeros(count, jnp.int32) if numbers is None else numbers
        )
        x = x.reshape(count, rows, length, -1)
        with jax.named_scope("layers"):
            x, routing = run_stages(model.stacks, x, own, dropout, execution, model.routing_config)
        x = x.reshape(count * rows, length, -1)
    local = cross_entropy(model, x, merged.labels, execution)
    with jax.named_scope("loss"):
        nats = psum(local, execution.token_axes)
    return Losses(nats, routing)
