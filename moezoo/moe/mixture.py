"""The mixture of experts: route, dispatch, run the experts, combine.

Naive equivalent for each token x: y = sum_k gate_k * expert_k(x) + shared(x), over the K experts that the router chose,
or with gates on inputs y = sum_k expert_k(gate_k * x) + shared(x).

Tokens run through their experts in chunks: devices compute one chunk while the rows of the next travel.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.moe.dispatch import Assignment, Dispatch, Dispatched, Gather, Replicated
from moezoo.moe.experts import Experts
from moezoo.moe.router import Router
from moezoo.nn.base import FeedForward, FeedForwardOutput
from moezoo.nn.linear import normal, project
from moezoo.nn.mlp import MLP
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context
from moezoo.parallel.axes import Weight
from moezoo.parallel.collectives import GROUPED_MATMUL, vary, vary_like, varying_axes
from moezoo.parallel.dispatch import ExpertGroup
from moezoo.parallel.mesh_execution import MeshExecution


def for_group(dispatch: Dispatch | None, group: ExpertGroup) -> Dispatch:
    """Return `dispatch`, by default `Gather`; where all devices of the group have the same tokens, in `Replicated`."""
    strategy = dispatch or Gather()
    return Replicated(strategy, chunks=strategy.chunks) if group.replicated else strategy


def layer_rows(dispatch: Dispatch | None, tokens: int, k: int, group: ExpertGroup) -> int:
    """Return the rows that a device has room for in a layer, summed over chunks. Arguments as for `Dispatch.rows`."""
    strategy = for_group(dispatch, group)
    return sum(strategy.rows(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))


def run_experts(
    experts: Experts,
    tokens: Float[Array, "tokens embed"],
    assignment: Assignment,
    group: ExpertGroup,
    execution: MeshExecution,
    alongside: Callable[[], Array | None] = lambda: None,
) -> tuple[Float[Array, "tokens embed"], Int[Array, ""], Array | None]:
    """Bring tokens to their experts and back, in the chunks of the execution's strategy.

    Each chunk is sent before the experts run on the previous one.

    Args:
        experts: Those that run on this device (`WeightMover.gather`).
        tokens: This device's tokens.
        assignment: Their experts and gates.
        group: The devices that share experts.
        execution: The strategy, the kernels and what they keep.
        alongside: A function that returns what is computed while the first chunk travels. Results are sent back after
            it is done.

    Returns:
        For each token the partial sum over its experts of result times gate, the number of dropped assignments, and
        the result of `alongside`.
    """
    # All arrays of an assignment vary over the same mesh axes as the tokens, so strategies see one type.
    assignment = Assignment(*(vary_like(x, tokens) for x in assignment))
    strategy = for_group(execution.strategy, group)
    experts = experts.partial(execution.inner_group("mlp"))
    order, keep = execution.kernel("grouped_matmul"), "products" if strategy.uses_results else execution.keep

    def send(tokens: Array, *assignment: Array) -> Dispatched:
        with jax.named_scope("dispatch"):
            return strategy.dispatch(tokens, Assignment(*assignment), group)

    def finish(there: Dispatched, *awaited: Array | None) -> Float[Array, "chunk embed"]:
        with jax.named_scope("experts"):
            sums = experts(there.tokens, there.gates, there.plan, implementation=order, keep=keep)
        sums = _after(sums, *awaited)
        with jax.named_scope("combine"):
            return strategy.combine(sums, there.state, group)

    bounds = itertools.pairwise([0, *itertools.accumulate(strategy.chunk_sizes(tokens.shape[0]))])
    first, *later = [[x[start:end] for x in (tokens, *assignment)] for start, end in bounds]
    there, back = send(*first), []
    beside, dropped = alongside(), there.dropped
    for chunk in later:
        following = send(*chunk)
        back.append(finish(there, beside, following.tokens))
        dropped += following.dropped
        there = following
    back.append(finish(there, beside))
    return jnp.concatenate(back), dropped, beside


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


# What gates multiply.
GatesOn = Literal["results", "inputs"]


class BranchNorms(eqx.Module):
    """Norms before and after the experts and the shared MLP of a mixture that reads the residual stream as it is."""

    before_experts: RMSNorm
    after_experts: RMSNorm
    before_shared: RMSNorm
    after_shared: RMSNorm


class Latent(eqx.Module):
    """Projections around the experts, which are narrower than the residual stream: up(sum_k gate_k * expert_k(down x)).

    (Nemotron 3 Super; NVIDIA, 2026.)
    """

    down: Weight[Array, "embed -> expert_latent"]
    up: Weight[Array, "expert_latent -> embed"]

    def __init__(self, embed: int, size: int, *, out_std: float, dtype: jnp.dtype, key: Array):
        first, second = jax.random.split(key)
        self.down = normal(first, (embed, size), embed**-0.5, dtype)
        self.up = normal(second, (size, embed), out_std * size**-0.5, dtype)


def _gated(
    tokens: Float[Array, "tokens embed"], assignment: Assignment
) -> tuple[Float[Array, "copies embed"], Assignment]:
    """Return a copy of each token for each of its experts, times the gate, and the assignment of copies, with gates 1.

    Experts are not linear, so a gate on what they read is no gate on their results. A token of one expert, as in all
    released models, is its only copy.
    """
    expert_ids, gates = assignment
    copies = tokens[:, None] * vary_like(gates, tokens)[..., None].astype(tokens.dtype)
    ones = jnp.ones_like(gates)
    return rearrange(copies, "t k d -> (t k) d"), Assignment(expert_ids.reshape(-1, 1), ones.reshape(-1, 1))


class MoE(FeedForward):
    """A router, its experts, and an optional shared MLP that runs on every token.

    The execution chooses how tokens reach the experts (`Execution.dispatch`). With `norms` the shared MLP is there too,
    and y = after_experts(sum_k gate_k * expert_k(before_experts(x))) + after_shared(shared(before_shared(x))), routed
    by x itself. `gates_on` says what gates multiply: the experts' results, or what the experts read (Llama 4; Meta,
    2025). With a `latent` the experts are in it, while router and shared MLP read x; there are no norms then.
    """

    router: Router
    experts: Experts
    shared: MLP | None = None
    norms: BranchNorms | None = None
    gates_on: GatesOn = eqx.field(static=True, default="results")
    latent: Latent | None = None

    @property
    def is_whole(self) -> bool:
        """Whether norms after experts and shared MLP have needed the sums over devices."""
        return self.norms is not None

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution
    ) -> FeedForwardOutput:
        """Return each token's sum over its experts times their gates, plus the shared MLP. Padding is not routed.

        Routed and shared experts return partial results of the same devices, so one sum over devices serves both;
        with norms after them, each has its own.

        Tokens are cut into `chunks` of the strategy. The shared MLP runs while the first chunk travels.
        """
        group = execution.expert_group(self.router.weight.shape[1])
        with jax.named_scope("router"):
            assignment, sums = self.router(x, context.queries.segment > 0, execution.routing)
        # Before the dispatch, so that the gradient is summed over devices once per token, not per routed row.
        inner, norms = execution.inner_group("mlp"), self.norms
        if self.latent is not None:
            x, beside = inner.enter(project(x, self.latent.down)), inner.enter(x)
        elif norms is None:
            x = beside = inner.enter(x)
        else:
            x, beside = inner.enter(norms.before_experts(x)), inner.enter(norms.before_shared(x))
        tokens = rearrange(x, "b s d -> (b s) d")
        if self.gates_on == "inputs":
            tokens, assignment = _gated(tokens, assignment)

        def run_shared() -> Array | None:
            with jax.named_scope("shared"):
                return None if self.shared is None else self.shared(beside, context, execution).y

        rows, dropped, shared = run_experts(self.experts, tokens, assignment, group, execution, run_shared)
        if len(rows) > x.shape[0] * x.shape[1]:
            rows = rearrange(rows, "(t k) d -> t k d", k=self.router.k).sum(1)
        routed = rearrange(rows, "(b s) d -> b s d", b=x.shape[0])
        # Devices of the inner group drop equally many, but strategies mix counts with what varies over it.
        dropped = vary(inner.largest(dropped), sorted(varying_axes(tokens) - set(inner.axes)))
        sums = sums._replace(dropped=dropped)
        if norms is not None:
            assert shared is not None, "norms are of experts and a shared MLP"
            routed = inner.leave(routed)
            y = norms.after_experts(routed) + norms.after_shared(inner.leave(shared))
            return FeedForwardOutput(y, sums, routed)
        y = routed
        if self.latent is not None:
            # Before the sum over devices, so that routed and shared experts are summed together.
            y = project(routed, inner.enter_parameters(self.latent.up))
        return FeedForwardOutput(y if shared is None else y + shared, sums, routed)

    def after_step(self, load: Array) -> "MoE":
        """Return the module with the router's choice bias moved by the `load` [layer, experts] of a training step."""
        return eqx.tree_at(lambda m: m.router, self, self.router.rebalance(load))
