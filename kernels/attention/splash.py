"""Calls of splash, JAX's kernels of attention in Pallas for TPUs, with keys as one interval per query.

The kernels take one number per query, a function of it and of a key's number that says whether the query sees the key,
and for each pair of blocks whether to visit it. The numbers and the visits may depend on data. So the interval of keys
that a query sees is packed into its number, 16 bits for each end, and only pairs of blocks are visited that lie between
the first and the last key that a query of the block sees: causality, documents and windows are skipped alike, in any
order of queries. A step for each other pair remains, which computes nothing.

Gradients are our own rule around the kernels, whose own rule refuses a log-sum-exp.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float, Int

from moezoo.kernels.attention.base import FLOOR, Interval, Softmax
from moezoo.kernels.attention.intervals import meeting, spans_of
from moezoo.kernels.attention.partial import join_softmax
from moezoo.kernels.calls import call_unchecked

# The most tokens of a block, and the keys of a call, whose numbers have 16 bits.
BLOCK, KEYS = 512, 2**16
# Whether kernels are interpreted, as tests do on a CPU.
INTERPRET = False
_LANES = 128  # a block has a multiple of so many tokens
_UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)  # the score of an unseen key


def part(q: Array, k: Array, v: Array, first: Array, after: Array) -> Softmax:
    """Return the softmax, joined from calls for as many keys as 16 bits can number."""
    parts = []
    for keys in _calls(k):
        seen = _within(Interval(first, after), keys)
        result, logsumexp = call_unchecked(_kernel_forward, q, k[:, keys], v[:, keys], *seen)
        sees = (seen.first < seen.after)[:, :, None, None]
        # The kernel leaves nothing of use for queries that see no key.
        highest = jnp.where(sees, logsumexp, FLOOR)
        parts.append(Softmax(jnp.where(sees[..., None], result, 0), highest, jnp.ones_like(highest)))
    whole = functools.reduce(join_softmax, parts)
    return whole._replace(result=whole.result.astype(v.dtype))


def part_gradients(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    after: Array,
    whole: Softmax,
    back: Array,
    through_logsumexp: Array | float = 0.0,
) -> tuple[Array, Array, Array]:
    """Return the gradients by q, k and v that go through these keys; arguments as in `by_intervals`.

    Weights are recomputed from the log-sum-exp: for scores of magnitude s they sum to one within s x 2**-24.
    """
    less = (back.astype(jnp.float32) * whole.result.astype(jnp.float32)).sum(-1) - through_logsumexp
    # Weights are exp(score - log-sum-exp): zero for a query that sees nothing, by any finite number.
    logsumexp = jnp.where(whole.highest > FLOOR, whole.highest + jnp.log(whole.total), 0)
    parts = []
    for keys in _calls(k):
        seen = _within(Interval(first, after), keys)
        parts.append(call_unchecked(_kernels_backward, q, k[:, keys], v[:, keys], *seen, logsumexp, back, less))
    by_q, by_k, by_v = zip(*parts, strict=True)
    all_q = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in by_q))
    return all_q.astype(q.dtype), jnp.concatenate(by_k, 1), jnp.concatenate(by_v, 1)


def _calls(k: Array) -> list[slice]:
    return [slice(start, start + KEYS) for start in range(0, k.shape[1], KEYS)]


def _within(seen: Interval, keys: slice) -> Interval:
    return Interval(*(jnp.clip(x - keys.start, 0, KEYS) for x in seen))


def _block(tokens: int) -> int:
    """Return the tokens of a block, so that few are added to fill the last one."""
    blocks = -(-tokens // BLOCK)
    return -(-tokens // (blocks * _LANES)) * _LANES


def _fill(x: Array, dim: int, value: int = 0) -> Array:
    more = [(0, 0)] * x.ndim
    more[dim] = (0, -x.shape[dim] % _block(x.shape[dim]))
    return jnp.pad(x, more, constant_values=value)


def _by_head(x: Float[Array, "batch tokens kv_heads *rest"]) -> Float[Array, "batch heads filled ..."]:
    """Make one dimension of key heads and the query heads of each, if `x` has these; fill the last block."""
    return _fill(rearrange(x, "b t k g ... -> b (k g) t ..."), 2)


def _by_token(x: Array, like: Array) -> Array:
    """Invert `_by_head`, for the tokens and heads of `like`."""
    return rearrange(x[:, :, : like.shape[1]], "b (k g) t ... -> b t k g ...", k=like.shape[2])


class _Plan(NamedTuple):
    """Which pairs of blocks are visited, for each row of the batch.

    Attributes:
        number: The interval of keys of each query, in one number.
        visited: Whether a pair is visited, [batch, blocks of queries, blocks of keys].
        key: The block of keys in memory while pairs run in the order of queries: kept where none is visited.
        query: The block of queries in memory while they run in the order of keys.
    """

    number: Int[Array, "batch queries"]
    visited: Int[Array, "batch blocks blocks"]
    key: Int[Array, "batch blocks blocks"]
    query: Int[Array, "batch blocks blocks"]


def _plan(first: Array, after: Array, keys: int) -> _Plan:
    size = _block(keys)
    spans = spans_of(first, after, _block(first.shape[1]))
    low, high = spans.low[..., None], spans.high[..., None]
    shape = (*low.shape[:2], -(-keys // size))
    query, key = (lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (1, 2))
    visited = (key * size < high) & ((key + 1) * size > low)
    begin, end = (x[:, None] for x in meeting(spans, keys, size))
    key = jnp.clip(key, low // size, jnp.maximum(high - 1, 0) // size)
    query = jnp.clip(query, begin, jnp.maximum(end - 1, 0))
    # Where an interval is empty, and for queries that fill the last block, it begins after its last key, 0.
    number = jnp.where(first < after, jnp.left_shift(first, 16) | (after - 1), 1 << 16)
    return _Plan(_fill(number, 1, 1 << 16), visited.astype(jnp.int32), key, query)


def _sees(number: Array, key: Array) -> Array:
    return (key >= lax.shift_right_logical(number, 16)) & (key <= (number & 0xFFFF))


def _info(plan: _Plan, at: Array) -> Any:
    """Return what the kernels take of one row; `at` are the blocks in memory."""
    number: Any = plan.number  # its annotation names NumPy's arrays alone
    return MaskInfo(at[None], None, plan.visited[None], None, number)


def _options() -> dict[str, Any]:
    static: dict[str, Any] = {"mask_value": _UNSEEN, "is_mqa": False, "attn_logits_soft_cap": None}
    return static | {"mask_function": _sees, "interpret": INTERPRET}


def _kernel_forward(q: Array, k: Array, v: Array, first: Array, after: Array) -> tuple[Array, Array]:
    """Return the result and the log-sum-exp, where queries see a key."""
    options: Any = _options() | {"block_sizes": kernels.BlockSizes(_block(q.shape[1]), _block(k.shape[1]))}
    options |= {"save_residuals": True, "residual_checkpoint_name": None}

    def row(given: tuple[Any, ...]) -> tuple[Array, Array]:
        *arrays, plan = given
        forward: Any = kernels._splash_attention_forward
        result, (logsumexp,) = forward(_info(plan, plan.key), *arrays, None, None, **options)
        return result, logsumexp

    heads = _by_head(q), _by_head(k[:, :, :, None]), _by_head(v[:, :, :, None])
    result, logsumexp = lax.map(row, (*heads, _plan(first, after, k.shape[1])))
    return _by_token(result, q), _by_token(logsumexp, q)


def _kernels_backward(
    q: Array, k: Array, v: Array, first: Array, after: Array, logsumexp: Array, back: Array, less: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients by q, k and v. That of a score is its weight times (the gradient of the weight - `less`)."""
    minor = kernels.QKVLayout.HEAD_DIM_MINOR
    size = _block(k.shape[1])
    options: Any = _options() | {"bq": _block(q.shape[1]), "bkv": size}
    options |= {"q_layout": minor, "k_layout": minor, "v_layout": minor}
    # In one kernel with the others, the gradient by q would be held once for every block of keys.
    of_keys: Any = options | {"bkv_compute": size, "use_fused_bwd_kernel": False}

    def row(given: tuple[Any, ...]) -> tuple[Array, Array, Array]:
        q, k, v, logsumexp, back, less, plan = given
        arrays = q, k, v, None, None, logsumexp, back, less
        by_q = kernels._splash_attention_bwd_dq(*arrays, mask_info=_info(plan, plan.key), **options)
        _, by_k, by_v = kernels._splash_attention_bwd_dkv(*arrays, mask_info=_info(plan, plan.query), **of_keys)
        return by_q, by_k, by_v

    keys, values = k[:, :, :, None], v[:, :, :, None]
    heads = map(_by_head, (q, keys, values, logsumexp, back, less))
    by_q, by_k, by_v = lax.map(row, (*heads, _plan(first, after, k.shape[1])))
    return _by_token(by_q, q), _by_token(by_k, keys)[:, :, :, 0], _by_token(by_v, values)[:, :, :, 0]
