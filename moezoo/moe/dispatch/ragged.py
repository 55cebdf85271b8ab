"""`ragged`: only routed rows move, each to the device of its expert and back."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.kernels.permute import Plan, permute, plan, unpermute
from moezoo.moe.transport import Transfer, exchange
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup, Sizes
from moezoo.parallel.traffic import Moves


class _State(NamedTuple):
    sort: Plan  # here, assignments by expert
    gates: Float[Array, "tokens k"]
    transfer: Transfer | None
    there: Plan | None  # at the experts, what all devices sent by expert


@dataclasses.dataclass(frozen=True)
class Ragged(Dispatch):
    """Sort assignments by expert, send every device the rows of its experts, and get the results back.

    Moves K (P-1)/P d a token each way: less than `ring` where the group has more devices than a token experts. The
    numbers of rows are gathered first, so that everybody knows where everything lies.

    `buffer_factor`: room for received rows, in shares of a device's own T K assignments. Without it there is room for
    the most that can come, min(K, E/P) rows for each of the group's P T tokens, and nothing is dropped. With it the
    last devices' rows of the highest experts may find no room; they are counted.
    """

    buffer_factor: float | None = None
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "buffer_factor"

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """All that can come, or what `buffer_factor` says; this device's assignments where it is alone."""
        if not group.axes:
            return tokens * min(k, group.num_experts)
        return group.room(tokens, k, self.buffer_factor)

    def exchanges(self, sizes: Sizes, group: ExpertGroup) -> Moves:
        """Counts, then rows there and back, and again: weights' gradients need what came back."""
        rows = min(sizes.tokens * min(sizes.k, group.num_experts), self.rows(sizes.tokens, sizes.k, group))
        counts = group.move("all_gather", group.num_experts, jnp.int32)
        once = group.move("ragged_all_to_all", rows * sizes.embed, sizes.dtype)
        return Moves((counts, once, once), (counts, once, once), (once, once))

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Send each assignment's token to its expert's device, and sort there what has come."""
        expert_ids, gates = assignment
        sort = plan(expert_ids, 0, group.num_experts)
        rows, none = permute(tokens, sort), jnp.zeros((), jnp.int32)
        if not group.axes:
            return Dispatched(rows, sort.group_sizes, none, _State(sort, gates, None, None))
        count, k = gates.shape
        room = self.rows(count, k, group)
        # [P, E]: how many rows everybody has for every expert. From it all that a transfer needs follows.
        counts = lax.all_gather(sort.group_sizes, group.axes)
        transfer, sizes, lost = _transfer(counts, group, room)
        received = exchange(rows, transfer, room, group.axes)
        there = plan(_expert_of_row(sizes, room), 0, group.num_local)
        return Dispatched(
            permute(received, there),
            there.group_sizes,
            lost if self.can_drop(count, k, group) else none,
            _State(sort, gates, transfer, there),
        )

    def combine(
        self, rows: Float[Array, "rows embed"], state: _State, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Send results back to where their tokens came from, and sum each token's."""
        if state.transfer is not None:
            assert state.there is not None
            ones = jnp.ones((rows.shape[0], 1), jnp.float32)
            as_received = unpermute(rows, ones, state.there)
            rows = exchange(as_received, state.transfer.back(), state.sort.source.shape[0], group.axes)
        return unpermute(rows, state.gates, state.sort)


def _transfer(
    counts: Int[Array, "senders experts"], group: ExpertGroup, room: int
) -> tuple[Transfer, Int[Array, "senders local_experts"], Int[Array, ""]]:
    """The exchange, the rows that everybody has for each of this device's experts, and how many find no room.

    Those that find none are the last, so that where the others lie does not depend on them.
    """
    wanted = counts.reshape(group.size, group.size, group.num_local)  # [sender, receiver, expert there]
    sizes = wanted.sum(2)
    before = jnp.cumsum(sizes, axis=0) - sizes  # rows from earlier senders
    fitting = jnp.clip(room - before, 0, sizes)
    start = jnp.cumsum(sizes, axis=1) - sizes
    # Whoever sends nothing still names a row that there is, as the collective may ask.
    transfer = Transfer(start, fitting, jnp.minimum(before, room))
    me = group.index()
    return transfer, wanted[:, me], (sizes - fitting)[:, me].sum()


def _expert_of_row(sizes: Int[Array, "senders local_experts"], room: int) -> Int[Array, "room 1"]:
    """Of each received row, which lie by sender and then by expert; the number of experts where there is none.

    `sizes` may go on beyond the room: of those rows nothing is asked.
    """
    local = sizes.shape[1]
    ends = jnp.cumsum(sizes.reshape(-1))
    piece = jnp.searchsorted(ends, jnp.arange(room, dtype=jnp.int32), side="right", method="compare_all")
    return jnp.where(piece < ends.size, piece % local, local).astype(jnp.int32)[:, None]
