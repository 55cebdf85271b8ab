"""`attend` as a loop over queries in float64, operands and coordinates for it, and the precision of comparisons."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from moezoo.kernels.attention import Attended
from moezoo.kernels.attention.base import NOTHING, Coordinates, Reach
from moezoo.parallel.context_parallel import Stretches

BATCH, KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM = 2, 2, 3, 4, 5


class Case(NamedTuple):
    """Static properties of a program; `block`: tokens per block of `chunked` and per chunk of `reference`."""

    queries: int
    keys: int
    block: int
    window: Reach = None
    dtype: str = "float32"


class Inputs(NamedTuple):
    """The operands that `attend` is differentiated by."""

    q: Any
    k: Any
    v: Any
    scale: Any
    sinks: Any = None


class Value(NamedTuple):
    """The expected results of `attend`, in float64."""

    result: Any
    logsumexp: Any


def random_operands(case, seed=0, batch=BATCH):
    """Return operands, and cotangents of the result and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    heads = KV_HEADS, GROUP
    shapes = (case.queries, *heads, HEAD_DIM), (case.keys, KV_HEADS, HEAD_DIM), (case.keys, KV_HEADS, VALUE_DIM)
    q, k, v, back = (
        jnp.asarray(rng.standard_normal((batch, *shape)), case.dtype)
        for shape in (*shapes, (case.queries, *heads, VALUE_DIM))
    )
    to_total = jnp.asarray(rng.standard_normal((batch, case.queries, *heads)), jnp.float32)
    return Inputs(q, k, v, jnp.float32(0.7)), Attended(back, to_total)


def sees(queries, keys, window):
    """Return by definition whether each query sees each key; [batch, queries, keys]."""
    at, key_at = np.asarray(queries.position)[:, :, None], np.asarray(keys.position)[:, None]
    seen = np.asarray(queries.segment)[:, :, None] == np.asarray(keys.segment)[:, None]
    if isinstance(window, Stretches):
        return seen & (key_at <= at) & (key_at // window.length == at // window.length)
    return seen & (key_at <= at) & (window is None or at - key_at < window)


def loop(window, operands, queries, keys, cotangent):
    """Return what `value_and_gradients` should: query by query, over the keys that it sees; a sink is one more key."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), operands)
    q, k, v, scale, sinks = wide
    back, to_total = (np.asarray(x, np.float64) for x in cotangent)
    result, total = np.zeros(back.shape), np.full(to_total.shape, NOTHING)
    gradients = jax.tree.map(lambda x: np.zeros(x.shape), wide)
    by_q, by_k, by_v, by_scale, by_sinks = gradients
    seen = sees(queries, keys, window)
    for at in np.ndindex(total.shape):
        b, i, head, member = at
        mine = np.flatnonzero(seen[b, i])
        key, value = k[b, mine, head], v[b, mine, head]
        products = key @ q[at]
        scores = scale * products
        if sinks is not None:
            scores, value = np.append(scores, sinks[head, member]), np.append(value, np.zeros((1, value.shape[1])), 0)
        if not scores.size:
            continue
        weights = np.exp(scores - scores.max())
        total[at] = np.log(weights.sum()) + scores.max()
        weights /= weights.sum()
        result[at] = weights @ value
        by_score = weights * (value @ back[at] - result[at] @ back[at] + to_total[at])
        if sinks is not None:
            by_sinks[head, member] += by_score[-1]
            weights, by_score = weights[:-1], by_score[:-1]
        by_q[at] = scale * by_score @ key
        by_k[b, mine, head] += scale * np.outer(by_score, q[at])
        by_v[b, mine, head] += np.outer(weights, back[at])
        by_scale += by_score @ products
    return Value(result, total), Inputs(by_q, by_k, by_v, by_scale, by_sinks)


def check(results, wanted, dtype="float32"):
    """Compare each result within its rounding.

    In float32: scores are of order ten, weights multiply their roundings, and sums have a few dozen terms. In bfloat16:
    scaled queries, weights, results and gradients of scores are each rounded once, relative to the largest number. The
    gradient by the scale, a single number, sums the shares of up to 120 queries, whose errors are independent.

    What it prints: the largest error of each result, in roundings, of which 50 and 8 are the bounds.
    """
    most, rounding = {"float32": (50, 2.0**-24), "bfloat16": (8, 2.0**-8)}[dtype]
    found = []
    for result, want in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        result, something = np.asarray(result, np.float64), want != NOTHING
        np.testing.assert_array_equal(result[~something], np.float32(NOTHING))
        unit = rounding * max(1 if want.ndim else 120**0.5, np.abs(want[something]).max(initial=0))
        found.append(np.abs(result - want)[something].max(initial=0) / unit)
        np.testing.assert_allclose(result[something], want[something], rtol=0, atol=most * unit)
    print("roundings", " ".join(f"{x:.2g}" for x in found))


def make_row(cuts, padding, tokens):
    """Return position and segment of one row: documents begin at `cuts`; those numbered in `padding` are padding."""
    starts = np.zeros(tokens, np.int32)
    starts[[cut for cut in cuts if cut < tokens]] = 1
    number = np.cumsum(starts) + 1 - starts[0]
    position = np.arange(tokens) - np.maximum.accumulate(np.where(starts, np.arange(tokens), 0))
    return position, np.where(np.isin(number, padding), 0, number)


def stack_rows(*rows):
    """Return the coordinates of rows, given as pairs (position, segment)."""
    return Coordinates(*(jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)))


@st.composite
def draw_coordinates(draw, queries, keys):
    """Draw coordinates of queries and keys: documents cut anywhere, padding anywhere, tokens in any order.

    Equally many queries and keys are the same tokens, each in its own order. Fewer queries are some of the tokens, or
    later ones. Some queries see nothing.
    """
    rows = []
    for _ in range(BATCH):
        cuts = draw(st.lists(st.integers(0, keys), max_size=3))
        position, segment = make_row(cuts, draw(st.lists(st.integers(1, 4), max_size=2)), keys)
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        orders = [rng.permutation(keys) if draw(st.booleans()) else np.arange(keys) for _ in range(2)]
        late = draw(st.integers(0, 2)) if queries < keys else 0
        at, document = position[orders[0]][-queries:] + late, segment[orders[0]][-queries:]
        blind = draw(st.sets(st.integers(0, queries - 1), max_size=2))
        at[list(blind)], document[list(blind)] = -1, draw(st.sampled_from([1, 99]))
        rows.append(((at, document), (position[orders[1]], segment[orders[1]])))
    return tuple(stack_rows(*each) for each in zip(*rows, strict=True))


def packed(case):
    """Return coordinates: three documents in the first row; one document, and padding behind it, in the second."""
    keys = stack_rows(make_row([3, 7], [], case.keys), make_row([6], [2], case.keys))
    return Coordinates(*(x[:, -case.queries :] for x in keys)), keys


def with_sinks(operands):
    """Add sinks to operands."""
    return operands._replace(sinks=jnp.linspace(-1, 2, KV_HEADS * GROUP).reshape(KV_HEADS, GROUP))
