"""`gather`: weights move, tokens stay."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.permute import permute, plan, unpermute
from moezoo.moe.dispatch.state import SortState
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


@dataclasses.dataclass(frozen=True)
class Gather(Dispatch):
    """All-gather every expert's weights over the expert axes and run all experts on this device's tokens.

    Moves 3 E d f (P-1)/P weights a layer whatever the number of tokens, so it pays with many tokens a device. On one
    device nothing moves.
    """

    moves: ClassVar[Literal["tokens", "weights"]] = "weights"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """This device's assignments."""
        return tokens * min(k, group.num_experts)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """None: weights are gathered with the layer's others."""
        del sizes, group
        return Moves()

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Sort this device's assignments by expert: T * K rows."""
        sort = plan(assignment.expert_ids, 0, group.num_experts)
        state = SortState(sort, assignment.gates)
        return Dispatched(permute(tokens, sort), sort.group_sizes, jnp.zeros((), jnp.int32), state)

    def combine(
        self, rows: Float[Array, "rows embed"], state: SortState, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Undo the sort and sum over choices."""
        return unpermute(rows, state.gates, state.plan)
