"""Passes of kernels are traced once."""

import jax
import jax.numpy as jnp
import numpy as np

from moezoo.kernels.calls import traced_once


def test_a_pass_is_traced_once_until_a_type_or_a_number_changes():
    traced = []

    def double(factor: int, x: jax.Array) -> jax.Array:
        traced.append((factor, x.shape))
        return x * factor

    @jax.jit
    def program(x: jax.Array) -> list[jax.Array]:
        calls = [(8, (2,), x), (8, (2,), x + 1), (8, (3,), x), (8, (2,), x[:1]), (16, (2,), x)]
        return [traced_once(double, *call) for call in calls]

    results = program(jnp.arange(3.0))
    assert traced == [(2, (3,)), (3, (3,)), (2, (1,)), (2, (3,))]
    for result, want in zip(results, ([0, 2, 4], [2, 4, 6], [0, 3, 6], [0], [0, 2, 4]), strict=True):
        np.testing.assert_array_equal(result, want)
