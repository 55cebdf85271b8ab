"""The MoE block as a program: the operations of its forward and backward pass."""

import jax
import jax.numpy as jnp

from moezoo.moe.experts import Experts
from moezoo.moe.mixture import MoE
from moezoo.moe.router import Choice, Router
from moezoo.parallel.execution import Execution
from moezoo.parallel.traces import equations


def test_nothing_is_added_by_scatter():
    """In the forward and backward pass, router included, sums have a fixed order."""
    keys = jax.random.split(jax.random.key(0), 3)
    router = Router(8, 4, 2, Choice(), dtype=jnp.dtype("float32"), key=keys[0])
    block = MoE(router, Experts(4, 8, 12, out_std=1.0, dtype=jnp.dtype("float32"), key=keys[1]))
    x, valid = jax.random.normal(keys[2], (2, 3, 8)), jnp.ones((2, 3), bool)

    def both(block, x):
        def results(block, x):
            y, sums, _ = block(x, valid, Execution())
            return y, sums.probabilities, sums.z

        values, pull = jax.vjp(results, block, x)
        return values, pull(values)

    names = [e.primitive.name for e, *_ in equations(jax.make_jaxpr(both)(block, x))]
    assert {"gather", "top_k"} <= set(names)
    assert "scatter-add" not in names
    # The only scatter inverts the permutation of the sort.
    assert names.count("scatter") == 1
