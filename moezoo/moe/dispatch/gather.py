"""`gather`: weights move, tokens stay.

Naive equivalent: copy all E experts to every device, then run each token through its K experts there.
Stages, with R = T K, after `WeightMover.gather` has gathered the weights of all E experts:

    tokens [T, d] -> rows [T K, d], sorted by expert -> results [T K, d] -> sums [T, d]

Experts read rows and sum results themselves, so nothing is left to do here but to sort the assignments.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.permute import plan
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup


@dataclasses.dataclass(frozen=True)
class Gather(Dispatch):
    """All-gather the weights of all experts and run them on the tokens of this device.

    A device receives 3 E d f (P-1)/P numbers per layer, however many tokens it has, so this pays with many tokens per
    device. On one device nothing moves.
    """

    moves: ClassVar[Literal["tokens", "weights"]] = "weights"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R = T K: the assignments of this device."""
        return tokens * min(k, group.num_experts)

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Sort the assignments of this device by expert: T K rows."""
        sort = plan(assignment.expert_ids, 0, group.num_experts)
        return Dispatched(tokens, assignment.gates, sort, jnp.zeros((), jnp.int32), None)
