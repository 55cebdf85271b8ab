"""The mixture of experts: route, dispatch, run the experts, combine.

Naive equivalent for each token x: y = sum_k gate_k * expert_k(x) + shared(x), over the K experts that the router chose.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from moezoo.moe.chunks import Exchange, cut
from moezoo.moe.dispatch import Assignment
from moezoo.moe.dispatch.layer import for_group
from moezoo.moe.experts import Experts
from moezoo.moe.router import Router
from moezoo.nn.base import FeedForward, FeedForwardOutput
from moezoo.nn.mlp import MLP
from moezoo.parallel.collectives import vary, vary_like, varying_axes
from moezoo.parallel.execution import Execution
from moezoo.parallel.traffic import Move, Moves, inner_sum


class MoE(FeedForward):
    """A router, its experts, and an optional shared MLP that runs on every token.

    The execution chooses how tokens reach the experts (`Execution.dispatch`).
    """

    router: Router
    experts: Experts
    shared: MLP | None = None

    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], execution: Execution
    ) -> FeedForwardOutput:
        """Return each token's sum over its experts times their gates, plus the shared MLP. Padding is not routed.

        Routed and shared experts return partial results of the same devices, so one sum over devices serves both.

        Tokens are cut into `chunks` of the strategy. The shared MLP runs while the first chunk travels.
        """
        group = execution.expert_group(self.router.weight.shape[1])
        with jax.named_scope("router"):
            assignment, sums = self.router(x, valid, execution.routing)
        # Before the dispatch, so that the gradient is summed over devices once per token, not per routed row.
        inner = execution.inner_group("mlp")
        x = inner.enter(x)
        tokens = rearrange(x, "b s d -> (b s) d")
        # All arrays of an assignment vary over the same mesh axes as the tokens, so strategies see one type.
        assignment: Assignment = jax.tree.map(lambda a: vary_like(a, tokens), assignment)
        strategy = for_group(execution.strategy, group)
        exchange = Exchange(
            strategy, group, self.experts.partial(inner), execution.kernel("grouped_matmul"), execution.keep
        )
        first, *later = cut(tokens, assignment, strategy.chunk_sizes(tokens.shape[0]))
        there = exchange.send(first)
        with jax.named_scope("shared"):
            shared = None if self.shared is None else self.shared(x, valid, execution).y
        rows, dropped = exchange.finish(there, later, shared)
        routed = rearrange(rows, "(b s) d -> b s d", b=x.shape[0])
        # Devices of the inner group drop equally many, but strategies mix counts with what varies over it.
        dropped = vary(inner.largest(dropped), sorted(varying_axes(tokens) - set(inner.axes)))
        sums = sums._replace(dropped=dropped)
        return FeedForwardOutput(routed if shared is None else routed + shared, sums, routed)

    def exchanges(self, tokens: int, execution: Execution) -> Moves:
        """Return the sums of the gradients of tokens and gates, and the count of dropped assignments if there may be.

        The collectives of the dispatch are `moezoo.moe.dispatch.layer.layer_moves`.
        """
        inner, k, (*_, embed, num_experts) = execution.inner_group("mlp"), self.router.k, self.router.weight.shape
        group = execution.expert_group(num_experts)
        strategy = for_group(execution.strategy, group)
        drops = any(strategy.can_drop(chunk, k, group) for chunk in strategy.chunk_sizes(tokens))
        back = inner_sum(inner, tokens * embed, execution.dtype), inner_sum(inner, tokens * k, jnp.float32)
        return Moves((Move("pmax", inner.axes, inner.size, 1, jnp.int32),) * drops, (), back)

    def after_step(self, load: Array) -> "MoE":
        """Return the module with the router's choice bias moved by the `load` [layer, experts] of a training step."""
        return eqx.tree_at(lambda m: m.router, self, self.router.rebalance(load))
