"""`capacity`: tokens move in buffers of fixed size, and what does not fit is dropped (Lepikhin et al., 2020, GShard).

Naive equivalent: for each expert, collect its tokens in a list of at most C; run the expert on the list; drop the rest.
Stages, with C = min(T, ceil(capacity_factor T K / E)) and R = E C:

    tokens [T, d] -> buffers [P, E/P, C, d]  --all_to_all-->  rows [E/P, P, C, d]
    results [E/P, P, C, d]  --all_to_all-->  buffers [P, E/P, C, d] -> sums [T, d]

Received rows are the tokens of the experts here: each is one row with a gate of 1.
"""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from moezoo.kernels.permute import Plan, permute, plan_with_capacity, unpermute
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup


class _State(NamedTuple):
    plan: Plan
    gates: Float[Array, "tokens k"]


@dataclasses.dataclass(frozen=True)
class Capacity(Dispatch):
    """Send every expert a buffer of fixed size, full or not, and receive the results.

    Each way is one all-to-all of `capacity_factor` K (P-1)/P d numbers per token, whatever the routing.

    Args:
        capacity_factor: C as a multiple of T K / E, the mean load. First choices fill a buffer in the order of tokens,
            then second choices, and so on. The rest is dropped and counted. None: C = T, and nothing is dropped.
    """

    capacity_factor: float | None = 1.25
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "capacity_factor"

    @property
    def uses_results(self) -> bool:
        """True: gates stay on the device of the token."""
        return True

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R = E C: each of the P devices fills a buffer of C rows for each of the E/P experts here."""
        return group.num_experts * self._capacity(tokens, k, group)

    def _capacity(self, tokens: int, k: int, group: ExpertGroup) -> int:
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * tokens * k / group.num_experts))

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Fill a buffer for each expert and send it to the expert's device."""
        count, k = assignment.expert_ids.shape
        sort = plan_with_capacity(assignment.expert_ids, group.num_experts, self._capacity(count, k, group))
        rows = _swap(permute(tokens, sort), group)
        rows = rearrange(rows, "(p e c) d -> (e p c) d", p=group.size, e=group.num_local)
        index = jnp.arange(rows.shape[0], dtype=jnp.int32)
        there = Plan(index, index[:, None], sort.group_sizes[: group.num_local] * group.size, sort.dropped)
        ones = jnp.ones((rows.shape[0], 1), jnp.float32)
        return Dispatched(rows, ones, there, sort.dropped, _State(sort, assignment.gates))

    def combine(
        self, sums: Float[Array, "rows embed"], state: _State, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Return results to the devices of their tokens, and sum the results of each token."""
        rows = rearrange(sums, "(e p c) d -> (p e c) d", p=group.size, e=group.num_local)
        return unpermute(_swap(rows, group), state.gates, state.plan)


def _swap(rows: Float[Array, "rows embed"], group: ExpertGroup) -> Float[Array, "rows embed"]:
    """Send part p of the rows to device p, which receives the parts by sender. Applied twice, it changes nothing."""
    return lax.all_to_all(rows, group.axes, 0, 0, tiled=True) if group.axes else rows
