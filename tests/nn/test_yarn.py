"""YaRN: the frequencies it keeps and those it divides, its factors, and a factor of 1."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.models import DeepSeekConfig
from moezoo.nn.rotary import Unscaled, Yarn, frequencies


def test_a_factor_of_one_changes_nothing_to_the_bit():
    assert (Unscaled().magnitude, Unscaled().score_scale) == (1, 1)
    for yarn in (DeepSeekConfig().yarn, Yarn(1.0, 64, mscale=0.5)):
        np.testing.assert_array_equal(yarn.frequencies(16, 1e4), frequencies(16, 1e4))
        assert (yarn.magnitude, yarn.score_scale) == (1, 1)


def test_fast_pairs_keep_their_frequency_and_slow_ones_are_divided():
    """Pairs between them are on a ramp. Frequencies are rounded once, from float64."""
    size, base, yarn = 64, 1e4, Yarn(factor=40.0, length=4096)
    found = yarn.frequencies(size, base)
    assert found.dtype == jnp.float32
    plain = base ** (-np.arange(0, size, 2) / size)
    turns = plain * yarn.length / (2 * math.pi)
    kept, slowed = turns > 1.3 * yarn.beta_fast, turns < yarn.beta_slow / 1.3
    np.testing.assert_array_equal(found[kept], plain[kept].astype(np.float32))
    np.testing.assert_array_equal(found[slowed], (plain[slowed] / 40).astype(np.float32))
    between = np.asarray(found / plain.astype(np.float32))[~kept & ~slowed]
    assert len(between) > 5
    assert (np.diff(between) <= 0).all()
    assert between.min() < 0.2
    assert between.max() > 0.8


def test_the_ramp_runs_between_whole_pairs():
    """A pair that turns 32 times in 4096 tokens would be number 10.47, one that turns once number 22.51."""
    plain = 1e4 ** (-np.arange(32) / 32)
    ramp = np.clip((np.arange(32) - 10) / (23 - 10), 0, 1)
    wanted = plain * (1 - ramp) + plain / 40 * ramp
    np.testing.assert_allclose(Yarn(factor=40.0, length=4096).frequencies(64, 1e4), wanted, rtol=2.0**-23)


def test_the_ramp_runs_between_parts_of_pairs():
    """As above, with the numbers as they are."""
    plain, turns = 1e4 ** (-np.arange(32) / 32), np.array([32, 1])
    first, last = 32 * np.log(4096 / (2 * math.pi * turns)) / math.log(1e4)
    ramp = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    wanted = plain * (1 - ramp) + plain / 40 * ramp
    found = Yarn(factor=40.0, length=4096, truncate=False).frequencies(64, 1e4)
    np.testing.assert_allclose(found, wanted, rtol=2.0**-23)


def test_scales():
    """With m(s) = 0.1 s ln(factor) + 1: m(mscale) / m(mscale_all) for queries and keys, m(mscale_all)^2 for scores."""
    assert Yarn(4.0, mscale=0.7, mscale_all=1.3).magnitude == pytest.approx(
        (0.07 * math.log(4) + 1) / (0.13 * math.log(4) + 1)
    )
    assert Yarn(4.0, mscale_all=1.3).score_scale == pytest.approx((0.13 * math.log(4) + 1) ** 2)
    without = Yarn(4.0, mscale=0.0, mscale_all=0.0)
    assert (without.magnitude, without.score_scale) == (pytest.approx(0.1 * math.log(4) + 1), 1)
    assert Yarn(4.0, attention_factor=1.7).magnitude == 1.7
