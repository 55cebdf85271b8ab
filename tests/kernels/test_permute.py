"""Plans and permutations compared with loops over assignments; both directions are gathers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.kernels.permute import permute, plan, stable_argsort, unpermute
from moezoo.parallel.traces import equations

TOKENS, EXPERTS, EMBED = 7, 4, 3
# A product or sum of at most 8 terms of order one, each rounded once to float32.
PRECISION = {"rtol": 0, "atol": 8 * 4 * 2.0**-24}


def there_and_back(expert_ids, tokens, rows, gates, by_rows, by_tokens, *, first, count):
    """Return the plan, both permutations and all their gradients from one program, so that each shape compiles once."""
    the_plan = plan(expert_ids, first, count)
    return the_plan, *forward_and_back(the_plan, tokens, rows, gates, by_rows, by_tokens)


def forward_and_back(the_plan, tokens, rows, gates, by_rows, by_tokens):
    """Return both permutations and their gradients."""
    permuted, pull = jax.vjp(lambda t: permute(t, the_plan), tokens)
    unpermuted, pull_back = jax.vjp(lambda r, w: unpermute(r, w, the_plan), rows, gates)
    return permuted, *pull(by_rows), unpermuted, *pull_back(by_tokens)


compiled = jax.jit(there_and_back, static_argnames="count")


def operands(k, count, seed=0):
    """Return random tokens, rows, gates, and cotangents of rows and of tokens."""
    rng, rows = np.random.default_rng(seed), TOKENS * min(k, count)
    shapes = (TOKENS, EMBED), (rows, EMBED), (TOKENS, k), (rows, EMBED), (TOKENS, EMBED)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def loop_plan(expert_ids, first, count):
    """Return the source of each used row, the row of each assignment that has one, and the rows per expert."""
    source, row, sizes = [], {}, []
    for expert in range(first, first + count):
        here = [(t, c) for t, c in np.ndindex(expert_ids.shape) if expert_ids[t, c] == expert]
        sizes.append(len(here))
        for assignment in here:
            row[assignment] = len(source)
            source.append(assignment)
    return source, row, sizes


@st.composite
def choices(draw, k):
    """Draw distinct experts per token, in any order; the number of experts for a choice that goes to none."""
    allowed = draw(st.sets(st.integers(0, EXPERTS - 1)))  # the others stay empty
    tokens = [draw(st.permutations(range(EXPERTS))) for _ in range(TOKENS)]
    return np.asarray([[e if e in allowed else EXPERTS for e in token[:k]] for token in tokens], np.int32)


@pytest.mark.parametrize(("k", "count"), [(1, EXPERTS), (2, 1), (3, 2), (EXPERTS, EXPERTS)])
def test_equals_loops(k, count):
    @settings(max_examples=15)
    @given(expert_ids=choices(k), first=st.integers(0, EXPERTS - count), seed=st.integers(0, 9))
    def compare(expert_ids, first, seed):
        tokens, rows, gates, by_rows, by_tokens = operands(k, count, seed)
        results = compiled(expert_ids, tokens, rows, gates, by_rows, by_tokens, first=first, count=count)
        got, permuted, token_gradient, unpermuted, row_gradient, gate_gradient = results
        source, row, sizes = loop_plan(expert_ids, first, count)

        assert got.assignment.shape == (TOKENS * min(k, count),)
        np.testing.assert_array_equal(got.assignment[: len(source)], [t * k + c for t, c in source])
        np.testing.assert_array_equal(got.group_sizes, sizes)
        for assignment in np.ndindex(expert_ids.shape):
            assert got.row[assignment] == row.get(assignment, len(got.assignment))

        wanted = [np.zeros((TOKENS, EMBED)), np.zeros((TOKENS, EMBED)), np.zeros(rows.shape), np.zeros((TOKENS, k))]
        for r, (t, c) in enumerate(source):
            np.testing.assert_array_equal(permuted[r], tokens[t])
            wanted[0][t] += by_rows[r]
            wanted[1][t] += gates[t, c] * rows[r]
            wanted[2][r] = gates[t, c] * by_tokens[t]
            wanted[3][t, c] = by_tokens[t] @ rows[r]
        results = token_gradient, unpermuted, row_gradient, gate_gradient
        for result, want in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result, want, **PRECISION)
            assert not np.asarray(result)[want == 0].any()  # nothing flows to or from what is not here

    compare()


@functools.cache
def whole_plan():
    """Return a plan in which every token goes to all experts, in random order."""
    expert_ids = np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1))
    return jax.jit(lambda ids: plan(ids, 0, EXPERTS))(np.random.default_rng(0).permuted(expert_ids, axis=1))


def test_both_directions_are_gathers():
    """A scatter-add is slow on accelerators, and adds in an order that the hardware chooses."""
    program = jax.make_jaxpr(forward_and_back)(whole_plan(), *operands(EXPERTS, EXPERTS))
    primitives = {equation.primitive.name for equation, *_ in equations(program)}
    assert "gather" in primitives
    assert not any("scatter" in name for name in primitives)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_in_the_order_of_choices_and_in_float32(dtype):
    """With gates of one every product is exact, so the bits depend only on order and precision."""
    the_plan = whole_plan()
    tokens, rows, gates, by_rows, by_tokens = (jnp.asarray(x, dtype) for x in operands(EXPERTS, EXPERTS))
    ones = jnp.ones_like(gates, dtype=jnp.float32)
    total = by_token = np.zeros((TOKENS, EMBED), np.float32)
    for choice in range(EXPERTS):
        total = total + np.asarray(rows, np.float32)[the_plan.row[:, choice]]
        by_token = by_token + np.asarray(by_rows, np.float32)[the_plan.row[:, choice]]
    run = jax.jit(forward_and_back)
    for _ in range(2):
        _, token_gradient, unpermuted, _, _ = run(the_plan, tokens, rows, ones, by_rows, by_tokens)
        np.testing.assert_array_equal(unpermuted, jnp.asarray(total, dtype))
        np.testing.assert_array_equal(token_gradient, jnp.asarray(by_token, dtype))


argsort = jax.jit(stable_argsort, static_argnums=1)


@settings(max_examples=30)
@given(keys=st.lists(st.integers(0, 2**26 - 1) | st.integers(0, 2), min_size=64, max_size=64))
def test_both_sorts_are_stable(keys):
    # For 64 keys below 2**26, the largest key and its index do not fit in one int32.
    for bound in (2**26, 2**25 - 1, 5):
        key = np.asarray(keys, np.int32) % bound
        np.testing.assert_array_equal(argsort(key, bound), np.argsort(key, kind="stable"))


@pytest.mark.parametrize("split", ["expert_ids", "tokens", "gates"])
def test_results_vary_wherever_an_operand_does(split):
    """Otherwise gradients would be silently wrong."""
    mesh = auto_mesh(x=2)
    expert_ids = np.tile(np.arange(2, dtype=np.int32), (2, TOKENS, 1))
    tokens, rows, gates, *_ = (np.tile(x, (2, 1, 1)) for x in operands(2, 2))
    seen = {}

    def local(expert_ids, tokens, rows, gates):
        the_plan = plan(expert_ids[0], 0, 2)
        permuted = permute(tokens[0], the_plan)
        unpermuted = unpermute(rows[0], gates[0], the_plan)
        seen.update(permuted=jax.typeof(permuted).mat.varying, unpermuted=jax.typeof(unpermuted).mat.varying)

    specs = tuple(
        PartitionSpec("x") if name == split else PartitionSpec() for name in ("expert_ids", "tokens", "rows", "gates")
    )
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=None), expert_ids, tokens, rows, gates)
    wanted = {"expert_ids": ("permuted", "unpermuted"), "tokens": ("permuted",), "gates": ("unpermuted",)}[split]
    assert [name for name, axes in seen.items() if axes == {"x"}] == list(wanted)
