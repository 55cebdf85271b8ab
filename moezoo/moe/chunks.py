"""Run tokens through their experts chunk by chunk: devices compute one chunk while the rows of the next travel."""

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.moe.dispatch import Assignment, Dispatch, Dispatched
from moezoo.moe.dispatch.layer import for_group
from moezoo.moe.experts import Experts
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like
from moezoo.parallel.dispatch import ExpertGroup
from moezoo.parallel.execution import Execution
from moezoo.parallel.kernels import Keep, KernelOrder


def run_experts(
    experts: Experts,
    tokens: Float[Array, "tokens embed"],
    assignment: Assignment,
    group: ExpertGroup,
    execution: Execution,
    alongside: Callable[[], Array | None] = lambda: None,
) -> tuple[Float[Array, "tokens embed"], Int[Array, ""], Array | None]:
    """Bring tokens to their experts and back, in the chunks of the execution's strategy.

    Args:
        experts: Those that run on this device (`Execution.whole`).
        tokens: This device's tokens.
        assignment: Their experts and gates.
        group: The devices that share experts.
        execution: Strategy, kernels and what they keep.
        alongside: Returns what is computed while the first chunk travels.

    Returns:
        For each token the partial sum over its experts of result times gate, the number of dropped assignments, and
        the result of `alongside`.
    """
    # All arrays of an assignment vary over the same mesh axes as the tokens, so strategies see one type.
    assignment = Assignment(*(vary_like(x, tokens) for x in assignment))
    strategy = for_group(execution.strategy, group)
    exchange = Exchange(
        strategy,
        group,
        experts.partial(execution.inner_group("mlp")),
        execution.kernel("grouped_matmul"),
        execution.keep,
    )
    first, *later = cut(tokens, assignment, strategy.chunk_sizes(tokens.shape[0]))
    there = exchange.send(first)
    beside = alongside()
    return *exchange.finish(there, later, beside), beside


class Chunk(NamedTuple):
    """A part of a device's tokens, and their assignment."""

    tokens: Float[Array, "chunk embed"]
    assignment: Assignment


class Exchange(NamedTuple):
    """The steps of every chunk of a layer: dispatch, experts, combine."""

    strategy: Dispatch
    group: ExpertGroup
    experts: Experts
    grouped_matmul: KernelOrder
    keep: Keep

    def send(self, chunk: Chunk) -> Dispatched:
        """Dispatch a chunk."""
        with jax.named_scope("dispatch"):
            return self.strategy.dispatch(chunk.tokens, chunk.assignment, self.group)

    def finish(
        self, first: Dispatched, later: list[Chunk], alongside: Array | None
    ) -> tuple[Float[Array, "tokens embed"], Int[Array, ""]]:
        """Return the results of all chunks in order, and the number of dropped assignments.

        Each chunk is sent before the experts run on the previous one.

        Args:
            first: the dispatched first chunk.
            later: the other chunks.
            alongside: a result that is computed while the first chunk travels. Results are sent back after it is done.
        """
        there, back, dropped = first, [], first.dropped
        for chunk in later:
            following = self.send(chunk)
            back.append(self._collect(_after(self._compute(there), alongside, following.tokens), there))
            dropped += following.dropped
            there = following
        back.append(self._collect(_after(self._compute(there), alongside), there))
        return jnp.concatenate(back), dropped

    def _compute(self, there: Dispatched) -> Float[Array, "there embed"]:
        with jax.named_scope("experts"):
            keep = "products" if self.strategy.uses_results else self.keep
            return self.experts(there.tokens, there.gates, there.plan, implementation=self.grouped_matmul, keep=keep)

    def _collect(self, sums: Float[Array, "there embed"], there: Dispatched) -> Float[Array, "chunk embed"]:
        with jax.named_scope("combine"):
            return self.strategy.combine(sums, there.state, self.group)


def _after(rows: Float[Array, "rows embed"], *others: Array | None) -> Float[Array, "rows embed"]:
    """Return `rows` unchanged, but only after the others are computed.

    Without this, compilers compute the others last, and devices have nothing to do while rows travel. Gradients do not
    wait.
    """
    awaited = [vary_like(lax.stop_gradient(x), rows) for x in others if x is not None]
    return checkpoint_name(_wait(rows, awaited), GROUPED_MATMUL) if awaited else rows


@jax.custom_vjp
def _wait(rows: Array, awaited: list[Array]) -> Array:
    return lax.optimization_barrier((rows, *awaited))[0]


# The gradient that JAX gives a barrier would be a barrier over zeros as large as the awaited arrays.
_wait.defvjp(lambda rows, awaited: (_wait(rows, awaited), None), lambda _, cotangent: (cotangent, None))


def cut(tokens: Float[Array, "tokens embed"], assignment: Assignment, sizes: Iterable[int]) -> list[Chunk]:
    """Cut tokens and assignment into chunks of these `sizes`."""
    bounds = [0, *itertools.accumulate(sizes)]
    return [
        Chunk(tokens[a:b], Assignment(assignment.expert_ids[a:b], assignment.gates[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
