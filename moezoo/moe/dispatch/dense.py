"""`dense`: every expert runs on every token.

Naive equivalent: itself; y[t] = sum_e g[t, e] * expert[e](x[t]), where g is zero for experts that t did not choose.
Stages, with R = E T, after `Execution.whole` has gathered the weights of all E experts:

    tokens [T, d] -> rows [E, T, d] -> results [E, T, d] -> sums [T, d]
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Float

from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


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

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """Return no collective: expert weights are gathered together with the other weights of the layer."""
        del sizes, group
        return Moves()

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Copy the tokens E times."""
        chosen = jax.nn.one_hot(assignment.expert_ids, group.num_experts, dtype=jnp.bool)  # [T, K, E]
        gates = jnp.where(chosen, assignment.gates[:, :, None], 0).sum(1)  # [T, E]
        sizes = jnp.full((group.num_experts,), tokens.shape[0], jnp.int32)
        return Dispatched(repeat(tokens, "t d -> (e t) d", e=group.num_experts), sizes, jnp.zeros((), jnp.int32), gates)

    def combine(
        self, rows: Float[Array, "rows embed"], state: Float[Array, "tokens experts"], group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Sum the results over experts, times their gates."""
        by_expert = rearrange(rows, "(e t) d -> e t d", e=group.num_experts).astype(jnp.float32)
        return jnp.einsum("etd,te->td", by_expert, state).astype(rows.dtype)
