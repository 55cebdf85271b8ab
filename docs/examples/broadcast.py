# In moezoo: moezoo/moe/dispatch/broadcast.py
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moezoo.kernels.permute import plan_of_all
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.dispatch import Dispatch, Dispatched


@dataclasses.dataclass(frozen=True)
class Broadcast(Dispatch):
    """All-gather tokens and gates, run all local experts on them, reduce-scatter the weighted sums."""

    moves = "tokens"

    def rows(self, tokens, k, group):
        """Every token of the group for every local expert."""
        return group.num_local * group.size * tokens

    def dispatch(self, tokens, assignment, group):
        """Gather the group's tokens, each with a gate for every local expert."""
        chosen = jax.nn.one_hot(assignment.expert_ids, group.num_experts, dtype=jnp.bool)  # [T, K, E]
        gates = jnp.where(chosen, assignment.gates[:, :, None], 0).sum(1)  # [T, E]
        if group.axes:
            tokens, gates = (gather_tokens(x, group.axes, 0, tokens=group.axes) for x in (tokens, gates))
        mine = lax.dynamic_slice_in_dim(gates, group.index() * group.num_local, group.num_local, axis=1)
        everything = plan_of_all(tokens.shape[0], group.num_local)
        return Dispatched(tokens, mine, everything, everything.dropped, None)

    def combine(self, sums, state, group):
        """Sum over devices, each keeping its own tokens."""
        return lax.psum_scatter(sums, group.axes, scatter_dimension=0, tiled=True) if group.axes else sums
