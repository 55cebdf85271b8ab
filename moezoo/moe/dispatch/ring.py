"""`ring`: tokens move to all devices of the group, partial sums move back.

Naive equivalent: every device reads all tokens of the group, runs its own experts on those routed to them, and adds
its part of each sum. Stages, with R = P T min(K, E/P), or less with `buffer_factor`:

    tokens [T, d]  --all_gather-->  tokens [P T, d] -> rows [R, d], sorted by expert
    results [R, d] -> partial sums [P T, d]  --reduce_scatter-->  sums [T, d]
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moezoo.kernels.permute import plan
from moezoo.parallel.collectives import gather_tokens
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup


@dataclasses.dataclass(frozen=True)
class Ring(Dispatch):
    """All-gather the tokens of the group, run the experts of this device, and reduce-scatter the partial sums.

    Each way moves (P-1) d numbers per token, whatever K is: the least of all strategies while P is at most about K.
    Both collectives are fast on all hardware.

    Args:
        buffer_factor: R as a multiple of T K, the assignments of one device. None: R = P T min(K, E/P), which is always
            enough. With a factor, the last tokens of the highest experts may be dropped; they are counted.
    """

    buffer_factor: float | None = None
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "buffer_factor"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R: the rows that the tokens of the group can need here, or the bound of `buffer_factor`."""
        return group.room(tokens, k, self.buffer_factor)

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Gather tokens and routing of the group, and sort the assignments to the experts of this device."""
        expert_ids, gates = assignment
        count, k = gates.shape
        room = self.rows(count, k, group)
        if group.axes:
            # Expert ids travel with their gates in one collective: float32 holds integers below 2**24 exactly.
            routing = jnp.concatenate([gates, expert_ids.astype(gates.dtype)], axis=1)
            tokens, routing = (gather_tokens(x, group.axes, 0, tokens=group.axes) for x in (tokens, routing))
            gates, expert_ids = routing[:, :k], lax.stop_gradient(routing[:, k:]).astype(jnp.int32)
        sort = plan(expert_ids, group.index() * group.num_local, group.num_local, room)
        return Dispatched(tokens, gates, sort, sort.dropped, None)

    def combine(
        self, sums: Float[Array, "there embed"], state: None, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Add the partial sums of the group. Each device receives the sums of its own tokens."""
        del state
        return lax.psum_scatter(sums, group.axes, scatter_dimension=0, tiled=True) if group.axes else sums
