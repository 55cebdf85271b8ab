"""The cache against a ring buffer that is written token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.nn.cache import Cache, fit
from moezoo.parallel.context_parallel import Place

BATCH, SLOTS = 2, 3


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_text_is_arranged_as_if_written_token_by_token(count):
    columns = np.arange(1.0, 1 + BATCH * count, dtype=np.float32).reshape(BATCH, count)
    slots = np.zeros((BATCH, SLOTS), np.float32)
    for token in range(count):
        slots[:, token % SLOTS] = columns[:, token]
    np.testing.assert_array_equal(fit(jnp.asarray(columns), SLOTS, dim=1), slots)


def test_a_token_is_written_into_its_slot():
    """What each layer keeps of it, and its place, for each number of slots."""
    kept = jnp.zeros((4, BATCH, SLOTS))
    place = Place(*(jnp.zeros((BATCH, SLOTS), jnp.int32) for _ in range(2)))
    cache = Cache(((kept,),), {SLOTS: place}, jnp.int32(7))
    tokens = jnp.arange(1.0, 9).reshape(4, BATCH, 1)
    past, _ = cache.past(0, 0, jnp.int32(2))
    wanted = np.zeros((4, BATCH, SLOTS))
    wanted[:, :, 7 % SLOTS] = tokens[:, :, 0]
    np.testing.assert_array_equal(past.with_token(tokens[2]), wanted[2])
    after = cache.append(((tokens,),))
    np.testing.assert_array_equal(after.kept[0][0], wanted)
    assert after.column == 8
    position, segment = cache.add_key(Place(*(jnp.full((BATCH, 1), n, jnp.int32) for n in (9, 1)))).keys[SLOTS]
    np.testing.assert_array_equal(position, [[0, 9, 0]] * BATCH)
    np.testing.assert_array_equal(segment, [[0, 1, 0]] * BATCH)
