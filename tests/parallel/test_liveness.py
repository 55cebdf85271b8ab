"""The widest point of a traced loop, counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import moezoo.parallel.liveness as liveness
from moezoo.parallel.liveness import widest
from moezoo.parallel.traces import equations

N = 16
ONE = 4 * N * N  # bytes of a matrix


def held(body: Any, *xs: int) -> int:
    """Return the matrices that an iteration holds. `body(carry, constant, *slices)` returns the next carry."""
    return loop_bytes(lambda *given: (body(*given), None), "cpu", *xs) // ONE


def loop_bytes(body: Any, platform: str, *xs: int) -> int:
    """Return the bytes that an iteration holds. `body` returns what it stacks too, or the next carry alone."""
    shape = jax.ShapeDtypeStruct((N, N), jnp.float32)
    stacks = [jax.ShapeDtypeStruct((3, N, N), jnp.float32) for _ in xs]

    def step(carry: Any, constant: Any, *slices: Any) -> Any:
        found = body(carry, constant, *slices)
        return found if isinstance(found, tuple) else (found, None)

    def loop(carry: Any, constant: Any, *stacks: Any) -> Any:
        return jax.lax.scan(lambda c, x: step(c, constant, *x), carry, stacks, length=3)

    traced = jax.make_jaxpr(loop)(shape, shape, *stacks)
    (found,) = (x.equation for x in equations(traced) if x.equation.primitive.name == "scan" and x.times == 1)
    memory = widest(found, platform)
    assert sum(memory.parts.values()) == memory.bytes
    return memory.bytes


def loop_on_four(body: Any) -> Any:
    """Return the loop over `body(carry, constant)`, which returns what it stacks too, on one of four devices."""
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def local(c: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: body(c, w), jax.lax.pcast(c, "x", to="varying"), None, length=3)

    spec = PartitionSpec("x")
    program = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec()), out_specs=(spec, spec))
    shape = jax.ShapeDtypeStruct((N, N), jnp.float32)
    traced = jax.make_jaxpr(program)(shape, shape)
    (loop,) = (x.equation for x in equations(traced) if x.equation.primitive.name == "scan")
    return loop


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


def test_an_operation_that_joins_numbers_is_one_step():
    """The gradient of a choice of rows adds rows, by a program of two numbers, to as many zeros as there were rows."""
    rows = jnp.array([3, 1])
    gradient = lambda c, w: jax.vjp(lambda x: x[rows], c)[1](c[:2] @ w)[0] @ w  # noqa: E731
    assert held(gradient) >= 1


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


def test_a_cast_is_not_in_place():
    """The array of half the bytes is beside what it is made of."""

    def body(c: Any, w: Any) -> Any:
        narrow = (c @ w).astype(jnp.bfloat16)
        return c + (narrow @ narrow).sum().astype(jnp.float32)

    assert loop_bytes(body, "cpu") == ONE + ONE // 2


@pytest.mark.parametrize(("platform", "matrices"), [("cpu", 3), ("tpu", 2)])
def test_a_tpu_makes_at_once_what_frees_memory(platform, matrices):
    """The stacked product is traced last; if it is made before, `one` ends there."""

    def body(c: Any, w: Any) -> Any:
        one = w @ c
        other = one @ c
        return (other @ w).sum() + c, one @ other

    assert loop_bytes(body, platform) // ONE == matrices


def test_a_gpu_has_gradients_of_two_layers():
    """What is summed over devices is there twice: that of the layer before, and the new one."""

    def body(c: Any, w: Any) -> Any:
        gradient = c @ w
        with jax.named_scope("weights"):
            part = jax.lax.psum_scatter(gradient, "x", scatter_dimension=0, tiled=True)
        return c + part.sum(), part

    loop = loop_on_four(body)
    assert widest(loop, "cuda").parts["gradients of weights"] == 2 * ONE
    assert widest(loop, "cpu").bytes < 2 * ONE


def alike(c: Any, w: Any) -> Any:
    """Both sines read the same sum: a TPU makes them together, so the second product is there beside the first sine."""
    first = (jnp.sin((c @ w) * w.sum()) @ w).sum()
    return c + first + (jnp.sin((w @ c) * w.sum()) @ w).sum()


def chained(c: Any, w: Any) -> Any:
    """The second sine needs the first."""
    total = w.sum()
    one = jnp.sin((c @ w) * total)
    return c + (jnp.sin((w @ one) * total) @ w).sum()


def other_dimensions(c: Any, w: Any) -> Any:
    total = w.sum()
    first = (jnp.sin((c @ w) * total) @ w).sum()
    return c + first + (jnp.sin((w @ c).reshape(-1) * total) @ w.reshape(-1)).sum()


@pytest.mark.parametrize(
    ("body", "platform", "matrices"),
    [(alike, "cpu", 2), (alike, "tpu", 3), (chained, "tpu", 2), (other_dimensions, "tpu", 2)],
)
def test_a_tpu_makes_results_of_one_loop_together(body, platform, matrices):
    assert loop_bytes(body, platform) // ONE == matrices


def test_a_tpu_makes_results_of_large_arrays_one_by_one(monkeypatch):
    monkeypatch.setattr(liveness, "_LARGE", ONE)
    assert loop_bytes(alike, "tpu") // ONE == 2


def test_a_tpu_makes_sums_together_before_other_results():
    """Sums of one loop, one of which needs `one`: then `other`, which needs the first sum, is not made with `one`."""

    def body(c: Any, w: Any) -> Any:
        x = c @ w
        one = jnp.sin(x * w)
        first = (x * x).sum(0)
        second = (x * (one @ w)).sum(0)
        other = jnp.cos(x * w) * first[None]
        return c + (other @ w).sum() + second[None]

    assert loop_bytes(body, "tpu") // ONE == 3


@pytest.mark.parametrize(("platform", "matrices"), [("cpu", 4), ("cuda", 3), ("tpu", 3)])
def test_what_a_checkpoint_computes_again_waits_for_its_gradient(platform, matrices):
    """The sine is made once more behind `back`. A CPU has no barriers: there one sine stays beside three products."""

    def body(c: Any, w: Any) -> Any:
        y, pull = jax.vjp(jax.checkpoint(lambda w: jnp.sin(c) @ w), w)
        back = y @ w + w @ y
        return pull(back)[0]

    assert loop_bytes(body, platform) // ONE == matrices


def test_what_passes_a_barrier_stays_apart():
    """`b` ends with the product that reads it, though `a`, which stays, passed the barrier with it."""

    def body(c: Any, w: Any) -> Any:
        a, b = jax.lax.optimization_barrier((c @ w, w @ c))
        return a + b @ w @ w @ w

    assert loop_bytes(body, "tpu") // ONE == 3


@pytest.mark.parametrize(("platform", "matrices"), [("cpu", 3), ("tpu", 2)])
def test_a_cpu_has_no_loop_of_one_iteration(platform, matrices):
    """It makes the product of the loop once, for the later one too, so this stays beside `other` and the next."""

    def body(c: Any, w: Any) -> Any:
        _, (first,) = jax.lax.scan(lambda k, _: (k, (c @ w).sum()), 0.0, None, length=1)
        other = (w @ c) @ w
        return (c @ w) + other + first

    assert loop_bytes(body, platform) // ONE == matrices


@pytest.mark.parametrize(("platform", "matrices"), [("cpu", 5), ("cuda", 5), ("tpu", 4)])
def test_zeros_that_a_loop_writes_over_are_there_before(platform, matrices):
    """Two matrices of zeros are beside three products; a TPU makes them with the loop, which has four matrices."""

    def body(c: Any, w: Any) -> Any:
        first = (c @ w) @ (w @ c)
        found = jax.lax.scan(lambda k, _: (k, k @ w), first, None, length=2)[1]
        return found[0] @ found[1]

    assert loop_bytes(body, platform) // ONE == matrices


@pytest.mark.parametrize(
    ("elementwise", "platform", "matrices"),
    [
        (lambda x: x * jnp.sin(x), "cpu", 4),
        (lambda x: x * jnp.sin(x), "tpu", 3),
        (jnp.sin, "cpu", 4),
        (jnp.sin, "tpu", 3),
        (jnp.negative, "cpu", 3),
    ],
    ids=["of two on a CPU", "of two on a TPU", "costly on a CPU", "costly on a TPU", "cheap on a CPU"],
)
def test_a_cpu_makes_once_what_is_costly_or_made_of_two(elementwise, platform, matrices):
    """`y`, which two operations read, is an array beside `x` and two products."""

    def body(c: Any, w: Any) -> Any:
        x = c @ w
        y = elementwise(x)
        return (w @ c) * y + y + x @ w

    assert loop_bytes(body, platform) // ONE == matrices


@pytest.mark.parametrize(("most", "platform", "matrices"), [(8, "cpu", 2), (N, "cpu", 1), (8, "cuda", 1)])
def test_a_cpu_reads_an_array_to_sum_many_numbers(most, platform, matrices, monkeypatch):
    monkeypatch.setattr(liveness, "_SUMMED_APART", most)

    def body(c: Any, w: Any) -> Any:
        x = c @ w
        return x + jnp.sin(x).sum(0)[None]

    assert loop_bytes(body, platform) // ONE == matrices


@pytest.mark.parametrize(("platform", "matrices"), [("cpu", 4), ("tpu", 3)])
def test_a_cpu_computes_again_all_layers_of_an_iteration_first(platform, matrices):
    """The sines of three layers are beside the first gradient. Otherwise one is, and the gradient of another layer."""

    def body(c: Any, w: Any) -> Any:
        for number in (2.0, 3.0, 4.0):
            layer = jax.checkpoint(lambda x, number=number: jnp.sin(number * w) @ x)
            c = jax.vjp(layer, w)[1](c)[0]
        return c

    assert loop_bytes(body, platform) // ONE == matrices


@pytest.mark.parametrize(("scope", "matrices"), [("dispatch", 3), ("weights", 2)])
def test_a_tpu_makes_gradients_last_where_tokens_are_exchanged(scope, matrices):
    def body(c: Any, w: Any) -> Any:
        one = w @ c
        other = one @ c
        with jax.named_scope(scope):
            tokens = jax.lax.all_gather(c[0, :1], "x")
        return (other @ w).sum() + c + tokens.sum(), one @ other

    assert widest(loop_on_four(body), "tpu").bytes // ONE == matrices
