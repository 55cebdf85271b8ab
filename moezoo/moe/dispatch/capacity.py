"""`capacity`: tokens move in buffers of fixed size; what does not fit is dropped (Lepikhin et al., 2020, GShard)."""

import dataclasses
import math
from typing import ClassVar, Literal

from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from moezoo.kernels.permute import permute, plan_with_capacity, unpermute
from moezoo.moe.dispatch.state import SortState
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


@dataclasses.dataclass(frozen=True)
class Capacity(Dispatch):
    """Every device sends every expert a buffer of the same size, filled or not, and gets the results back.

    Two plain all-to-alls of `capacity_factor` K (P-1)/P d a token, one each way, whatever the routing. A buffer has
    rows for `capacity_factor` T K / E of a device's T tokens, rounded up: first choices take them in the order of
    tokens, then second ones, and so on; others are dropped and counted. Null: T rows, which are always enough.
    """

    capacity_factor: float | None = 1.25
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "capacity_factor"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """The group's buffers for this device's experts: as many as its own for the group's."""
        return group.num_experts * self._capacity(tokens, k, group)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """Buffers there and back, and again: weights' gradients need what came back."""
        once = group.move("all_to_all", self.rows(sizes.tokens, sizes.k, group) * sizes.embed, sizes.dtype)
        return Moves((once, once), (once, once), (once, once))

    def _capacity(self, tokens: int, k: int, group: ExpertGroup) -> int:
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * tokens * k / group.num_experts))

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Fill a buffer for each expert and send it there."""
        count, k = assignment.expert_ids.shape
        sort = plan_with_capacity(assignment.expert_ids, group.num_experts, self._capacity(count, k, group))
        rows = _swap(permute(tokens, sort), group)
        rows = rearrange(rows, "(p e c) d -> (e p c) d", p=group.size, e=group.num_local)
        sizes = sort.group_sizes[: group.num_local] * group.size
        return Dispatched(rows, sizes, sort.dropped, SortState(sort, assignment.gates))

    def combine(
        self, rows: Float[Array, "rows embed"], state: SortState, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Send results back to where their tokens came from, and sum each token's."""
        rows = rearrange(rows, "(e p c) d -> (p e c) d", p=group.size, e=group.num_local)
        return unpermute(_swap(rows, group), state.gates, state.plan)


def _swap(rows: Float[Array, "rows embed"], group: ExpertGroup) -> Float[Array, "rows embed"]:
    """Part p of everybody's rows to device p, which has them in order of senders; twice is nothing."""
    return lax.all_to_all(rows, group.axes, 0, 0, tiled=True) if group.axes else rows
