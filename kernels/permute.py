"""Permutations between tokens and rows grouped by expert, as gathers in both directions.

Gathers are deterministic, and faster than adding by scatter. T tokens, K experts per token, R rows. The contract of
`Plan` is in `moezoo.parallel.dispatch`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.parallel.collectives import vary_like
from moezoo.parallel.dispatch import Plan as Plan


def plan(expert_ids: Int[Array, "tokens k"], first: Int[Array, ""] | int, count: int, room: int | None = None) -> Plan:
    """Sort assignments by expert, keeping those to the `count` experts from `first` on.

    A token's experts differ, so it needs at most min(K, count) rows.

    Args:
        expert_ids: int32 [T, K]. Assignments to other experts are ignored.
        first: The first local expert.
        count: The number of local experts.
        room: R, if less than T * min(K, count), which never overflows. Then the last assignments are dropped: those of
            the highest experts, and of these the last tokens.
    """
    tokens, k = expert_ids.shape
    most = tokens * min(k, count)
    rows = most if room is None else min(room, most)
    local = expert_ids.reshape(-1) - first
    key = jnp.where((local >= 0) & (local < count), local, count)
    order, sorted_index, sizes = _sort(key, count)
    dropped = jnp.zeros((), jnp.int32)
    if rows < most:
        before, wanted = jnp.cumsum(sizes) - sizes, sizes.sum()
        sizes = jnp.clip(rows - before, 0, sizes)
        dropped = wanted - sizes.sum()
    row = jnp.where((key < count) & (sorted_index < rows), sorted_index, rows).reshape(tokens, k)
    source = jnp.where(jnp.arange(rows, dtype=jnp.int32) < sizes.sum(), order[:rows], key.size)
    return Plan(source, row, sizes, dropped)


def plan_with_capacity(expert_ids: Int[Array, "tokens k"], count: int, capacity: int) -> Plan:
    """Give each of `count` experts `capacity` rows: R = count * capacity.

    An expert's rows go to first choices in the order of tokens, then to second choices, and so on. Assignments without
    a row are dropped. `group_sizes` are all `capacity`, whether rows are used or not.

    Args:
        expert_ids: int32 [T, K]; `count` for a choice that goes to no expert.
        count: The number of experts.
        capacity: The rows per expert.
    """
    tokens, k = expert_ids.shape
    key = expert_ids.T.reshape(-1)  # by choice, then by token
    order, sorted_index, sizes = _sort(key, count)
    first = jnp.cumsum(sizes) - sizes
    rank = sorted_index - jnp.take(first, key, mode="clip")  # among the assignments to the same expert
    fits = (key < count) & (rank < capacity)
    rows = count * capacity
    row = jnp.where(fits, key * capacity + rank, rows).reshape(k, tokens).T
    # The inverse: the assignment with each `rank`, in the sorted order.
    rank = jnp.arange(capacity, dtype=jnp.int32)[None]
    nth = jnp.take(order, first[:, None] + rank, mode="clip")
    assignment = nth % tokens * k + nth // tokens
    source = jnp.where(rank < sizes[:, None], assignment, key.size).reshape(-1)
    # A token's experts differ, so T rows always suffice: then the number is a constant.
    dropped = ((key < count) & ~fits).sum(dtype=jnp.int32) if capacity < tokens else jnp.zeros((), jnp.int32)
    return Plan(source, row, vary_like(jnp.full((count,), capacity, jnp.int32), source), dropped)


def plan_of_all(tokens: int, count: int) -> Plan:
    """Send each of `tokens` tokens to all of `count` experts: K is `count`, and R = count * tokens."""
    index = jnp.arange(tokens * count, dtype=jnp.int32)
    sizes, none = jnp.full((count,), tokens, jnp.int32), jnp.zeros((), jnp.int32)
    return Plan(index.reshape(tokens, count).T.reshape(-1), index.reshape(count, tokens).T, sizes, none)


def _sort(key: Int[Array, " n"], count: int) -> tuple[Int[Array, " n"], Int[Array, " n"], Int[Array, " count"]]:
    """Return the order that sorts experts up to `count`, its inverse, and how often each below `count` occurs."""
    order = stable_argsort(key, count + 1)
    index = jnp.arange(key.size, dtype=jnp.int32)
    sorted_index = vary_like(jnp.zeros_like(index), order).at[order].set(index, unique_indices=True)
    return order, sorted_index, jax.nn.one_hot(key, count, dtype=jnp.bool).sum(0, dtype=jnp.int32)


def stable_argsort(key: Int[Array, " n"], bound: int) -> Int[Array, " n"]:
    """Return the stable `argsort` of keys below `bound`.

    Key and index nearly always fit in one integer, and plain integers sort much faster on a CPU.
    """
    size = key.size
    if bound * size >= 2**31:
        return jnp.argsort(key, stable=True).astype(jnp.int32)
    packed = key * size + jnp.arange(size, dtype=jnp.int32)
    return jax.lax.rem(jnp.sort(packed, stable=False), vary_like(jnp.int32(size), packed))


def _take(rows: Float[Array, "rows embed"], index: Int[Array, " n"]) -> Float[Array, "n embed"]:
    """Return rows by index; zeros where the index is the number of rows."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def sum_rows(
    rows: Float[Array, "rows embed"], index: Int[Array, "tokens k"], gates: Float[Array, "tokens k"] | None
) -> Float[Array, "tokens embed"]:
    """Sum K rows per token, times gates if given, in float32 and in the order of choices; one rounding at the end.

    An index equal to the number of rows stands for zeros.
    """
    total = jnp.zeros((), jnp.float32)
    for choice in range(index.shape[1]):
        part = _take(rows, index[:, choice]).astype(jnp.float32)
        total += part if gates is None else gates[:, choice, None] * part
    return total.astype(rows.dtype)


