"""The extension of Llama 3.1: each frequency against its definition, by wavelengths."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.nn.rotary import Llama3, frequencies


def test_a_factor_of_one_changes_nothing_to_the_bit():
    np.testing.assert_array_equal(Llama3(1.0, 64).frequencies(16, 1e4), frequencies(16, 1e4))
    assert (Llama3(8.0).magnitude, Llama3(8.0).score_scale) == (1, 1)


# The last one is that of Llama 4 Scout: nothing is between.
SCALINGS = [(128, 5e5, Llama3(8.0)), (8, 50.0, Llama3(4.0, 32, 0.5, 2.0)), (128, 5e5, Llama3(16.0, low=1.0, high=1.0))]


@pytest.mark.parametrize(("size", "base", "scaling"), SCALINGS)
def test_long_waves_are_slowed_and_short_ones_kept(size, base, scaling):
    wanted, kinds = [], set()
    for pair in range(size // 2):
        plain = base ** (-2 * pair / size)
        wavelength = 2 * math.pi / plain
        if wavelength > scaling.length / scaling.low:
            kinds.add("long")
            wanted.append(plain / scaling.factor)
        elif wavelength < scaling.length / scaling.high:
            kinds.add("short")
            wanted.append(plain)
        else:
            kinds.add("between")
            smooth = (scaling.length / wavelength - scaling.low) / (scaling.high - scaling.low)
            wanted.append((1 - smooth) * plain / scaling.factor + smooth * plain)
    assert kinds == {"long", "short"} | ({"between"} if scaling.low < scaling.high else set())
    found = scaling.frequencies(size, base)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=2.0**-23)
