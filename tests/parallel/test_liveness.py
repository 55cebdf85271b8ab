"""The widest point of a traced loop, counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from moezoo.parallel.liveness import widest
from moezoo.parallel.traces import equations

N = 16
ONE = 4 * N * N  # bytes of a matrix


def held(body: Any, *xs: int) -> int:
    """Return what an iteration of a scan holds: `body(carry, constant, *slices)` returns the next carry."""
    shape = jax.ShapeDtypeStruct((N, N), jnp.float32)
    stacks = [jax.ShapeDtypeStruct((3, N, N), jnp.float32) for _ in xs]

    def loop(carry: Any, constant: Any, *stacks: Any) -> Any:
        return jax.lax.scan(lambda c, x: (body(c, constant, *x), None), carry, stacks, length=3)[0]

    traced = jax.make_jaxpr(loop)(shape, shape, *stacks)
    (found,) = (x.equation for x in equations(traced) if x.equation.primitive.name == "scan" and x.times == 1)
    memory = widest(found, "cpu")
    assert sum(memory.parts.values()) == memory.bytes
    return memory.bytes // ONE


@pytest.mark.parametrize(
    ("body", "matrices"),
    [
        (lambda c, w: c @ w, 1),
        (lambda c, w: jnp.exp(jnp.sin(c @ w)), 1),  # in place
        (lambda c, w: jnp.exp(c @ w) @ w, 2),  # a product reads an array, and writes another
        (lambda c, w: (c @ w).T @ w, 2),  # turned as the product reads it
        (lambda c, w: (c @ w) + (w @ c), 2),
        (lambda c, w: (c @ w).sum() + c, 1),
        (lambda c, w: jnp.cumsum(c, 0) + jnp.cumsum(w, 0), 2),  # operations that are not elementwise
    ],
    ids=["product", "elementwise", "chain", "turned", "sum", "reduced", "other"],
)
def test_arrays_of_an_iteration(body, matrices):
    assert held(body) == matrices


def test_what_an_elementwise_result_is_made_of_stays_while_it_is_used():
    """`a` stays beside the product of both, which takes the place of `b`; its sine is made twice and is no array."""

    def body(c: Any, w: Any) -> Any:
        a, b = c @ w, w @ c
        both = a * b
        return (both @ w) * jnp.sin(both) + a

    assert held(body) == 3


def test_a_part_of_a_larger_array_counts_where_a_product_reads_it():
    assert held(lambda c, w, x: (c + x) @ w, 1) == 2
    assert held(lambda c, w, x: c @ x, 1) == 2
    assert held(lambda c, w, x: c + x, 1) == 1


def test_a_loop_holds_the_widest_point_of_its_body():
    def body(c: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda _, x: x @ w + w @ x, c @ w)

    assert held(body) == 3  # the carried array, and in the body two more


def test_gathered_weights_stay():
    """Two weights that are gathered together are there for both products."""
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def gather(w: Any) -> Any:
        with jax.named_scope("weights"):
            return jax.lax.all_gather(w, "x", axis=0, tiled=True)

    def layer(c: Any, w: Any) -> Any:
        one, other = gather(w), gather(w + 1)
        return (c @ one) @ other

    def local(c: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (layer(c, w), None), jax.lax.pcast(c, "x", to="varying"), None, length=3)[0]

    program = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x")), out_specs=PartitionSpec("x")
    )
    shape = jax.ShapeDtypeStruct((N, N), jnp.float32)
    traced = jax.make_jaxpr(program)(shape, shape)
    (loop,) = (x.equation for x in equations(traced) if x.equation.primitive.name == "scan")
    found = widest(loop, "cpu")
    assert found.parts["gathered weights"] == 2 * ONE
    assert found.bytes == 4 * ONE
