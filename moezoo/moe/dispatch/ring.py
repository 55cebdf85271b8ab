"""`ring`: tokens move to all devices of the group, partial sums move back."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moezoo.kernels.permute import permute, plan, unpermute
from moezoo.moe.dispatch.state import SortState
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


@dataclasses.dataclass(frozen=True)
class Ring(Dispatch):
    """All-gather the group's tokens, run this device's experts on them, reduce-scatter the partial sums.

    Moves (P-1) d a token each way, however many experts a token has: the least while P is up to about K, and every
    transfer is one that all hardware does well.

    `buffer_factor`: room for rows, in shares of a device's own T K assignments. Without it there is room for the most
    that can be needed, min(K, E/P) rows for each of the group's P T tokens, and nothing is dropped. With it the last
    tokens of the highest experts may find no room; they are counted.
    """

    buffer_factor: float | None = None
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "buffer_factor"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """All that the group's tokens can need here, or what `buffer_factor` says."""
        return group.room(tokens, k, self.buffer_factor)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """Tokens and routing to everybody, partial sums back; recomputed, the layer's result is not asked for."""
        tokens = group.move("all_gather", sizes.tokens * sizes.embed, sizes.dtype)
        routing = group.move("all_gather", sizes.tokens * 2 * sizes.k, jnp.float32)
        sums = tokens.back()
        return Moves((tokens, routing, sums), (tokens, routing), (tokens.back(), routing.back(), sums.back()))

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Gather the group's tokens and routing, and keep the assignments to this device's experts."""
        expert_ids, gates = assignment
        count, k = gates.shape
        room = self.rows(count, k, group)
        if group.axes:
            # Expert ids travel with their gates in one collective; a float32 holds a number below 2**24 exactly.
            routing = jnp.concatenate([gates, expert_ids.astype(gates.dtype)], axis=1)
            tokens, routing = (gather_tokens(x, group.axes, 0, tokens=group.axes) for x in (tokens, routing))
            gates, expert_ids = routing[:, :k], lax.stop_gradient(routing[:, k:]).astype(jnp.int32)
        sort = plan(expert_ids, group.index() * group.num_local, group.num_local, room)
        return Dispatched(permute(tokens, sort), sort.group_sizes, sort.dropped, SortState(sort, gates))

    def combine(
        self, rows: Float[Array, "rows embed"], state: SortState, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Sum each token's rows here, then over the group, each device keeping its own tokens."""
        partial = unpermute(rows, state.gates, state.plan)
        return lax.psum_scatter(partial, group.axes, scatter_dimension=0, tiled=True) if group.axes else partial
