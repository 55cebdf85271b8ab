"""The wrapper around any strategy for tokens that are the same on every device of the group.

Naive equivalent: every device computes all T tokens. Instead each computes a share of S = ceil(T / P):

    tokens [T, d] -> share [S, d] -> `strategy` -> sums [S, d]  --all_gather-->  sums [T, d]
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moezoo.parallel.collectives import varying_axes
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup


class _State(NamedTuple):
    inner: Any
    tokens: Float[Array, "tokens 0"]  # only its shape is used


@dataclasses.dataclass(frozen=True)
class Replicated(Dispatch):
    """Give each device of the group a share of the tokens, run `strategy` on it, and all-gather the results.

    T need not be divisible by P: padding goes to no expert. This adds one all-gather to the collectives of `strategy`.
    The result is typed as the same on all devices again.
    """

    strategy: Dispatch
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"

    @property
    def uses_results(self) -> bool:
        """As the strategy."""
        return self.strategy.uses_results

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return the rows of `strategy` for a share."""
        return self.strategy.rows(self._share(tokens, group), k, group)

    @staticmethod
    def _share(tokens: int, group: ExpertGroup) -> int:
        return -(-tokens // group.size)

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Take the share of this device and dispatch it."""
        total = tokens.shape[0]
        share = self._share(total, group)

        def mine(x: Array, fill: int) -> Array:
            padded = jnp.pad(x, ((0, share * group.size - total), (0, 0)), constant_values=fill)
            return lax.dynamic_slice_in_dim(padded, group.index() * share, share)

        split = Assignment(mine(assignment.expert_ids, group.num_experts), mine(assignment.gates, 0))
        there = self.strategy.dispatch(mine(tokens, 0), split, group)
        # A strategy that may drop counts in its share, so counts are summed; one that cannot returns a constant.
        differs = bool(varying_axes(there.dropped) & set(group.axes))
        dropped = lax.psum(there.dropped, group.axes) if differs else there.dropped
        return there._replace(dropped=dropped, state=_State(there.state, tokens[:, :0]))

    def combine(
        self, sums: Float[Array, "there embed"], state: _State, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Join the results of all shares."""
        mine = self.strategy.combine(sums, state.inner, group)
        whole = lax.all_gather(mine, group.axes, tiled=True, to="invarying")
        return whole[: state.tokens.shape[0]]
