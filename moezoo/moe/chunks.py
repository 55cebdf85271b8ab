"""Tokens through their experts chunk by chunk, so that devices compute while rows travel."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.moe.dispatch import Assignment, Dispatch, Dispatched
from moezoo.moe.experts import Experts
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.dispatch import ExpertGroup
from moezoo.parallel.kernels import KernelOrder


class Chunk(NamedTuple):
    """Some of a device's tokens, and their assignment."""

    tokens: Float[Array, "chunk embed"]
    assignment: Assignment


class Exchange(NamedTuple):
    """How a layer's tokens meet its experts: the steps that every chunk takes."""

    strategy: Dispatch
    group: ExpertGroup
    experts: Experts
    grouped_matmul: KernelOrder

    def send(self, chunk: Chunk) -> Dispatched:
        """Start a chunk on its way."""
        with jax.named_scope("dispatch"):
            return self.strategy.dispatch(chunk.tokens, chunk.assignment, self.group)

    def finish(
        self, first: Dispatched, later: list[Chunk], alongside: Array | None
    ) -> tuple[Float[Array, "tokens embed"], Int[Array, ""]]:
        """Results of all chunks in order, and the assignments dropped; `first` is the chunk that was sent.

        A chunk is sent before the experts work on the one before it. They wait for what was computed `alongside` the
        first one's journey.
        """
        there, back, dropped = first, [], first.dropped
        for chunk in later:
            following = self.send(chunk)
            back.append(self._collect(_after(self._compute(there), alongside, following.rows), there))
            dropped += following.dropped
            there = following
        back.append(self._collect(_after(self._compute(there), alongside), there))
        return jnp.concatenate(back), dropped

    def _compute(self, there: Dispatched) -> Float[Array, "rows embed"]:
        with jax.named_scope("experts"):
            return self.experts(there.rows, there.group_sizes, self.grouped_matmul)

    def _collect(self, rows: Float[Array, "rows embed"], there: Dispatched) -> Float[Array, "chunk embed"]:
        with jax.named_scope("combine"):
            return self.strategy.combine(rows, there.state, self.group)


def _after(rows: Float[Array, "rows embed"], *others: Array | None) -> Float[Array, "rows embed"]:
    """`rows`, when the others have been computed too, though it needs none of them.

    Else compilers do those last, and nothing is left to do while rows travel. Gradients do not wait.
    """
    awaited = [vary_like(lax.stop_gradient(x), rows) for x in others if x is not None]
    return checkpoint_name(_wait(rows, awaited), GROUPED_MATMUL) if awaited else rows


@jax.custom_vjp
def _wait(rows: Array, awaited: list[Array]) -> Array:
    return lax.optimization_barrier((rows, *awaited))[0]


# A barrier's own gradient would be a barrier, of zeros as large as what was awaited.
_wait.defvjp(lambda rows, awaited: (_wait(rows, awaited), None), lambda _, cotangent: (cotangent, None))


def chunk_sizes(tokens: int, count: int) -> list[int]:
    """At most `count` parts of so many tokens, as even as can be; none is empty."""
    count = max(1, min(count, tokens))
    return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]


def cut(tokens: Float[Array, "tokens embed"], assignment: Assignment, count: int) -> list[Chunk]:
    """The tokens in at most `count` chunks, as even as can be."""
    bounds = [0, *itertools.accumulate(chunk_sizes(tokens.shape[0], count))]
    return [
        Chunk(tokens[a:b], Assignment(assignment.expert_ids[a:b], assignment.gates[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
