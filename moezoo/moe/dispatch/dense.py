"""`dense`: every expert runs on every token.

Naive equivalent: itself; `y[t] = sum_e g[t, e] * expert[e](x[t])`, where g is zero for experts that t did not choose.
Stages, with R = E T, after `WeightMover.gather` has gathered the weights of all E experts:

    tokens [T, d] -> rows [E, T, d] -> results [E, T, d] -> sums [T, d]

To the experts it looks as if every token had chosen all E experts.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moezoo.kernels.permute import plan_of_all
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup


@dataclasses.dataclass(frozen=True)
class Dense(Dispatch):
    """Run all experts on all tokens and weigh the results with gates, most of which are zero.

    It does E/K times the useful work and sorts nothing. Use it to check the other strategies, or where E is very small.
    Weights move as with `gather`.
    """

    moves: ClassVar[Literal["tokens", "weights"]] = "weights"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R = E T: every token for every expert."""
        del k
        return group.num_experts * tokens

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Make each expert's rows all tokens, and each token's gates one per expert."""
        chosen = jax.nn.one_hot(assignment.expert_ids, group.num_experts, dtype=jnp.bool)  # [T, K, E]
        gates = jnp.where(chosen, assignment.gates[:, :, None], 0).sum(1)  # [T, E]
        everything = plan_of_all(tokens.shape[0], group.num_experts)
        return Dispatched(tokens, gates, everything, everything.dropped, None)
