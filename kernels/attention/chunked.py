"""The portable backend: an online softmax over pairs of blocks of queries and keys in which something is visible.

Both passes hold the scores of one pair of blocks at a time (Dao, 2023, FlashAttention-2, arXiv:2307.08691). The forward
pass keeps its operands, its result and two numbers per query; the backward pass recomputes weights from these.

On a CPU a product inside a loop is one call of a fast matrix product. Three choices make use of that:

- Operands are laid out as [blocks, heads, tokens, dim] once, outside the loops. Query heads that share a key head are
  rows of one product.
- Keys are the last dimension of scores, where XLA reduces and multiplies at full speed.
- The pairs to visit are listed before the loops, which run over these only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from moezoo.kernels.attention.base import (
    FLOOR,
    NOTHING,
    Attended,
    Coordinates,
    Interval,
    Operands,
    Reach,
    Results,
    Scale,
    Softmax,
    sees,
)
from moezoo.kernels.calls import traced_once
from moezoo.parallel.collectives import ATTENTION, vary_like
from moezoo.parallel.context_parallel import first_seen, most_seen

# The most tokens per block on a CPU: for up to `_SHORT` tokens, and for more.
BLOCKS = (64, 128)
_SHORT = 512
# For more than `_LONG` tokens, if query heads share key heads and are so few that the scores of a pair take 2 MiB.
_WIDE, _LONG, _FEW_HEADS = 256, 1024, 8


class Blocks(NamedTuple):
    """The most tokens of a block of queries, and of one of keys."""

    queries: int
    keys: int


# A step of a loop costs a GPU some launches, and has the blocks of one row. The scores of 512 queries and keys are 16
# tiles of 128 x 128 numbers for each query head: 8 heads give work to 108 to 148 multiprocessors. They take 1 MiB for
# each of these heads in float32, of which the backward pass holds a few arrays. Not measured.
ON_GPUS = Blocks(512, 512)
_LAST = jnp.iinfo(jnp.int32).max

Block = Float[Array, "_ _ _"]  # heads, rows, dim; the rows of queries are the tokens of each query head


# Where a token is: its coordinates; or of queries whose interval of keys is known, that, and of keys their numbers.
_Places = Coordinates | Interval | Int[Array, "..."]


class _Keys(NamedTuple):
    """Blocks of keys and values, and where they are."""

    key: Float[Array, "*blocks kv_heads keys head_dim"]
    value: Float[Array, "*blocks kv_heads keys value_dim"]
    places: _Places


class _Step(NamedTuple):
    """One block of queries: arrays of its tokens, and the blocks of keys to visit, the first `count` of `order`."""

    parts: tuple[Block, ...]
    places: _Places
    order: Int[Array, "*steps blocks"]
    count: Int[Array, "*steps"]


def suits(queries: int, keys: int) -> bool:
    """Return whether there is enough work for blocks. Less work, such as decoding, is faster in one product."""
    return queries >= 16 and queries * keys >= 64 * 64


def attend(operands: Operands, scale: Scale, blocks: Blocks | None = None) -> Attended:
    """Attend row after row, block after block; queries times `scale` are rounded to the queries' dtype.

    Blocks are those of a CPU unless `blocks` are given.
    """
    q = operands.q
    operands = dataclasses.replace(operands, q=(q.astype(jnp.float32) * scale).astype(q.dtype))
    return _attend(blocks or _of(operands), operands)


def on_cpu(queries: Coordinates, keys: Coordinates, kv_heads: int, group: int, window: Reach) -> Blocks:
    """Return the blocks of a CPU, for `group` query heads of each key head."""
    # Wide blocks hold more pairs of tokens that do not see each other, most of all where windows are shorter.
    most = most_seen(window)
    wide = group > 1 and kv_heads * group <= _FEW_HEADS and (most is None or most >= _WIDE)
    lengths = (x.position.shape[1] for x in (queries, keys))
    return Blocks(*(_WIDE if wide and n > _LONG else BLOCKS[n > _SHORT] for n in lengths))


def _of(operands: Operands) -> Blocks:
    kv_heads, group = operands.q.shape[2:4]
    return on_cpu(operands.queries, operands.keys, kv_heads, group, operands.window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, operands: Operands) -> Attended:
    return _attend_forward(blocks, operands)[0]


def _forward(blocks: Blocks, operands: Operands) -> tuple[Attended, Any]:
    # Named where the backward pass uses them: if a policy saves them, no loop runs twice.
    result, highest, total = (checkpoint_name(x, ATTENTION) for x in _softmax(blocks, operands))
    logsumexp = jnp.where(highest > FLOOR, highest + jnp.log(total), NOTHING)[..., 0]
    # Keep two numbers, not the log-sum-exp: for large scores it is too rounded to give weights that sum to one.
    return Attended(result, logsumexp), (operands, result, highest, total)


def part(operands: Operands, blocks: Blocks | None = None) -> Softmax:
    """Attend to a part of the keys, block after block."""
    result, *numbers = traced_once(_softmax, None, (blocks or _of(operands),), operands)
    return Softmax(result, *(x[..., 0] for x in numbers))


def part_gradients(
    operands: Operands, whole: Softmax, back: Results, blocks: Blocks | None = None
) -> tuple[Array, Array, Array]:
    """Return the gradients that go through a part of the keys, block after block."""
    residuals = (operands, whole.result, whole.highest[..., None], whole.total[..., None])
    cotangent = Attended(back, jnp.zeros_like(whole.total))
    return traced_once(_backward, None, (blocks or _of(operands),), residuals, cotangent)


def _softmax(blocks: Blocks, operands: Operands) -> tuple[Array, ...]:
    """Return the result, the largest score and the total of each query, [batch, queries, kv_heads, group, dim or 1]."""
    v, window = operands.v, operands.window
    past, steps = _plan((operands.q,), operands, blocks)

    def step(_: None, x: _Step) -> tuple[None, tuple[Block, Block, Block]]:
        (q,) = x.parts

        def visit(j: Int[Array, ""], carry: tuple[Block, Block, Block]) -> tuple[Block, Block, Block]:
            highest, total, sums = carry
            block = _take(past, j)
            scores, _ = _score(q, block.key, x.places, block.places, window)
            higher = jnp.maximum(highest, scores.max(-1, keepdims=True))
            weights, fade = jnp.exp(scores - higher), jnp.exp(highest - higher)
            total = total * fade + weights.sum(-1, keepdims=True)
            return higher, total, sums * fade + _dot(weights.astype(v.dtype), block.value, 2, 1)

        zeros = _zeros((*q.shape[:2], 1), q)
        highest, total, sums = _visit_all(x, visit, (zeros + FLOOR, zeros, _zeros((*q.shape[:2], v.shape[3]), q)))
        total = jnp.where(total > 0, total, 1)
        return None, ((sums / total).astype(v.dtype), highest, total)

    _, parts = lax.scan(step, None, steps)
    return tuple(_join(x, operands.q) for x in parts)


def _backward(blocks: Blocks, residuals: Any, cotangent: Attended) -> tuple[Array, Array, Array]:
    """Return the gradients by q, k and v."""
    operands, result, highest, total = residuals
    q, window = operands.q, operands.window
    parts = q, result, cotangent.result, cotangent.logsumexp[..., None], highest, 1 / total
    past, steps = _plan(parts, operands, blocks)

    def step(carry: tuple[Array, Array], x: _Step) -> tuple[tuple[Array, Array], Block]:
        q, result, back, through_logsumexp, highest, share = x.parts
        # The gradient of a score is its weight times (the gradient of the weight - `less`).
        through_result = (back.astype(jnp.float32) * result.astype(jnp.float32)).sum(-1, keepdims=True)
        less = through_result - through_logsumexp

        def visit(j: Int[Array, ""], carry: tuple[Block, Array, Array]) -> tuple[Block, Array, Array]:
            by_q, by_k, by_v = carry
            block = _take(past, j)
            scores, seen = _score(q, block.key, x.places, block.places, window)
            weights = jnp.exp(scores - highest) * share
            # Selected too, since the gradient of an unseen key's weight may be infinite.
            by_score = jnp.where(seen, weights * (_dot(back, block.value, 2, 2) - less), 0).astype(q.dtype)
            by_q = by_q + _dot(by_score, block.key, 2, 1)
            # Results [heads, dim, keys]: a CPU multiplies by a transposed matrix faster on the left than on the right.
            by_k = _add(by_k, j, _dot(q, by_score, 1, 1))
            by_v = _add(by_v, j, _dot(back, weights.astype(back.dtype), 1, 1))
            return by_q, by_k, by_v

        by_q, by_k, by_v = _visit_all(x, visit, (_zeros(q.shape, q), *carry))
        return (by_k, by_v), by_q.astype(q.dtype)

    start = [_zeros(x.swapaxes(2, 3).shape, q) for x in (past.key, past.value)]
    back, by_q = lax.scan(step, (start[0], start[1]), steps)
    by_k, by_v = (
        _join(by.swapaxes(2, 3), x[:, :, :, None])[:, :, :, 0].astype(x.dtype)
        for by, x in zip(back, (operands.k, operands.v), strict=True)
    )
    return _join(by_q, q), by_k, by_v


def _attend_forward(blocks: Blocks, operands: Operands) -> tuple[Attended, Any]:
    return traced_once(_forward, None, (blocks,), operands)


def _attend_backward(blocks: Blocks, residuals: Any, cotangent: Attended) -> tuple[Operands]:
    gradients = traced_once(_backward, None, (blocks,), residuals, cotangent)
    where = lambda x: (x.q, x.k, x.v, x.queries, x.keys, x.seen)  # noqa: E731
    no_gradient = (None, None, None)
    return (eqx.tree_at(where, residuals[0], (*gradients, *no_gradient), is_leaf=lambda x: x is None),)


_attend.defvjp(_attend_forward, _attend_backward)


def _plan(parts: tuple[Array, ...], operands: Operands, blocks: Blocks) -> tuple[_Keys, _Step]:
    """Return all blocks of keys, and one step for each block of queries; `parts` are arrays of queries.

    One dimension holds the blocks of all rows of the batch, so one loop runs over the blocks of queries of every row.
    """
    at, key_at, visible = _places(operands, blocks)
    order = _order_visits(visible)
    k, v = (_cut(x[:, :, :, None], blocks.keys) for x in (operands.k, operands.v))
    parts = tuple(_cut(x, blocks.queries) for x in parts)
    return _Keys(k, v, _join_rows(key_at)), _Step(parts, *_join_rows((at, order, visible.sum(-1, dtype=jnp.int32))))


def _order_visits(visible: Bool[Array, "batch queries keys"]) -> Int[Array, "batch queries keys"]:
    """Return for each block of queries the blocks of keys of its row: the visible ones in their order, then the others.

    So a loop over the first ones visits what is visible and nothing else. Blocks are numbered as `_join_rows` lays them
    out: those of row r begin at r times the number of blocks in a row.
    """
    in_row = jnp.argsort(~visible, axis=-1, stable=True).astype(jnp.int32)
    return in_row + in_row.shape[2] * lax.broadcasted_iota(jnp.int32, in_row.shape, 0)


def _join_rows(tree: PyTree) -> PyTree:
    """Make one dimension of [batch, blocks], the first two of each array."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def count_pairs(
    queries: Coordinates, keys: Coordinates, window: Reach, blocks: Blocks | None = None
) -> tuple[int, int, int]:
    """Return how many pairs of blocks are visited in all rows, and the tokens of a block of queries and of keys.

    By default the blocks are those of a CPU with one query head for each key head.
    """
    at, key_at = _cut_coordinates(queries, keys, blocks or on_cpu(queries, keys, 1, 1, window))
    return int(_visible(at, key_at, window).sum()), at.position.shape[2], key_at.position.shape[2]


