"""Attention for TPUs, interpreted on a CPU, compared with a loop over queries in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_loop import Inputs, check, loop, make_row, sees, stack_rows
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from test_hopper_attention import BLOCK, Case, coordinates, operands

from moezoo.kernels.attention import Attended, Operands, by_intervals, join_softmax
from moezoo.kernels.attention.base import Coordinates
from moezoo.kernels.attention.intervals import intervals

# More than one block of queries and of keys, neither of which divides the numbers of tokens.
SMALL = Case(150, 1, 2, 32, 32, (((40, 90), ()), ((70, 131), (3,))))
CASES = {
    "documents": (SMALL, "float32"),
    "window, two key heads": (Case(139, 2, 2, 128, 64, (((30,), ()),), 50), "bfloat16"),
    "latent attention": (Case(270, 1, 1, 192, 128, (((), ()),)), "float32"),
}


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    from moezoo.kernels.attention import splash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash, "BLOCK", BLOCK)
        patch.setattr(splash, "INTERPRET", True)
        yield
    jax.clear_caches()


def operands_in(dtype: str, case: Case) -> tuple[Inputs, Attended]:
    """Return operands and cotangents in this dtype, scales and log-sum-exps in float32."""
    narrow = lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x  # noqa: E731
    return jax.tree.map(narrow, operands(case))


def value_and_gradients(window: int | None, given: Inputs, queries: Any, keys: Any, cotangent: Attended) -> Any:
    """Return both results, and the gradients through both."""

    def run(given: Inputs) -> Attended:
        q, k, v, scale, _ = given
        return by_intervals.attend("splash", Operands(q, k, v, queries, keys, window), scale)

    value, pull = jax.vjp(run, given)
    return value, *pull(cotangent)


def check_case(case: Case, dtype: str) -> None:
    """Compare results and gradients with those of the loop."""
    (given, cotangent), at = operands_in(dtype, case), coordinates(case)
    found = jax.jit(functools.partial(value_and_gradients, case.window))(given, *at, cotangent)
    assert [x.dtype for x in found[0]] == [dtype, "float32"]
    wanted, seen = loop(case.window, given, *at, cotangent), sees(*at, case.window)
    found, wanted = ((value, each[:3]) for value, each in (found, wanted))
    check(found, wanted, dtype)
    for x, others in [(found[0].result, 2), *zip(found[1], (2, 1, 1), strict=True)]:
        assert not np.asarray(x, np.float32)[~seen.any(others)].any()


@pytest.mark.parametrize(
    "name", ["documents", "window, two key heads", pytest.param("latent attention", marks=pytest.mark.interpreted)]
)
def test_equals_a_loop(name):
    """Queries have any order, and some see nothing: their results and gradients are exactly zero."""
    check_case(*CASES[name])


def test_more_keys_than_a_call_takes(monkeypatch):
    """Keys of further calls are numbered from zero again, and the results are joined."""
    from moezoo.kernels.attention import splash

    monkeypatch.setattr(splash, "KEYS", BLOCK)
    jax.clear_caches()
    check_case(SMALL._replace(rows=SMALL.rows[:1]), "float32")


def test_numbers_of_16_bits():
    """A query's number holds any interval within 65,536 keys."""
    from moezoo.kernels.attention import splash

    keys, number = splash.KEYS, np.arange(splash.KEYS)
    first, after = np.asarray([[[0], [keys - 1], [keys // 2], [7]], [[keys], [keys], [keys - 1], [7]]])
    packed = jax.jit(lambda first, after: splash._plan(first, after, keys).number)(first.T, after.T)
    found = jax.jit(splash._sees)(packed[0, :4, None], number[None])
    np.testing.assert_array_equal(found, (first <= number) & (number < after))


def test_parts():
    """Two parts of the keys join to the whole, and the gradients that go through each sum to the whole's."""
    case = SMALL._replace(rows=SMALL.rows[:1], window=60)
    (given, cotangent), (queries, keys) = operands_in("float32", case), coordinates(case)
    cotangent = cotangent._replace(logsumexp=jnp.zeros_like(cotangent.logsumexp))
    parts = slice(None, 61), slice(61, None)

    @jax.jit
    def run(q: Any, k: Any, v: Any, queries: Any, keys: Any, back: Any) -> Any:
        at = [Operands(q, k[:, x], v[:, x], queries, Coordinates(*(y[:, x] for y in keys)), 60) for x in parts]
        whole = join_softmax(*(by_intervals.part("splash", x) for x in at))
        gradients = [by_intervals.part_gradients("splash", x, whole, back) for x in at]
        by_q, *others = zip(*gradients, strict=True)
        logsumexp = jnp.where(whole.highest > -1e29, whole.highest + jnp.log(whole.total), -1e30)
        return (whole.result, logsumexp), (by_q[0] + by_q[1], *(jnp.concatenate(x, 1) for x in others))

    q = given.q * given.scale
    found = run(q, given.k, given.v, queries, keys, cotangent.result)
    value, gradients = loop(case.window, given._replace(q=q, scale=1.0), queries, keys, cotangent)
    check(found, (value, gradients[:3]))


@pytest.mark.parametrize(("window", "blocks"), [(None, (0, 1, 2, 3)), (200, (0, 3)), (200, (3, 1))], ids=str)
def test_only_visible_pairs_of_blocks_are_visited(window, blocks):
    """Queries are in order, or some blocks of tokens, as on one of several devices."""
    from moezoo.kernels.attention import splash

    keys = stack_rows(*(make_row(*row, 4 * BLOCK) for row in (([], []), ([200, 300], []), ([100, 257], [1]))))
    queries = Coordinates(*(x.reshape(3, 4, BLOCK)[:, list(blocks)].reshape(3, -1) for x in keys))
    plan = jax.jit(lambda at, keys: splash._plan(*intervals(at, keys, window), 4 * BLOCK))(queries, keys)
    visible: Any = sees(queries, keys, window).reshape(3, len(blocks), BLOCK, 4, BLOCK).any((2, 4))
    np.testing.assert_array_equal(plan.visited, visible)
    # Pairs that are visited have their own blocks, and others one that is visited before or after.
    mine, theirs = (np.broadcast_to(x, visible.shape) for x in (np.arange(4), np.arange(len(blocks))[:, None]))
    for at, own, dim in ((plan.key, mine, 2), (plan.query, theirs, 1)):
        np.testing.assert_array_equal(np.asarray(at)[visible], own[visible])
        assert (np.diff(np.asarray(at, np.int32), axis=dim) >= 0).all()


def test_on_two_devices():
    """Queries differ by device, keys do not; their gradient is summed over devices."""
    case = SMALL
    (given, cotangent), (queries, keys) = operands_in("float32", case), coordinates(case)

    def local(q: Any, queries: Any, cotangent: Any, k: Any, v: Any, keys: Any) -> Any:
        k, v, keys = (jax.tree.map(lambda x: jax.lax.pcast(x, "a", to="varying"), x) for x in (k, v, keys))
        value, gradients = value_and_gradients(None, Inputs(q, k, v, 0.125), queries, keys, cotangent)
        assert all(jax.typeof(x).mat.varying == {"a"} for x in (*value, *gradients[:3]))
        return value, gradients[:3]

    split, whole = PartitionSpec("a"), PartitionSpec()
    k, v, keys = jax.tree.map(lambda x: x[:1], (given.k, given.v, keys))
    specs = {"in_specs": (split, split, split, whole, whole, whole), "out_specs": split}
    mapped = jax.shard_map(local, mesh=auto_mesh(a=2), **specs)
    found = jax.jit(mapped)(given.q, queries, cotangent, k, v, keys)
    k, v, keys = jax.tree.map(lambda x: jnp.concatenate([x, x]), (k, v, keys))
    value, gradients = loop(None, Inputs(given.q, k, v, 0.125), queries, keys, cotangent)
    check(found, (value, gradients[:3]))
