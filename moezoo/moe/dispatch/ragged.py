"""`ragged`: only routed rows move, each to the device of its expert and back.

Naive equivalent: send x[t] and its gate to the device of each of its K experts, run the expert there, send the result
times the gate back. Stages, with R = P T min(K, E/P), or less with `buffer_factor`:

    tokens [T, d] -> rows [T K, d], sorted by expert  --ragged_all_to_all-->  received [R, d], by sender, then expert
    received [R, d] -> rows [R, d], by expert -> results [R, d] -> results [R, d], by sender: the experts do all three
    results [R, d]  --ragged_all_to_all-->  results [T K, d] -> sums [T, d]

Gates [T K] travel as the rows do. The sizes of all pieces come from one small all-gather: counts [P, E], the rows per
sender and expert.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.kernels.permute import plan
from moezoo.moe.transport import Route, Transfer, collect, send
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


@dataclasses.dataclass(frozen=True)
class Ragged(Dispatch):
    """Sort assignments by expert, send every device the rows for its experts, and receive the results.

    Each way moves K (P-1)/P d numbers per token (gates are 1/d of that): less than `ring` where P is larger than K.

    Args:
        buffer_factor: R as a multiple of T K, the assignments of one device. None: R = P T min(K, E/P), which is always
            enough. With a factor, the rows of the last senders, and among them of the highest experts, may be dropped;
            they are counted.
    """

    buffer_factor: float | None = None
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "buffer_factor"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R: T K on one device; in a group the rows that can arrive, or the bound of `buffer_factor`."""
        if not group.axes:
            return tokens * min(k, group.num_experts)
        return group.room(tokens, k, self.buffer_factor)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """Return counts, rows, gates and results. Rematerialisation does not repeat the exchange of results."""
        rows = min(sizes.tokens * min(sizes.k, group.num_experts), self.rows(sizes.tokens, sizes.k, group))
        counts = group.move("all_gather", group.num_experts, jnp.int32)
        once = group.move("ragged_all_to_all", rows * sizes.embed, sizes.dtype)
        gates = group.move("ragged_all_to_all", rows, jnp.float32)
        return Moves((counts, once, gates, once), (counts, once, gates), (once, gates, once))

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Send the token and the gate of each assignment to the device of its expert; sort received rows by expert."""
        expert_ids, gates = assignment
        sort = plan(expert_ids, 0, group.num_experts)
        no_drops = jnp.zeros((), jnp.int32)
        if not group.axes:
            return Dispatched(tokens, gates, sort, no_drops, None)
        count, k = gates.shape
        room, most = self.rows(count, k, group), count * min(k, group.num_local)
        # [P, E]: the rows that each device has for each expert. Every size and offset of the transfer follows from it.
        counts = lax.all_gather(sort.group_sizes, group.axes)
        transfer, expert, lost = _transfer(counts, group, room, most)
        of_tokens = Route(sort.source // k, sort.row, transfer)
        of_gates = Route(sort.source, sort.row.reshape(-1, 1), transfer)
        return Dispatched(
            send(tokens, of_tokens, room, most, group.axes),
            send(gates.reshape(-1, 1), of_gates, room, most, group.axes),
            plan(expert, 0, group.num_local),
            lost if self.can_drop(count, k, group) else no_drops,
            of_tokens,
        )

    def combine(
        self, sums: Float[Array, "there embed"], state: Route | None, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Return results to the devices of their tokens, and sum the results of each token."""
        if state is None:
            return sums
        count, k = state.row.shape
        return collect(sums, state, count * min(k, group.num_local), group.axes)


def _transfer(
    counts: Int[Array, "senders experts"], group: ExpertGroup, room: int, most: int
) -> tuple[Transfer, Int[Array, "room 1"], Int[Array, ""]]:
    """Return the transfer, the expert of each received row (E/P for unused rows), and the number of rows without room.

    Rows are ordered by sender, then by expert. With room for `most` rows of every sender, each sender has its own part
    of the room. Otherwise there are no gaps, and rows without room are the last ones.
    """
    wanted = counts.reshape(group.size, group.size, group.num_local)  # [sender, receiver, expert there]
    sizes = wanted.sum(2)
    start = jnp.cumsum(sizes, axis=1) - sizes
    if room == group.size * most:
        before = jnp.broadcast_to(jnp.arange(group.size, dtype=jnp.int32)[:, None] * most, sizes.shape)
    else:
        before = jnp.cumsum(sizes, axis=0) - sizes  # rows from earlier senders
    fitting = jnp.clip(room - before, 0, sizes)
    me = group.index()
    ends = before[:, me, None] + jnp.cumsum(wanted[:, me], axis=1)  # [sender, expert here]
    row = jnp.arange(room, dtype=jnp.int32)
    piece = jnp.searchsorted((ends - wanted[:, me]).reshape(-1), row, side="right", method="compare_all") - 1
    expert = jnp.where(row < jnp.take(ends.reshape(-1), piece, mode="clip"), piece % group.num_local, group.num_local)
    # A sender without rows still names a valid row, because the collective may read the offset.
    transfer = Transfer(start, fitting, jnp.minimum(before, room))
    return transfer, expert.astype(jnp.int32)[:, None], (sizes - fitting)[:, me].sum()
