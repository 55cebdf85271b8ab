"""Partial results of attention, joined, equal attention over all keys; sinks are a key more whose value is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moezoo.kernels.attention import attend, join
from moezoo.parallel.context_parallel import Place

BATCH, SEQ, KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM = 2, 9, 2, 3, 4, 5
# Averages of values of order one, of scores of order ten: some 50 roundings to float32.
PRECISION = 50 * 2.0**-24


def operands(seed=0):
    """Random queries, keys, values and sinks; what flows back to the result and to the log-sum-exp."""
    rng, heads = np.random.default_rng(seed), (KV_HEADS, GROUP)
    shapes = (BATCH, SEQ, *heads, HEAD_DIM), (BATCH, SEQ, KV_HEADS, HEAD_DIM), (BATCH, SEQ, KV_HEADS, VALUE_DIM)
    shapes = *shapes, heads, (BATCH, SEQ, *heads, VALUE_DIM), (BATCH, SEQ, *heads)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


PLACE = Place(
    jnp.asarray([[*range(5), *range(4)], range(9)], jnp.int32),
    jnp.asarray([[1] * 5 + [2] * 4, [1] * 9], jnp.int32),
)


def with_gradients(function, *arguments):
    """`function(q, k, v, sinks)` as (result, log-sum-exp), and its gradients by all four through both."""
    *arguments, by_result, by_logsumexp = arguments
    value, pull = jax.vjp(function, *arguments)
    return [*value, *pull((by_result, by_logsumexp))]


def parts_between(cuts):
    """Attention over the keys between the cuts, part by part, joined."""

    def run(q, k, v, sinks):
        del sinks
        parts = []
        for first, last in zip((0, *cuts), (*cuts, SEQ), strict=True):
            keys = Place(*(x[:, first:last] for x in PLACE))
            parts.append(attend(q, k[:, first:last], v[:, first:last], queries=PLACE, keys=keys, scale=0.5, window=4))
        whole = parts[0]
        for part in parts[1:]:
            whole = join(whole, part)
        return tuple(whole)

    return run


def whole(sinks):
    """Attention over all keys at once."""

    def run(q, k, v, own):
        given_sinks = own if sinks else None
        return tuple(attend(q, k, v, queries=PLACE, keys=PLACE, scale=0.5, window=4, sinks=given_sinks))

    return run


def check(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=PRECISION * max(1, np.abs(b).max()))


@given(cuts=st.lists(st.integers(1, SEQ - 1), min_size=1, max_size=2, unique=True).map(sorted))
@example(cuts=[1])  # most queries see nothing of the first part, or nothing of the last
@example(cuts=[8])
def test_parts_joined_equal_the_whole(cuts):
    arguments = operands()
    check(with_gradients(parts_between(cuts), *arguments), with_gradients(whole(sinks=False), *arguments))


def softmax_with_sinks(q, k, v, sinks):
    """The definition, in float64 where it is given so."""
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * 0.5
    position, segment = PLACE
    distance = position[:, :, None] - position[:, None]
    seen = (segment[:, :, None] == segment[:, None]) & (distance >= 0) & (distance < 4)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, :, None, None], (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, column], axis=-1)
    result = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores)[..., :-1], v)
    return result, jax.nn.logsumexp(scores, axis=-1).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_sinks_are_a_key_of_value_zero(size):
    q, k, v, sinks, *back = operands(1)
    arguments = q, k, v, sinks * size, *back
    with jax.enable_x64():
        wanted = with_gradients(softmax_with_sinks, *(jnp.asarray(np.asarray(x), jnp.float64) for x in arguments))
        wanted = [np.asarray(x) for x in wanted]
    check(with_gradients(whole(sinks=True), *arguments), wanted)


def test_sinks_come_in_once():
    """Given to one part and not to the other, they are what they are for the whole."""
    q, k, v, sinks, *_ = operands(2)
    first, last = (Place(*(x[:, some] for x in PLACE)) for some in (slice(0, 4), slice(4, None)))
    options = {"queries": PLACE, "scale": 0.5, "window": 4}
    one = attend(q, k[:, :4], v[:, :4], keys=first, **options, sinks=sinks)
    joined = join(one, attend(q, k[:, 4:], v[:, 4:], keys=last, **options))
    check(joined, whole(sinks=True)(q, k, v, sinks))