def _places(operands: Operands, blocks: Blocks) -> tuple[_Places, _Places, Bool[Array, "batch queries keys"]]:
    """Return where the tokens of each block are, and which blocks of queries must visit which blocks of keys."""
    seen, keys = operands.seen, operands.keys.position
    if seen is None:
        at, key_at = _cut_coordinates(operands.queries, operands.keys, blocks)
        return at, key_at, _visible(at, key_at, operands.window)
    first, after = (_cut_numbers(x, blocks.queries, mode="edge") for x in seen)
    number = vary_like(lax.broadcasted_iota(jnp.int32, keys.shape, 1), keys)
    number = _cut_numbers(number, blocks.keys, constant_values=_LAST)
    low, high = jnp.where(first < after, first, _LAST).min(-1), jnp.where(first < after, after, 0).max(-1)
    visible = (number[:, None, :, 0] < high[..., None]) & (number[:, None, :, -1] >= low[..., None])
    return Interval(first, after), number, visible


def _cut_coordinates(queries: Coordinates, keys: Coordinates, blocks: Blocks) -> tuple[Coordinates, Coordinates]:
    # The padding of the last block: queries that see what the last one sees, and keys that no query sees.
    at = Coordinates(*(_cut_numbers(x, blocks.queries, mode="edge") for x in queries))
    position = _cut_numbers(keys.position, blocks.keys, constant_values=_LAST)
    return at, Coordinates(position, _cut_numbers(keys.segment, blocks.keys, mode="edge"))


