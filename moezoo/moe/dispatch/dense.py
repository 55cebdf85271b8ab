"""`dense`: every expert on every token."""

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
    """Run all experts on all tokens and multiply the results by gates, most of which are zero.

    Costs E/K times the useful work and needs no sorting: for checking the others, and for very small E. Weights move
    as for `gather`.
    """

    moves: ClassVar[Literal["tokens", "weights"]] = "weights"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Every token for every expert."""
        del k
        return group.num_experts * tokens

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """None: weights are gathered with the layer's others."""
        del sizes, group
        return Moves()

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """E copies of the tokens."""
        chosen = jax.nn.one_hot(assignment.expert_ids, group.num_experts, dtype=jnp.bool)  # [T, K, E]
        gates = jnp.where(chosen, assignment.gates[:, :, None], 0).sum(1)  # [T, E]
        sizes = jnp.full((group.num_experts,), tokens.shape[0], jnp.int32)
        return Dispatched(repeat(tokens, "t d -> (e t) d", e=group.num_experts), sizes, jnp.zeros((), jnp.int32), gates)

    def combine(
        self, rows: Float[Array, "rows embed"], state: Float[Array, "tokens experts"], group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """The weighted sum over experts."""
        by_expert = rearrange(rows, "(e t) d -> e t d", e=group.num_experts).astype(jnp.float32)
        return jnp.einsum("etd,te->td", by_expert, state).astype(rows.dtype)
