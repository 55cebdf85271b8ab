"""The MoE block: route, dispatch, run the experts, combine."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from moezoo.axes import Weight
from moezoo.collectives import vary_like, varying
from moezoo.execution import Execution
from moezoo.kernels.grouped_matmul import Implementation, grouped_matmul
from moezoo.moe.dispatch import Replicated
from moezoo.moe.router import Router
from moezoo.moe.routing import LayerSums
from moezoo.nn.linear import normal


class Experts(eqx.Module):
    """E SwiGLU networks (Shazeer, 2020): down(silu(gate x) * up x)."""

    gate: Weight[Array, "expert, expert_embed -> expert_mlp"]
    up: Weight[Array, "expert, expert_embed -> expert_mlp"]
    down: Weight[Array, "expert, expert_mlp -> expert_embed"]

    def __init__(self, experts: int, embed: int, mlp: int, *, out_std: float, dtype: jnp.dtype, key: Array):
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (experts, embed, mlp), embed**-0.5, dtype)
        self.up = normal(keys[1], (experts, embed, mlp), embed**-0.5, dtype)
        self.down = normal(keys[2], (experts, mlp, embed), out_std * mlp**-0.5, dtype)

    def __call__(
        self, rows: Float[Array, "rows embed"], group_sizes: Int[Array, " experts"], backend: Implementation | None
    ) -> Float[Array, "rows embed"]:
        """Each row through its expert; rows after the sum of `group_sizes` come out zero."""
        gate = grouped_matmul(rows, self.gate, group_sizes, implementation=backend)
        up = grouped_matmul(rows, self.up, group_sizes, implementation=backend)
        return grouped_matmul(jax.nn.silu(gate) * up, self.down, group_sizes, implementation=backend)


class MoE(eqx.Module):
    """A router and its experts; how tokens reach them is the execution's business."""

    router: Router
    experts: Experts

    def __call__(
        self, x: Float[Array, "batch seq embed"], valid: Bool[Array, "batch seq"], run: Execution
    ) -> tuple[Float[Array, "batch seq embed"], LayerSums]:
        """The experts' weighted sum for each token, and the layer's routing sums; padding comes out zero."""
        group = run.expert_group(self.router.weight.shape[1])
        assignment, sums = self.router(x, valid, run.routing)
        tokens = rearrange(x, "b s d -> (b s) d")
        # Every part of an assignment varies as the tokens do, so that strategies see one type.
        assignment = jax.tree.map(lambda a: vary_like(a, tokens), assignment)
        split = set(group.axes) <= varying(tokens)
        strategy = run.strategy if split else Replicated(run.strategy)
        with jax.named_scope("dispatch"):
            experts = strategy.experts(self.experts, group)
            there = strategy.dispatch(tokens, assignment, group)
        with jax.named_scope("experts"):
            rows = experts(there.rows, there.group_sizes, run.grouped_matmul)
        with jax.named_scope("combine"):
            back = strategy.combine(rows, there.state, group)
        dropped = vary_like(there.dropped, tokens)
        return rearrange(back, "(b s) d -> b s d", b=x.shape[0]), sums._replace(dropped=dropped)
