"""`ragged`: only routed rows move, each to the device of its expert and back.

Naive equivalent: send x[t] to the device of each of its K experts, run the expert there, send the result back.
Stages, with R = P T min(K, E/P), or less with `buffer_factor`:

    tokens [T, d] -> rows [T K, d], sorted by expert  --ragged_all_to_all-->  received [R, d], by sender, then expert
    received [R, d] -> rows [R, d], by expert -> results [R, d] -> results [R, d], by sender: the experts do all three
    results [R, d]  --ragged_all_to_all-->  results [T K, d] -> sums [T, d]

The sizes of all pieces come from one small all-gather: counts [P, E], the rows per sender and expert.
"""

import dataclasses
import os
import re
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moezoo.kernels.permute import Plan, permute, plan, unpermute
from moezoo.moe.transport import Transfer, exchange
from moezoo.parallel.dispatch import Assignment, Dispatch, Dispatched, ExpertGroup

# With it XLA replaces its own kernel for `ragged_all_to_all` on GPUs, which corrupts gradients
# (github.com/marin-community/marin/issues/8077) and above 32 devices reads addresses that it must not
# (github.com/openxla/xla/issues/47283).
GPU_FLAG = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"


class _State(NamedTuple):
    sort: Plan  # sorts the assignments of this device by expert
    gates: Float[Array, "tokens k"]
    transfer: Transfer


@dataclasses.dataclass(frozen=True)
class Ragged(Dispatch):
    """Sort assignments by expert, send every device the rows for its experts, and receive the results.

    Each way moves K (P-1)/P d numbers per token: less than `ring` where P is larger than K.

    Args:
        buffer_factor: R as a multiple of T K, the assignments of one device. None: R = P T min(K, E/P), which is always
            enough. With a factor, the rows of the last senders, and among them of the highest experts, may be dropped;
            they are counted.
    """

    buffer_factor: float | None = None
    moves: ClassVar[Literal["tokens", "weights"]] = "tokens"
    bound: ClassVar[str | None] = "buffer_factor"

    def refusal(self, group: ExpertGroup) -> str | None:
        """Return that XLA's collective is wrong on GPUs, unless XLA_FLAGS has what replaces it."""
        if not (group.axes and group.target and group.target.is_gpu):
            return None
        # As XLA reads it: the last one counts, and without a value it is true.
        found = re.findall(rf"{GPU_FLAG.removesuffix('=true')}(?:=(\S*))?(?!\S)", os.environ.get("XLA_FLAGS", ""))
        if found and found[-1].lower() in ("", "true", "1"):
            return None
        return (
            "XLA's ragged_all_to_all corrupts gradients on GPUs; set dispatch=ring, or the environment variable "
            f"XLA_FLAGS={GPU_FLAG}"
        )

    @property
    def uses_results(self) -> bool:
        """True: gates stay on the device of the token."""
        return True

    def rows(self, tokens: int, k: int, group: ExpertGroup) -> int:
        """Return R: T K on one device; in a group the rows that can arrive, or the bound of `buffer_factor`."""
        if not group.axes:
            return tokens * min(k, group.num_experts)
        return group.room(tokens, k, self.buffer_factor)

    def dispatch(self, tokens: Float[Array, "tokens embed"], assignment: Assignment, group: ExpertGroup) -> Dispatched:
        """Send the token of each assignment to the device of its expert, and sort the received rows by expert."""
        expert_ids, gates = assignment
        sort = plan(expert_ids, 0, group.num_experts)
        no_drops = jnp.zeros((), jnp.int32)
        if not group.axes:
            return Dispatched(tokens, gates, sort, no_drops, None)
        count, k = gates.shape
        room = self.rows(count, k, group)
        # [P, E]: the rows that each device has for each expert. Every size and offset of the transfer follows from it.
        counts = lax.all_gather(sort.group_sizes, group.axes)
        transfer, sizes, lost = _transfer(counts, group, room)
        most = count * min(k, group.num_local)
        received = exchange(permute(tokens, sort), transfer, room, most, group.axes)
        there = plan(_expert_of_row(sizes, room), 0, group.num_local)
        return Dispatched(
            received,
            jnp.ones((room, 1), jnp.float32),
            there,
            lost if room < group.room(count, k, None) else no_drops,
            _State(sort, gates, transfer),
        )

    def combine(
        self, sums: Float[Array, "there embed"], state: _State | None, group: ExpertGroup
    ) -> Float[Array, "tokens embed"]:
        """Return results to the devices of their tokens, and sum the results of each token."""
        if state is None:
            return sums
        (count, k), sent = state.gates.shape, state.sort.assignment.shape[0]
        rows = exchange(sums, state.transfer.back(), sent, count * min(k, group.num_local), group.axes)
        return unpermute(rows, state.gates, state.sort)


def _transfer(
    counts: Int[Array, "senders experts"], group: ExpertGroup, room: int
) -> tuple[Transfer, Int[Array, "senders local_experts"], Int[Array, ""]]:
    """Return the transfer, the rows that each sender has for each expert here, and the number of rows without room.

    Rows without room are the last ones, so the places of the other rows do not depend on them.
    """
    wanted = counts.reshape(group.size, group.size, group.num_local)  # [sender, receiver, expert there]
    sizes = wanted.sum(2)
    before = jnp.cumsum(sizes, axis=0) - sizes  # rows from earlier senders
    fitting = jnp.clip(room - before, 0, sizes)
    start = jnp.cumsum(sizes, axis=1) - sizes
    # A sender without rows still names a valid row, because the collective may read the offset.
    transfer = Transfer(start, fitting, jnp.minimum(before, room))
    me = group.index()
    return transfer, wanted[:, me], (sizes - fitting)[:, me].sum()


def _expert_of_row(sizes: Int[Array, "senders local_experts"], room: int) -> Int[Array, "room 1"]:
    """Return the local expert of each received row, E/P for unused rows. Rows are ordered by sender, then by expert.

    `sizes` may count more rows than there is room for.
    """
    local = sizes.shape[1]
    ends = jnp.cumsum(sizes.reshape(-1))
    piece = jnp.searchsorted(ends, jnp.arange(room, dtype=jnp.int32), side="right", method="compare_all")
    return jnp.where(piece < ends.size, piece % local, local).astype(jnp.int32)[:, None]
