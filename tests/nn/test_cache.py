"""The cache against a ring buffer that is written token by token, and with a state that is no ring buffer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import by_table, refused

from moezoo.nn.cache import Cache, Kept, Slots, State, as_ring, fill_declared
from moezoo.parallel.context_parallel import Coordinates

BATCH, SLOTS = 2, 3


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_text_is_arranged_as_if_written_token_by_token(count):
    columns = np.arange(1.0, 1 + BATCH * count, dtype=np.float32).reshape(BATCH, count)
    slots = np.zeros((BATCH, SLOTS), np.float32)
    for token in range(count):
        slots[:, token % SLOTS] = columns[:, token]
    np.testing.assert_array_equal(as_ring(jnp.asarray(columns), SLOTS), slots)
    declared = Slots.declare(SLOTS, {"heads": 2, "head_dim": 1})
    assert declared.kept == Kept({"heads": 2, "slots": SLOTS, "head_dim": 1})
    each = jnp.stack([columns, -columns], axis=-1)[..., None]
    np.testing.assert_array_equal(declared.fill(each).kept[..., 0], np.stack([slots, -slots], axis=1))


def test_a_token_is_written_into_its_slot():
    """What each layer keeps of it, and its coordinates, for each number of slots."""
    kept = jnp.zeros((4, BATCH, 2, SLOTS, 1))
    at = Coordinates(*(jnp.zeros((BATCH, SLOTS), jnp.int32) for _ in range(2)))
    cache = Cache(((Slots(SLOTS, kept),),), {SLOTS: at}, jnp.int32(7))
    tokens = jnp.arange(1.0, 17).reshape(4, BATCH, 1, 2, 1)
    past = cache.past(0, 0, jnp.int32(2))
    wanted = np.zeros((4, BATCH, 2, SLOTS, 1))
    wanted[:, :, :, 7 % SLOTS] = tokens[:, :, 0]
    np.testing.assert_array_equal(past.state.with_token(tokens[2], past), wanted[2].swapaxes(1, 2))
    after = cache.advance(((tokens,),))
    np.testing.assert_array_equal(after.states[0][0].kept, wanted)
    assert after.column == 8
    fresh = Coordinates(*(jnp.full((BATCH, 1), n, jnp.int32) for n in (9, 1)))
    position, segment = cache.add_token(fresh).coordinates[SLOTS]
    np.testing.assert_array_equal(position, [[0, 9, 0]] * BATCH)
    np.testing.assert_array_equal(segment, [[0, 1, 0]] * BATCH)


class Total(State):
    """A sum over tokens, as a recurrent mixer has one: it is replaced whole, and needs no coordinates."""

    total: Any

    def fill(self, kept):
        """Keep the sum over the prompt."""
        return Total(0, kept)

    def advance(self, fresh, column):
        """Keep the sum with the token."""
        del column
        return Total(0, fresh)


def test_the_cache_carries_any_state():
    """Beside slots of two sizes: coordinates are kept once for each size, and none for a state that needs none."""
    at = Coordinates(*(jnp.ones((BATCH, 5), jnp.int32),) * 2)
    rings = [Slots(n, jnp.zeros((1, BATCH, n, 1))) for n in (8, SLOTS, 8)]
    total = Total(0, jnp.zeros((2, BATCH)))
    cache = Cache.of_prompts(((total, *rings[:2]), (rings[2],)), at)
    assert sorted(cache.coordinates) == [SLOTS, 8]
    assert cache.column == 5
    assert cache.past(0, 0, jnp.int32(1)).keys is None
    assert cache.past(1, 0, jnp.int32(0)).keys is cache.coordinates[8]
    token = jnp.ones((1, BATCH, 1, 1))
    fresh = ((jnp.full((2, BATCH), 3.0), token, token), (token,))
    after = jax.jit(lambda cache: cache.add_token(Coordinates(*(a[:, :1] for a in at))).advance(fresh))(cache)
    assert jax.tree.structure(after) == jax.tree.structure(cache)  # as a loop needs
    np.testing.assert_array_equal(after.states[0][0].total, np.full((2, BATCH), 3.0))
    np.testing.assert_array_equal(after.states[1][0].kept[0, :, 5], np.ones((BATCH, 1)))


class Keeps(NamedTuple):
    """A stand-in for a mixer, which declares `declared`."""

    declared: Any

    def state(self, length):
        """Return what it declares."""
        del length
        return self.declared


@by_table(
    """
    declared => line
    None => mixer Keeps: state returns a NoneType, expected a State
    Slots.declare(3, {"heads": 2, "head_dim": 2})
        => mixer Keeps: its state declares heads=2 slots=3 head_dim=2, and what it keeps has (2, 3, 1)
    Slots.declare(3, {"head_dim": 1})
        => mixer Keeps: its state declares slots=3 head_dim=1, and what it keeps has (2, 3, 1)
    Slots.declare(3, ({"head_dim": 1},)) => mixer Keeps: what it keeps is not the tree that its state declares
    Slots.declare(0, {"heads": 2}) => Slots.declare: num_slots is 0, expected 1 or more
    """
)
def test_a_state_that_is_not_what_a_mixer_keeps(declared, line):
    kept = jnp.ones((BATCH, 5, 2, 1))
    assert fill_declared(Keeps(Slots.declare(3, {"heads": 2, "head_dim": 1})), kept, 5).num_slots == 3
    with refused(line):
        fill_declared(Keeps(eval(declared)), kept, 5)
