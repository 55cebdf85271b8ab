"""Chunks of 64 tokens: products inside a chunk, and one step of a loop from chunk to chunk.

Within a chunk with state S before it, A = I + tril(strength_i k_i k_j decay(j to i), -1) and its inverse give what each
token writes: U - W S, with U = A^-1 (strength v) and W = A^-1 (strength k decay(to i)). With that

    o = q decay(to i) S + tril(q_i k_j decay(j to i)) (U - W S)
    S' = decay(whole) S + (k decay(i to end))^T (U - W S)

(Yang et al., 2024, arXiv:2412.06464; per channel: Kimi Team, 2025, arXiv:2510.26692.) All in float32.

Without strengths U is v and W is zero: no matrix is inverted (Dao and Gu, 2024, arXiv:2405.21060, section 6).

Decays are sums of logarithms over the tokens between, never differences of running sums: these would lose what small
decays say behind a large one. A decay per channel does not leave products of chunks as one factor; there, two tokens
meet between them (`_pairs_per_channel`).

Chunks are read in pieces. The gradient keeps the state before each piece, and makes everything else of it again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moezoo.kernels.delta_rule.base import Operands, Recalled, Start
from moezoo.parallel.collectives import ATTENTION

CHUNK = 64
# The rows of the blocks on a diagonal that are inverted first.
BLOCK = 16
# The chunks of a piece, which are computed side by side.
PIECE = 8

_dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class _Floats(NamedTuple):
    """The tokens of a piece: [batch, heads, chunks, CHUNK, dim], with a dimension `group` after heads where it varies.

    Decays are [batch, heads, group, chunks, CHUNK, key_dim or 1]. There may be no strengths.
    """

    q: Array
    k: Array
    v: Array
    decay: Array
    strength: Array | None


class _Documents(NamedTuple):
    """The documents of the tokens of a piece, and of the token before each of its chunks."""

    segment: Int[Array, "batch chunks token"]
    before: Int[Array, "batch chunks"]


def rule(operands: Operands, start: Start) -> Recalled:
    """Read chunk after chunk."""
    o = operands
    decay = o.decay if o.per_channel else o.decay[..., None]
    tokens = o.segment.shape[1]
    chunks = -(-tokens // CHUNK)
    pieces = -(-chunks // PIECE)
    size = -(-chunks // pieces)

    def cut(x: Array, mode: Any = "constant") -> Array:
        x = jnp.pad(x, ((0, 0), (0, pieces * size * CHUNK - tokens), *((0, 0),) * (x.ndim - 2)), mode=mode)
        return x.reshape(x.shape[0], pieces, size, CHUNK, *x.shape[2:])

    # Padding at the end: tokens of the last document that write nothing and do not decay.
    floats = jax.tree.map(cut, _Floats(o.q, o.k, o.v, decay, o.strength))
    by_head = (jnp.moveaxis(x, (1, 4), (0, 2)) for x in floats[:2])
    floats = _Floats(*by_head, *jax.tree.map(_groups_first, floats[2:]))
    segment = cut(o.segment, "edge")
    last = segment[..., -1]
    before = jnp.concatenate([start.segment[:, None], last.reshape(len(last), -1)[:, :-1]], axis=1)
    documents = _Documents(segment.swapaxes(0, 1), before.reshape(last.shape).swapaxes(0, 1))
    result, state = _read(floats, documents, start.state)
    result = jnp.moveaxis(result, (0, 2, 3), (1, 4, 5)).reshape(o.v.shape[0], -1, *o.v.shape[2:])
    return Recalled(result[:, :tokens], state)


def _groups_first(x: Array) -> Array:
    """Take [batch, pieces, chunks, CHUNK, heads, group, ...] to [pieces, batch, heads, group, chunks, CHUNK, ...]."""
    return jnp.moveaxis(x, (1, 4, 5), (0, 2, 3))


@jax.custom_vjp
def _read(floats: _Floats, documents: _Documents, initial: Array) -> tuple[Array, Array]:
    return _forward(floats, documents, initial)[0]


def _forward(floats: _Floats, documents: _Documents, initial: Array) -> tuple[tuple[Array, Array], Any]:
    def step(state: Array, piece: tuple[_Floats, _Documents]) -> tuple[Array, tuple[Array, Array]]:
        result, after = _piece(piece[0], state, piece[1])
        return after, (result, state)

    state, (result, states) = lax.scan(step, initial, (floats, documents))
    # Named, so that a policy that saves them saves the loop as well.
    result, states = (checkpoint_name(x, ATTENTION) for x in (result, states))
    return (result, state), (floats, documents, states)


def _backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[_Floats, None, Array]:
    floats, documents, states = residuals
    by_result, by_state = cotangents

    def step(back: Array, piece: Any) -> tuple[Array, _Floats]:
        floats, documents, state, by_result = piece
        _, pull = jax.vjp(lambda floats, state: _piece(floats, state, documents), floats, state)
        by_floats, by_state = pull((by_result, back))
        return by_state, by_floats

    by_initial, by_floats = lax.scan(step, by_state, (floats, documents, states, by_result), reverse=True)
    return by_floats, None, by_initial


_read.defvjp(_forward, _backward)


def _piece(x: _Floats, state: Array, documents: _Documents) -> tuple[Array, Array]:
    """Return the results of a piece, [batch, heads, group, chunks, CHUNK, value_dim], and the state after it."""
    dtype, x = x.v.dtype, jax.tree.map(lambda one: one.astype(jnp.float32), x)
    segment, before = (one[:, None, None] for one in documents)
    same = jnp.tril(segment[..., :, None] == segment[..., None, :])
    reads, writes = (segment == one[..., None] for one in (before, segment[..., -1]))
    reads, writes, keeps = reads[..., None], writes[..., None], (segment[..., -1] == before)[..., None]
    pair = _pairs_per_channel if x.decay.shape[-1] > 1 else _pairs_per_head
    left = (x.q,) if x.strength is None else (x.k, x.q)
    *writing, reading = (jnp.where(same, one, 0) for one in pair(x, *left))
    inverse = None if x.strength is None else invert(x.strength[..., None] * writing[0])
    q, k = x.q[:, :, None], x.k[:, :, None]
    since = jnp.exp(jnp.cumsum(x.decay, -2))
    until = jnp.exp(_after(x.decay))
    u, w = x.v, None
    if x.strength is not None:
        u = _dot("...ij,...jv->...iv", inverse, x.strength[..., None] * x.v)
        w = _dot("...ij,...jk->...ik", inverse, jnp.where(reads, x.strength[..., None] * since * k, 0))
    tail = jnp.where(writes, k * until, 0)
    whole = jnp.where(keeps, since[..., -1, :], 0)

    def step(state: Array, chunk: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w, tail, whole = chunk
        written = u if w is None else u - _dot("...ik,...kv->...iv", w, state)
        return whole[..., None] * state + _dot("...ik,...iv->...kv", tail, written), (state, written)

    by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), (u, w, tail, whole))
    after, (states, written) = lax.scan(step, state, by_chunk)
    states, written = (jnp.moveaxis(x, 0, 3) for x in (states, written))
    result = _dot("...ik,...kv->...iv", jnp.where(reads, since * q, 0), states)
    return (result + _dot("...ij,...jv->...iv", reading, written)).astype(dtype), after


def _after(decay: Float[Array, "*dims token channel"]) -> Float[Array, "*dims token channel"]:
    """Sum the decays of the tokens after each one."""
    shifted = jnp.pad(decay[..., 1:, :], ((0, 0),) * (decay.ndim - 2) + ((0, 1), (0, 0)))
    return jnp.cumsum(shifted[..., ::-1, :], -2)[..., ::-1, :]


def _between(decay: Float[Array, "*dims token"]) -> Float[Array, "*dims token token"]:
    """Sum the decays after each earlier token up to each later one, [..., later, earlier]; 0 if it is not later."""
    size = decay.shape[-1]
    return jnp.cumsum(jnp.tril(jnp.broadcast_to(decay[..., None], (*decay.shape, size)), -1), -2)


def _pairs_per_head(x: _Floats, *left: Array) -> list[Array]:
    """Return y_i k_j times the decay from j to i for each y of `left`, [..., CHUNK, CHUNK]; any number where i < j."""
    faded = jnp.exp(_between(x.decay[..., 0]))
    return [_dot("...ik,...jk->...ij", y, x.k)[:, :, None] * faded for y in left]


def _pairs_per_channel(x: _Floats, *left: Array) -> list[Array]:
    """Return the same for decays per channel.

    Two tokens meet at the middle of the smallest group of 2, 4, 8, ... tokens that has both. The decays from the
    earlier one to the middle, and from there to the later one, are both at most 1: one product for each size of groups.
    """
    number, halves = np.arange(CHUNK), 2 ** np.arange(CHUNK.bit_length() - 1)[:, None]
    # For each size of groups, whether a token is in the second half of its group, and the first token of that half.
    is_later, middle = number // halves % 2 == 1, (number // (2 * halves) * 2 + 1) * halves
    first, after = np.where(is_later, middle, number + 1), np.where(is_later, number + 1, middle)
    between = (first[..., None] <= number) & (number < after[..., None])
    meet = (middle[:, :, None] == middle[:, None]) & is_later[:, :, None] & ~is_later[:, None]
    # Sums as a product: its factors are 0 and 1, so it adds decays, and takes none away.
    factor = jnp.exp(_dot("lit,...tk->...lik", jnp.asarray(between, x.decay.dtype), x.decay))
    k = x.k[:, :, None]
    faded = factor * k[..., None, :, :]

    def pairs(y: Array) -> Array:
        wide = y[:, :, None]
        one, itself = faded if y is x.k else factor * wide[..., None, :, :], (wide * k).sum(-1)
        found = _where(meet, _dot("...ik,...jk->...ij", one, faded)).sum(-3)
        return found + _where(np.eye(CHUNK, dtype=bool), itself[..., None])

    return [*map(pairs, left)]


def _where(given: np.ndarray, x: Array) -> Array:
    """Return `x`, and 0 where the last dimensions are not `given`."""
    return jnp.where(given.reshape(*(1,) * (x.ndim - given.ndim), *given.shape), x, 0)


@jax.custom_vjp
def invert(lower: Float[Array, "*dims token token"]) -> Float[Array, "*dims token token"]:
    """Return the inverse of I + tril(`lower`, -1), a power of two of rows; other numbers of `lower` are not read.

    From the inverses of blocks on the diagonal follow those of blocks twice as large. All of them are parts of the
    result, so nothing large cancels, as it does in products of (I - N)(I + N^2)(I + N^4) for tokens with equal keys.
    """
    blocks = _diagonal_blocks(lower, BLOCK, 0)
    number = lax.iota(jnp.int32, BLOCK)
    inverse = jnp.broadcast_to(jnp.eye(BLOCK, dtype=lower.dtype), blocks.shape)
    step = 1
    while step < BLOCK:
        half = number // step
        below = (half[:, None] == half[None] + 1) & (half[None] % 2 == 0)
        corner = jnp.where(below.reshape(*(1,) * (blocks.ndim - 2), BLOCK, BLOCK), blocks, 0)
        inverse -= corner if step == 1 else _dot("...ij,...jk,...kl->...il", inverse, corner, inverse)
        step *= 2
    while step < lower.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_dot("...ij,...jk,...kl->...il", second, _diagonal_blocks(lower, step, 1), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        step *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(
    x: Float[Array, "*dims token token"], size: int, below: int
) -> Float[Array, "*dims block size size"]:
    """Return the blocks on the diagonal; with `below` 1, every other one of those left of and below two of them."""
    blocks = [
        x[..., at + below * size : at + (1 + below) * size, at : at + size]
        for at in range(0, x.shape[-1], (1 + below) * size)
    ]
    return jnp.stack(blocks, axis=-3)


def _invert_backward(inverse: Array, back: Array) -> tuple[Array]:
    gradient = -_dot("...ji,...jk,...lk->...il", inverse, back, inverse)
    return (jnp.tril(gradient, -1),)


invert.defvjp(lambda lower: (invert(lower),) * 2, _invert_backward)
