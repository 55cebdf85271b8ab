"""Tokens that are the same on every device of the group: one wrapper around any strategy."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moezoo.parallel.collectives import varying_axes
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


class _State(NamedTuple):
    inner: Any
    tokens: Float[Array, "tokens 0"]  # only its shape is used


@dataclasses.dataclass(frozen=True)
class Replicated(Dispatch):
    """Give each device of the group its share of the tokens, run `strategy`, and all-gather the results.

    T need not be divisible: padding goes to no expert. One all-gather more than the strategy's own collectives, and
    the result is the same on all devices again, also to the type system.
    """

    strategy: Dispatch
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """The strategy's, of a share."""
        return self.strategy.rows(self._share(tokens, group), k, group)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """The strategy's, of a share; results to everybody; sums of what each device's share says of gradients."""
        share = sizes._replace(tokens=self._share(sizes.tokens, group))
        joined = group.move("all_gather", share.tokens * sizes.embed, sizes.dtype)
        dropped = group.move("psum", 1, jnp.int32)
        drops = (dropped,) if self.strategy.can_drop(share.tokens, sizes.k, group) else ()
        padded = share.tokens * group.size
        tokens = group.move("psum", padded * sizes.embed, sizes.dtype)
        gates = group.move("psum", padded * sizes.k, jnp.float32)
        return self.strategy.exchanges(share, group) + Moves((joined, *drops), (), (tokens, gates))

    @staticmethod
    def _share(tokens: int, group: ExpertGroup) -> int:
        return -(-tokens // group.size)

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Take this device's share and dispatch that."""
        total = tokens.shape[0]
        share = self._share(total, group)

        def mine(x: Array, fill: int) -> Array:
            padded = jnp.pad(x, ((0, share * group.size - total), (0, 0)), constant_values=fill)
            return lax.dynamic_slice_in_dim(padded, group.index() * share, share)

        split = Assignment(mine(assignment.expert_ids, group.num_experts), mine(assignment.gates, 0))
        there = self.strategy.dispatch(mine(tokens, 0), split, group)
        # A strategy that may drop counts its own share; one that cannot returns a constant, which needs no sum.
        differs = bool(varying_axes(there.dropped) & set(group.axes))
        dropped = lax.psum(there.dropped, group.axes) if differs else there.dropped
        return there._replace(dropped=dropped, state=_State(there.state, tokens[:, :0]))

    def combine(
        self, rows: Float[Array, "rows embed"], state: _State, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Join the shares."""
        mine = self.strategy.combine(rows, state.inner, group)
        whole = lax.all_gather(mine, group.axes, tiled=True, to="invarying")
        return whole[: state.tokens.shape[0]]
