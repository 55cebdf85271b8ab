"""Rotary positions against complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from definitions import complex_rotation

from moezoo.nn.rotary import Proportional, Rotary, Unscaled, frequencies

SHAPE = (2, 5, 3, 8)
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
POSITIONS = np.random.default_rng(1).integers(0, 64, SHAPE[:2]).astype(np.int32)
# An angle up to 64 radians is rounded three times by 64 * 2 ** -24 before the sine.
PRECISION = 4 * 64 * 2.0**-24 * 4


class Louder(Unscaled):
    """An extension that only multiplies what is rotated."""

    @property
    def magnitude(self):
        """The factor."""
        return 1.5


@pytest.mark.parametrize("base", [100.0, 1e6])
def test_a_rotation_is_a_complex_product(base):
    rotary = Rotary(8, base)
    turn = rotary.turn(jnp.asarray(POSITIONS))
    rotated = rotary(jnp.asarray(X), turn)
    np.testing.assert_allclose(rotated, complex_rotation(X, POSITIONS, base), rtol=0, atol=PRECISION)
    assert rotary(jnp.asarray(X, jnp.bfloat16), turn).dtype == jnp.bfloat16
    np.testing.assert_array_equal(Unscaled().frequencies(8, base), frequencies(8, base))


def test_some_dimensions_rotate_and_others_stay():
    """With interleaved pairs, which come out as halves, and the factor of an extension."""
    rotary = Rotary(4, 100.0, Louder(), "interleaved")
    found = rotary(jnp.asarray(X), rotary.turn(jnp.asarray(POSITIONS)))
    halves = np.concatenate([X[..., 0:4:2], X[..., 1:4:2]], axis=-1)
    wanted = complex_rotation(halves, POSITIONS, 100.0) * 1.5
    np.testing.assert_allclose(found[..., :4], wanted, rtol=0, atol=2 * PRECISION)
    np.testing.assert_array_equal(found[..., 4:], X[..., 4:])


def test_the_first_pairs_rotate_as_where_all_do():
    """Pair i is of dimensions i and i + 4; two of four pairs rotate, and of 0.7 of them, too."""
    whole = complex_rotation(X, POSITIONS, 100.0)
    for share in (0.5, 0.7):
        rotary = Rotary(8, 100.0, Proportional(share))
        found = rotary(jnp.asarray(X), rotary.turn(jnp.asarray(POSITIONS)))
        np.testing.assert_allclose(found[..., [0, 1, 4, 5]], whole[..., [0, 1, 4, 5]], rtol=0, atol=PRECISION)
        np.testing.assert_array_equal(found[..., [2, 3, 6, 7]], X[..., [2, 3, 6, 7]])
