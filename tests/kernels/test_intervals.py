"""Intervals of keys and of blocks say what `sees` says of sorted keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_loop import make_row, sees
from hypothesis import given, settings
from hypothesis import strategies as st

from moezoo.kernels.attention.base import Coordinates
from moezoo.kernels.attention.intervals import intervals, meeting, spans_of
from moezoo.parallel.context_parallel import Stretches, mean_seen

QUERIES, KEYS, BLOCK = 11, 13, 4


@st.composite
def draw_sorted(draw):
    """Draw coordinates of queries in any order, and of sorted keys with padding at one end.

    Documents may begin before the first key and lack any of their tokens, as in a part of the keys. Some queries see
    none. Late queries see whole blocks of keys.
    """
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    cuts = draw(st.lists(st.integers(0, 40), max_size=4))
    position, segment = make_row(cuts, draw(st.lists(st.integers(1, 4), max_size=2)), 40)
    scale = draw(st.sampled_from([1, 2**28]))  # numbers of segments whose product with positions is too large
    tokens = np.stack([position, segment * scale])
    kept = tokens[:, np.sort(rng.choice(40, KEYS, replace=False))]
    is_first = draw(st.booleans())
    kept = kept[:, np.argsort((kept[1] == 0) != is_first, kind="stable")]
    if (kept[1] == 0).any():  # padding of several places is one segment
        last = np.flatnonzero(kept[1] == 0)
        kept[:, last] = kept[:, last[np.argsort(kept[0, last], kind="stable")]]
    at = tokens[:, -QUERIES:].copy() if draw(st.booleans()) else tokens[:, rng.choice(40, QUERIES)]
    at[1, list(draw(st.sets(st.integers(0, QUERIES - 1), max_size=2)))] = 99
    return tuple(Coordinates(*(jnp.asarray(x[None], jnp.int32) for x in each)) for each in (at, kept))


@settings(max_examples=60)
@given(at=draw_sorted(), window=st.sampled_from([None, 1, 3, 100, Stretches(3), Stretches(100)]))
def test_equal_what_is_seen(at, window):
    queries, keys = at
    first, after = (np.asarray(x) for x in jax.jit(intervals, static_argnums=2)(queries, keys, window))
    number = np.arange(KEYS)
    seen = (number >= first[..., None]) & (number < after[..., None])
    np.testing.assert_array_equal(seen, sees(queries, keys, window))

    rows, columns = -QUERIES % BLOCK, -KEYS % BLOCK
    pairs: Any = np.pad(seen, ((0, 0), (0, rows), (0, columns))).reshape(1, (QUERIES + rows) // BLOCK, BLOCK, -1, BLOCK)
    spans = spans_of(jnp.asarray(first), jnp.asarray(after), BLOCK)
    low, high, start, stop = (np.asarray(x)[..., None] for x in spans)
    some = pairs.any((2, 4))
    begin = np.arange(some.shape[2]) * BLOCK
    met: Any = (low < begin + BLOCK) & (high > begin)
    assert not (some & ~met).any()
    assert (met.any(2) == some.any(2)).all()
    whole = (begin >= start) & (begin + BLOCK <= stop)
    np.testing.assert_array_equal(whole, pairs.all((2, 4)))
    from_block, to_block = (np.asarray(x) for x in meeting(spans, KEYS, BLOCK))
    for column in range(some.shape[2]):
        blocks = np.flatnonzero(met[0, :, column])
        found = (from_block[0, column], to_block[0, column])
        assert found == ((blocks[0], blocks[-1] + 1) if blocks.size else (0, 0))


@pytest.mark.parametrize("window", [None, 1, 3, 10, 30, *map(Stretches, (1, 3, 5, 10, 30))], ids=str)
def test_the_mean_number_of_keys(window):
    at = Coordinates(jnp.arange(10)[None], jnp.ones((1, 10), jnp.int32))
    assert mean_seen(window, 10) == pytest.approx(sees(at, at, window).sum() / 10)
