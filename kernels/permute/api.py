"""Permutations of tokens that are gathers in both directions: deterministic, and faster than adding by scatter.

T tokens, K experts a token, R rows. An *assignment* is a pair (token, choice), numbered token * K + choice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moezoo.parallel.collectives import vary_like


class Plan(NamedTuple):
    """Where every row comes from and every assignment goes to.

    - `source` [R] int32: the assignment that each row holds, T * K where none;
    - `row` [T, K] int32: the row that holds each assignment, or R where none does;
    - `group_sizes` [experts here] int32: rows of each expert, in order; rows after their sum are not used;
    - `dropped` int32: assignments to experts here that found no row.
    """

    source: Int[Array, " rows"]
    row: Int[Array, "tokens k"]
    group_sizes: Int[Array, " local_experts"]
    dropped: Int[Array, ""]


def plan(expert_ids: Int[Array, "tokens k"], first: Int[Array, ""] | int, count: int, room: int | None = None) -> Plan:
    """Sort assignments by expert, keeping the `count` experts from `first` on; any other expert is not here.

    A token's experts differ, so it needs at most min(K, count) rows: R = T * min(K, count) never overflows. With less
    `room` than that, R = `room` and what comes last is dropped: of the highest experts, the last tokens.
    """
    tokens, k = expert_ids.shape
    rows = tokens * min(k, count)
    bounded = room is not None and room < rows
    rows = room if bounded else rows
    local = expert_ids.reshape(-1) - first
    key = jnp.where((local >= 0) & (local < count), local, count)
    order = _stable_argsort(key, count + 1)
    index = jnp.arange(key.size, dtype=jnp.int32)
    sorted_index = vary_like(jnp.zeros_like(index), order).at[order].set(index, unique_indices=True)
    sizes, dropped = jax.nn.one_hot(key, count, dtype=jnp.bool).sum(0, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    if bounded:
        before, wanted = jnp.cumsum(sizes) - sizes, sizes.sum()
        sizes = jnp.clip(rows - before, 0, sizes)
        dropped = wanted - sizes.sum()
    row = jnp.where((key < count) & (sorted_index < rows), sorted_index, rows).reshape(tokens, k)
    source = jnp.where(index[:rows] < sizes.sum(), order[:rows], key.size)
    return Plan(source, row, sizes, dropped)


def plan_with_capacity(expert_ids: Int[Array, "tokens k"], count: int, capacity: int) -> Plan:
    """A row of its own for every assignment: `capacity` rows for each of `count` experts, R = count * capacity.

    An expert's rows are taken by first choices in the order of tokens, then by second ones, and so on; what finds
    none is dropped. Every group has `capacity` rows, used or not.
    """
    tokens, k = expert_ids.shape
    key = expert_ids.T.reshape(-1)  # by choice, then by token
    order = _stable_argsort(key, count + 1)
    index = jnp.arange(key.size, dtype=jnp.int32)
    sorted_index = vary_like(jnp.zeros_like(index), order).at[order].set(index, unique_indices=True)
    sizes = jax.nn.one_hot(key, count, dtype=jnp.bool).sum(0, dtype=jnp.int32)
    first = jnp.cumsum(sizes) - sizes
    rank = sorted_index - jnp.take(first, key, mode="clip")  # among the assignments of its expert
    fits = (key < count) & (rank < capacity)
    rows = count * capacity
    row = jnp.where(fits, key * capacity + rank, rows).reshape(k, tokens).T
    # The other way round: the assignment that is `rank`-th of its expert in the sorted order.
    rank = jnp.arange(capacity, dtype=jnp.int32)[None]
    nth = jnp.take(order, first[:, None] + rank, mode="clip")
    assignment = nth % tokens * k + nth // tokens
    source = jnp.where(rank < sizes[:, None], assignment, key.size).reshape(-1)
    # T rows are enough, as a token's experts differ; then this is known before anything is counted.
    dropped = ((key < count) & ~fits).sum(dtype=jnp.int32) if capacity < tokens else jnp.zeros((), jnp.int32)
    return Plan(source, row, vary_like(jnp.full((count,), capacity, jnp.int32), source), dropped)


def _stable_argsort(key: Int[Array, " n"], bound: int) -> Int[Array, " n"]:
    """`argsort` of keys below `bound`, equal keys in order.

    Key and index fit one integer nearly always, and plain integers sort much faster on a CPU.
    """
    size = key.size
    if bound * size >= 2**31:
        return jnp.argsort(key, stable=True).astype(jnp.int32)
    packed = key * size + jnp.arange(size, dtype=jnp.int32)
    return jax.lax.rem(jnp.sort(packed, stable=False), vary_like(jnp.int32(size), packed))


def _take(rows: Float[Array, "rows embed"], index: Int[Array, " n"]) -> Float[Array, "n embed"]:
    """Rows by index; zeros where the index is the number of rows."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _permute(tokens: Float[Array, "tokens embed"], plan: Plan) -> Float[Array, "rows embed"]:
    return jnp.take(tokens, plan.source // plan.row.shape[1], axis=0, mode="clip")


def _permute_forward(tokens, plan):
    return _permute(tokens, plan), plan


def _permute_backward(plan, cotangent):
    gradient = _take(cotangent, plan.row[:, 0]).astype(jnp.float32)
    for choice in range(1, plan.row.shape[1]):
        gradient += _take(cotangent, plan.row[:, choice]).astype(jnp.float32)
    return gradient.astype(cotangent.dtype), None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _unpermute(
    rows: Float[Array, "rows embed"], gates: Float[Array, "tokens k"], plan: Plan
) -> Float[Array, "tokens embed"]:
    total = gates[:, 0, None] * _take(rows, plan.row[:, 0]).astype(jnp.float32)
    for choice in range(1, gates.shape[1]):
        total += gates[:, choice, None] * _take(rows, plan.row[:, choice]).astype(jnp.float32)
    return total.astype(rows.dtype)


def _unpermute_forward(rows, gates, plan):
    return _unpermute(rows, gates, plan), (rows, gates, plan)


def _unpermute_backward(residuals, cotangent):
    rows, gates, plan = residuals
    k = gates.shape[1]
    gate = jnp.take(gates.reshape(-1), plan.source, mode="fill", fill_value=0)
    by_row = jnp.take(cotangent, plan.source // k, axis=0, mode="clip").astype(jnp.float32)
    by_token = cotangent.astype(jnp.float32)
    by_gate = [(by_token * _take(rows, plan.row[:, c]).astype(jnp.float32)).sum(1) for c in range(k)]
    return (gate[:, None] * by_row).astype(rows.dtype), jnp.stack(by_gate, axis=1).astype(gates.dtype), None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def permute(tokens: Float[Array, "tokens embed"], plan: Plan) -> Float[Array, "rows embed"]:
    """Each row's token. Rows that are not used hold some token; nothing flows back from them."""
    return _permute(vary_like(tokens, plan.source), jax.tree.map(lambda x: vary_like(x, tokens), plan))


def unpermute(
    rows: Float[Array, "rows embed"], gates: Float[Array, "tokens k"], plan: Plan
) -> Float[Array, "tokens embed"]:
    """Each token's sum over its rows here times their gates, float32, in the order of its choices; else zero."""
    return _unpermute(
        vary_like(rows, gates, plan.source),
        vary_like(gates, rows, plan.source),
        jax.tree.map(lambda x: vary_like(x, rows, gates), plan),
    )
