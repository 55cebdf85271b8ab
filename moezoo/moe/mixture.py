"""The mixture of experts: route, dispatch, run the experts, combine."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from moezoo.moe.dispatch import Assignment, Dispatched
from moezoo.moe.dispatch.resolve import resolve
from moezoo.moe.experts import Experts
from moezoo.moe.router import Router
from moezoo.moe.routing import LayerSums
from moezoo.parallel.collectives import GROUPED_MATMUL, vary_like, varying_axes
from moezoo.parallel.execution import Execution


class MoEOutput(NamedTuple):
    """Each token's sum over its experts times their gates; what ran `beside`, None if nothing did; the routing sums."""

    routed: Float[Array, "batch seq embed"]
    beside: Float[Array, "batch seq embed"] | None
    sums: LayerSums


class MoE(eqx.Module):
    """A router and its experts; how tokens reach them is the execution's business."""

    router: Router
    experts: Experts

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        valid: Bool[Array, "batch seq"],
        execution: Execution,
        beside: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq embed"]] | None = None,
    ) -> MoEOutput:
        """Tokens through their experts, in as many chunks as the strategy says; padding comes out zero.

        A chunk is sent off before the experts work on the one before it, so that devices compute while rows travel.
        `beside` is what a layer computes of `x` besides, shared experts: it runs while the first chunk travels.
        """
        group = execution.expert_group(self.router.weight.shape[1])
        assignment, sums = self.router(x, valid, execution.routing)
        tokens = rearrange(x, "b s d -> (b s) d")
        # Every part of an assignment varies as the tokens do, so that strategies see one type.
        assignment = jax.tree.map(lambda a: vary_like(a, tokens), assignment)
        strategy = resolve(execution.dispatch, group, varying_axes(tokens))

        def send(chunk: _Chunk) -> Dispatched:
            with jax.named_scope("dispatch"):
                return strategy.dispatch(chunk.tokens, chunk.assignment, group)

        def compute(there: Dispatched) -> Float[Array, "rows embed"]:
            with jax.named_scope("experts"):
                return self.experts(there.rows, there.group_sizes, execution.grouped_matmul)

        def collect(rows: Float[Array, "rows embed"], there: Dispatched) -> Float[Array, "chunk embed"]:
            with jax.named_scope("combine"):
                return strategy.combine(rows, there.state, group)

        first, *later = _chunks(tokens, assignment, strategy.chunks)
        there = send(first)
        with jax.named_scope("beside"):
            alongside = None if beside is None else beside(x)
        back, dropped = [], there.dropped
        for chunk in later:
            following = send(chunk)
            back.append(collect(_after(compute(there), alongside, following.rows), there))
            dropped += following.dropped
            there = following
        routed = jnp.concatenate([*back, collect(_after(compute(there), alongside), there)])
        routed = rearrange(routed, "(b s) d -> b s d", b=x.shape[0])
        return MoEOutput(routed, alongside, sums._replace(dropped=vary_like(dropped, tokens)))


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


class _Chunk(NamedTuple):
    tokens: Float[Array, "chunk embed"]
    assignment: Assignment


def _chunks(tokens: Float[Array, "tokens embed"], assignment: Assignment, count: int) -> list[_Chunk]:
    bounds = [0, *itertools.accumulate(chunk_sizes(tokens.shape[0], count))]
    return [
        _Chunk(tokens[a:b], Assignment(assignment.expert_ids[a:b], assignment.gates[a:b]))
        for a, b in itertools.pairwise(bounds)
    ]