def _cut(x: Float[Array, "batch tokens kv_heads group dim"], most: int) -> Float[Array, "blocks kv_heads rows dim"]:
    """Cut each row of the batch into equal blocks of at most so many tokens, padded with zeros at the end."""
    blocks = -(-x.shape[1] // most)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % blocks), (0, 0), (0, 0), (0, 0)))
    return rearrange(x, "b (n t) k g d -> (b n) k (g t) d", n=blocks)


def _join(x: Float[Array, "blocks kv_heads rows dim"], like: Array) -> Float[Array, "batch tokens kv_heads group dim"]:
    """Invert `_cut`, for the number of tokens of `like`."""
    x = rearrange(x, "(b n) k (g t) d -> b (n t) k g d", b=like.shape[0], g=like.shape[3])
    return x[:, : like.shape[1]]


def _cut_numbers(x: Int[Array, "batch tokens"], most: int, **padding: Any) -> Int[Array, "batch blocks block"]:
    blocks = -(-x.shape[1] // most)
    x = jnp.pad(x.astype(jnp.int32), ((0, 0), (0, -x.shape[1] % blocks)), **padding)
    return x.reshape(x.shape[0], blocks, -1)


def _visible(queries: Coordinates, keys: Coordinates, window: Reach) -> Bool[Array, "batch queries keys"]:
    """Return which blocks of queries must visit which blocks of keys; coordinates are [batch, blocks, tokens].

    Tokens are ordered by segment, then position, and a query sees keys from the first of its window or stretch up to
    itself. If both are in that order, as packed documents are, exactly the pairs with something visible are visited. In
    any other order pairs without are visited too, which changes no result.
    """
    first, last = (jax.tree.map(lambda x: x[:, :, None], coordinates) for coordinates in _bounds(queries))
    first_key, last_key = (jax.tree.map(lambda x: x[:, None], coordinates) for coordinates in _bounds(keys))
    oldest = Coordinates(first_seen(first.position, window), first.segment)
    return _up_to(first_key, last) & _up_to(oldest, last_key)


def _bounds(coordinates: Coordinates) -> tuple[Coordinates, Coordinates]:
    """Return the first and the last token of each block. Padding, segment 0, is ordered last, where it usually is."""
    segment = jnp.where(coordinates.segment == 0, _LAST, coordinates.segment)
    low, high = segment.min(-1), segment.max(-1)
    first = jnp.where(segment == low[..., None], coordinates.position, _LAST).min(-1)
    last = jnp.where(segment == high[..., None], coordinates.position, -_LAST).max(-1)
    return Coordinates(first, low), Coordinates(last, high)


def _up_to(one: Coordinates, other: Coordinates) -> Bool[Array, "batch queries keys"]:
    same = one.segment == other.segment
    return (one.segment < other.segment) | (same & (one.position <= other.position))


def _visit_all(x: _Step, visit: Callable[[Int[Array, ""], Any], Any], carry: Any) -> Any:
    return lax.fori_loop(jnp.zeros_like(x.count), x.count, lambda i, carry: visit(_take(x.order, i), carry), carry)


def _score(q: Block, k: Block, queries: Any, keys: Any, window: Reach) -> tuple[Array, Array]:
    """Return the scores of a pair of blocks, `NOTHING` for unseen keys, and which are seen; [kv_heads, rows, keys]."""
    scores = _dot(q, k, 2, 2)
    if isinstance(queries, Interval):
        seen = (queries.first[:, None] <= keys[None]) & (keys[None] < queries.after[:, None])
    else:
        seen = sees(queries, keys, window)
    seen = jnp.broadcast_to(seen, (q.shape[0], q.shape[1] // seen.shape[0], *seen.shape)).reshape(scores.shape)
    return jnp.where(seen, scores, NOTHING), seen


def _dot(x: Block, y: Block, x_dim: int, y_dim: int) -> Block:
    """Sum the product over one dimension of each operand, for each head, in float32."""
    return lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _take(tree: PyTree, j: Int[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, keepdims=False, allow_negative_indices=False), tree)


def _add(x: Array, j: Int[Array, ""], part: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, _take(x, j) + part, j, 0, allow_negative_indices=False)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    return vary_like(jnp.zeros(shape, jnp.float32), like)
