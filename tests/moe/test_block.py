"""The MoE block as a program: what its forward and backward pass are made of."""

import jax
import jax.numpy as jnp

from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.parallel.execution import Execution
from moezoo.parallel.traces import equations


def test_nothing_is_added_by_scatter():
    """Forward or backward, router included: sums are in a fixed order, and gathers are what hardware does well."""
    keys = jax.random.split(jax.random.key(0), 3)
    router = Router(8, 4, 2, Choice(), dtype=jnp.dtype("float32"), key=keys[0])
    block = MoE(router, Experts(4, 8, 12, out_std=1.0, dtype=jnp.dtype("float32"), key=keys[1]))
    x, valid = jax.random.normal(keys[2], (2, 3, 8)), jnp.ones((2, 3), bool)

    def both(block, x):
        y, pull = jax.vjp(lambda block, x: block(x, valid, Execution())[0], block, x)
        return y, pull(y)

    names = [e.primitive.name for e, *_ in equations(jax.make_jaxpr(both)(block, x))]
    assert "gather" in names
    assert "scatter-add" not in names
    # One scatter alone: of the sort's integers, which inverts a permutation.
    assert names.count("scatter") == 1
