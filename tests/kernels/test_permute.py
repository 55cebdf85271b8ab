"""Plans and permutations against loops over assignments; gathers in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh

from moezoo.kernels.permute import permute, plan, unpermute
from moezoo.kernels.permute.api import _stable_argsort

TOKENS, EXPERTS, EMBED = 7, 4, 3
# A product or sum of at most 8 terms of order one, each rounded once to float32.
PRECISION = {"rtol": 0, "atol": 8 * 4 * 2.0**-24}


def there_and_back(expert_ids, tokens, rows, gates, by_rows, by_tokens, *, first, count):
    """Everything at once, so that each shape compiles once: the plan, both permutations, and all their gradients."""
    the_plan = plan(expert_ids, first, count)
    permuted, pull = jax.vjp(lambda t: permute(t, the_plan), tokens)
    unpermuted, pull_back = jax.vjp(lambda r, w: unpermute(r, w, the_plan), rows, gates)
    return the_plan, permuted, *pull(by_rows), unpermuted, *pull_back(by_tokens)


compiled = jax.jit(there_and_back, static_argnames="count")


def operands(k, count, seed=0):
    """Random tokens, rows, gates, and what flows back to rows and to tokens."""
    rng, rows = np.random.default_rng(seed), TOKENS * min(k, count)
    shapes = (TOKENS, EMBED), (rows, EMBED), (TOKENS, k), (rows, EMBED), (TOKENS, EMBED)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def loop_plan(expert_ids, first, count):
    """(source of each used row, row of each assignment that has one, rows of each expert)."""
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
    """Distinct experts a token, in any order; the number of experts where a choice or a whole token goes nowhere."""
    allowed = draw(st.sets(st.integers(0, EXPERTS - 1)))  # the others stay empty
    tokens = [draw(st.permutations(range(EXPERTS))) for _ in range(TOKENS)]
    return np.asarray([[e if e in allowed else EXPERTS for e in token[:k]] for token in tokens], np.int32)


@pytest.mark.parametrize(("k", "count"), [(1, EXPERTS), (2, 1), (2, EXPERTS), (3, 2), (EXPERTS, 2), (EXPERTS, EXPERTS)])
def test_equals_loops(k, count):
    @settings(max_examples=20)
    @given(expert_ids=choices(k), first=st.integers(0, EXPERTS - count), seed=st.integers(0, 9))
    def compare(expert_ids, first, seed):
        tokens, rows, gates, by_rows, by_tokens = operands(k, count, seed)
        results = compiled(expert_ids, tokens, rows, gates, by_rows, by_tokens, first=first, count=count)
        got, permuted, token_gradient, unpermuted, row_gradient, gate_gradient = results
        source, row, sizes = loop_plan(expert_ids, first, count)

        assert got.source.shape == (TOKENS * min(k, count),)
        np.testing.assert_array_equal(got.source[: len(source)], [t * k + c for t, c in source])
        np.testing.assert_array_equal(got.group_sizes, sizes)
        for assignment in np.ndindex(expert_ids.shape):
            assert got.row[assignment] == row.get(assignment, len(got.source))

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


def forward_and_back(the_plan, tokens, rows, gates, by_rows, by_tokens):
    """Both permutations and their gradients, without the sort."""
    permuted, pull = jax.vjp(lambda t: permute(t, the_plan), tokens)
    unpermuted, pull_back = jax.vjp(lambda r, w: unpermute(r, w, the_plan), rows, gates)
    return permuted, *pull(by_rows), unpermuted, *pull_back(by_tokens)


def whole_plan():
    """All expert_ids for every token, in random order."""
    expert_ids = np.tile(np.arange(EXPERTS, dtype=np.int32), (TOKENS, 1))
    return plan(jnp.asarray(np.random.default_rng(0).permuted(expert_ids, axis=1)), 0, EXPERTS)


def test_gathers_both_ways():
    """Adding by scatter would be slow on accelerators and, in any order the hardware likes, not deterministic."""
    program = str(jax.make_jaxpr(forward_and_back)(whole_plan(), *operands(EXPERTS, EXPERTS)))
    assert "gather[" in program
    assert "scatter" not in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_in_the_order_of_choices_and_in_float32(dtype):
    """The same bits every time. With gates of one every product is exact, so order and precision are all there is."""
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


stable_argsort = jax.jit(_stable_argsort, static_argnums=1)


@settings(max_examples=30)
@given(keys=st.lists(st.integers(0, 2**26 - 1) | st.integers(0, 2), min_size=64, max_size=64))
def test_both_sorts_are_stable(keys):
    # Of 64 keys below 2**26, the largest and its place do not fit one int32 together.
    for bound in (2**26, 2**25 - 1, 5):
        key = np.asarray(keys, np.int32) % bound
        np.testing.assert_array_equal(stable_argsort(key, bound), np.argsort(key, kind="stable"))


@pytest.mark.parametrize("split", ["expert_ids", "tokens", "gates"])
def test_results_vary_wherever_an_operand_does(split):
    """A result typed as the same on all devices while it is not makes gradients silently wrong."""
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
