"""The mixture of experts: route, dispatch, run the experts, combine.

Naive equivalent for each token x: y = sum_k gate_k * expert_k(x) + shared(x), over the K experts that the router chose.
"""

import equinox as eqx
import jax
from einops import rearrange
from jaxtyping import Array, Float

from moezoo.moe.chunks import run_experts
from moezoo.moe.experts import Experts
from moezoo.moe.router import Router
from moezoo.nn.base import FeedForward, FeedForwardOutput
from moezoo.nn.mlp import MLP
from moezoo.nn.positions import Context
from moezoo.parallel.collectives import vary, varying_axes
from moezoo.parallel.mesh_execution import MeshExecution


class MoE(FeedForward):
    """A router, its experts, and an optional shared MLP that runs on every token.

    The execution chooses how tokens reach the experts (`Execution.dispatch`).
    """

    router: Router
    experts: Experts
    shared: MLP | None = None

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, execution: MeshExecution
    ) -> FeedForwardOutput:
        """Return each token's sum over its experts times their gates, plus the shared MLP. Padding is not routed.

        Routed and shared experts return partial results of the same devices, so one sum over devices serves both.

        Tokens are cut into `chunks` of the strategy. The shared MLP runs while the first chunk travels.
        """
        group = execution.expert_group(self.router.weight.shape[1])
        with jax.named_scope("router"):
            assignment, sums = self.router(x, context.queries.segment > 0, execution.routing)
        # Before the dispatch, so that the gradient is summed over devices once per token, not per routed row.
        inner = execution.inner_group("mlp")
        x = inner.enter(x)
        tokens = rearrange(x, "b s d -> (b s) d")

        def run_shared() -> Array | None:
            with jax.named_scope("shared"):
                return None if self.shared is None else self.shared(x, context, execution).y

        rows, dropped, shared = run_experts(self.experts, tokens, assignment, group, execution, run_shared)
        routed = rearrange(rows, "(b s) d -> b s d", b=x.shape[0])
        # Devices of the inner group drop equally many, but strategies mix counts with what varies over it.
        dropped = vary(inner.largest(dropped), sorted(varying_axes(tokens) - set(inner.axes)))
        sums = sums._replace(dropped=dropped)
        return FeedForwardOutput(routed if shared is None else routed + shared, sums, routed)

    def after_step(self, load: Array) -> "MoE":
        """Return the module with the router's choice bias moved by the `load` [layer, experts] of a training step."""
        return eqx.tree_at(lambda m: m.router, self, self.router.rebalance(load))