@jax.custom_vjp
def _permute(tokens: Float[Array, "tokens embed"], plan: Plan) -> Float[Array, "rows embed"]:
    return jnp.take(tokens, plan.assignment // plan.row.shape[1], axis=0, mode="clip")


def _permute_backward(plan, cotangent):
    return sum_rows(cotangent, plan.row, None), None


_permute.defvjp(lambda tokens, plan: (_permute(tokens, plan), plan), _permute_backward)


@jax.custom_vjp
def _unpermute(
    rows: Float[Array, "rows embed"], gates: Float[Array, "tokens k"], plan: Plan
) -> Float[Array, "tokens embed"]:
    return sum_rows(rows, plan.row, gates)


def _unpermute_backward(residuals, cotangent):
    rows, gates, plan = residuals
    k = gates.shape[1]
    gate = jnp.take(gates.reshape(-1), plan.assignment, mode="fill", fill_value=0)
    by_row = jnp.take(cotangent, plan.assignment // k, axis=0, mode="clip").astype(jnp.float32)
    by_token = cotangent.astype(jnp.float32)
    by_gate = [(by_token * _take(rows, plan.row[:, c]).astype(jnp.float32)).sum(1) for c in range(k)]
    return (gate[:, None] * by_row).astype(rows.dtype), jnp.stack(by_gate, axis=1).astype(gates.dtype), None


_unpermute.defvjp(lambda *operands: (_unpermute(*operands), operands), _unpermute_backward)


def permute(tokens: Float[Array, "tokens embed"], plan: Plan) -> Float[Array, "rows embed"]:
    """Return the token of each row.

    Args:
        tokens: [T, d].
        plan: Where rows come from.

    Returns:
        [R, d], in the dtype of the tokens. Unused rows hold an arbitrary token; their gradient is ignored. The result
        varies wherever an argument does.
    """
    return _permute(vary_like(tokens, plan.assignment), jax.tree.map(lambda x: vary_like(x, tokens), plan))


def unpermute(
    rows: Float[Array, "rows embed"], gates: Float[Array, "tokens k"], plan: Plan
) -> Float[Array, "tokens embed"]:
    """Return each token's sum over its local rows times their gates; zero for a token without rows.

    Args:
        rows: [R, d]. Unused rows may hold anything.
        gates: float32 [T, K].
        plan: Where assignments went.

    Returns:
        [T, d], in the dtype of the rows, summed in float32 in the order of choices. The result varies wherever an
        argument does.
    """
    return _unpermute(
        vary_like(rows, gates, plan.assignment),
        vary_like(gates, rows, plan.assignment),
        jax.tree.map(lambda x: vary_like(x, rows, gates), plan),
    )
