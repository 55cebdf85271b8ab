"""Reading traced programs: counts, bytes, scopes and phases of collectives."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import count_collectives

from moezoo.parallel.traces import collective_traffic
from moezoo.parallel.traffic import Phase, Row


def trace(function: Any) -> Any:
    """Trace a function of an array [16, 4] float32 that is split over two axes: [2, 4] per device."""
    mesh, split = auto_mesh(a=2, b=4), PartitionSpec(("a", "b"))
    return jax.make_jaxpr(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split))(jnp.ones((16, 4)))


def count(function: Any) -> Counter:
    """Count the collectives of a function."""
    return count_collectives(trace(function))


def test_counts_axes_and_iterations():
    def looped(x: Any) -> Any:
        once = lambda c, _: (lax.ppermute(c + lax.psum(c, ("b", "a")).sum(), "b", [(0, 1)]), None)  # noqa: E731
        return lax.scan(lambda c, _: (lax.scan(once, c, None, length=3)[0], None), x, None, length=2)[0]

    assert count(lambda x: x) == {}
    assert count(lambda x: lax.all_gather(x, ("b", "a"), tiled=True)) == {("all_gather", ("b", "a")): 1}
    assert count(lambda x: lax.all_gather(x, ("a", "b"), tiled=True)) == {("all_gather", ("a", "b")): 1}
    assert count(jax.checkpoint(lambda x: lax.psum_scatter(x, "b", tiled=True, scatter_dimension=1))) == {
        ("reduce_scatter", ("b",)): 1
    }
    assert count(looped) == {("psum", ("a", "b")): 6, ("ppermute", ("b",)): 6}


def test_refuses_unknown_numbers_of_runs():
    def exchange(x: Any) -> Any:
        return lax.ppermute(x, "a", [(0, 1), (1, 0)])

    with pytest.raises(ValueError, match="ends on a condition"):
        count(lambda x: lax.while_loop(lambda c: c.sum() < 9, exchange, x))
    with pytest.raises(ValueError, match="depends on the data"):
        count(lambda x: lax.cond(x.sum() > 9, exchange, lambda c: c, x))
    assert count(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)) == {}


def test_scope_and_phase_of_a_collective():
    def gather_and_sum(x: Any) -> Any:
        with jax.named_scope("inner"):
            whole = lax.all_gather(jnp.sin(x), "b", tiled=True)
        return lax.psum_scatter(jnp.sin(whole), "b", tiled=True)

    def objective(x: Any) -> Any:
        with jax.named_scope("layers"):
            x = lax.scan(lambda c, _: (jax.checkpoint(gather_and_sum)(c), None), x, None, length=3)[0]
        with jax.named_scope("head"):
            return jax.checkpoint(gather_and_sum)(x).sum()

    def step(x: Any) -> Any:
        value, gradient = jax.value_and_grad(objective)(x)
        with jax.named_scope("norm"):
            return value * gradient * lax.psum(gradient.sum(), ("b", "a"))

    # The sum is not recomputed: the backward pass does not need its result.
    parts: list[tuple[str, Phase, str]] = [
        ("/inner", "forward", "all_gather"),
        ("", "forward", "reduce_scatter"),
        ("/inner", "recomputed", "all_gather"),
        ("", "backward", "all_gather"),
        ("/inner", "backward", "reduce_scatter"),
    ]
    expected = {Row("norm", "outside", "psum", ("a", "b")): (1, 2 * 4)}
    for scope, times in (("layers", 3), ("head", 1)):
        for part, phase, kind in parts:  # each brings 2 x 4 numbers from three other devices
            expected[Row(scope + part, phase, kind, ("b",))] = (times, times * 3 * 32)
    assert collective_traffic(trace(step)) == expected


def test_dead_code_does_not_count():
    """An unused gather does not count inside any kind of nested program."""

    def both(x: Any) -> Any:
        return lax.ppermute(x, "b", [(0, 1)]), lax.all_gather(x, "b", tiled=True)

    def summing(carry: Any, _: None) -> Any:
        return (both(carry[0])[0], carry[1] + lax.psum(carry[1], "b")), None

    own_gradient, own_tangent = jax.custom_vjp(both), jax.custom_jvp(both)
    own_gradient.defvjp(lambda x: (both(x), None), lambda _, cotangents: (cotangents[0],))
    own_tangent.defjvp(lambda primals, tangents: (both(*primals), both(*tangents)))
    holders = {
        "jit": jax.jit(both),
        "checkpoint": jax.checkpoint(both),
        "scan": lambda x: lax.scan(lambda c, _: both(c), x, None, length=1),
        "carry": lambda x: lax.scan(summing, (x, x), length=1)[0],
        "platform": lambda x: lax.platform_dependent(x, cpu=both, default=both),
        "custom_vjp": own_gradient,
        "custom_jvp": own_tangent,
    }
    for name, holder in holders.items():
        assert count(lambda x, holder=holder: holder(x)[0]) == {("ppermute", ("b",)): 1}, name
        assert len(count(holder)) == 2, name  # if its result is used, it counts
