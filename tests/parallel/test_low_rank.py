"""Products with a low-rank pair, against loops in float64 over the definition: W + scale A B, for every expert."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.kernels.grouped_matmul import gated, grouped_matmul, routed_mlp
from moezoo.kernels.permute import plan
from moezoo.nn.block_fp8 import BlockFP8
from moezoo.nn.linear import contract, project
from moezoo.parallel.low_rank import LowRank, only_pairs, with_bases, without_pairs
from moezoo.parallel.roles import Axes, Role
from moezoo.parallel.stacks import InStack
from moezoo.parallel.stored import materialise

SCALE = 0.75
# float32 rounds by 6e-8. These results are sums of at most 60 products and of two parts: 1e-6 of the largest value.
TOLERANCE = 2e-6


def low_rank(seed: int, stacked: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> LowRank:
    """Return a weight with random numbers and a pair of rank 3."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)  # noqa: E731
    return LowRank(
        base=draw(*stacked, *inputs, *outputs),
        a=draw(*stacked, *inputs, 3),
        b=draw(*stacked, 3, *outputs),
        scale=SCALE,
        inputs=len(inputs),
        dtype=np.dtype(np.float32),
    )


def merged(w: LowRank) -> np.ndarray:
    """Return the array that it stands for, in float64."""
    base, a, b = (np.asarray(x, np.float64) for x in (materialise(w.base, jnp.float32), w.a, w.b))
    first = a.ndim - 1 - w.inputs
    found = np.empty(base.shape)
    for at in np.ndindex(base.shape[:first]):
        found[at] = base[at] + SCALE * np.tensordot(a[at], b[at], 1)
    return found


def close(found: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())


@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (5,)), ((6,), (4, 5)), ((4, 5), (6,))], ids=str)
def test_products_of_one_matrix(inputs, outputs):
    w = low_rank(0, (), inputs, outputs)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, *inputs)), jnp.float32)
    close(project(x, w, len(inputs)), np.tensordot(np.asarray(x, np.float64), merged(w), len(inputs)))
    assert w.shape == (*inputs, *outputs)
    close(w.materialise(jnp.float32), merged(w))


def test_a_pair_in_the_stack_of_all_layers_is_made_into_an_array():
    """As where random routing reads the numbers of a router in generation."""
    w = low_rank(0, (4,), (6,), (5,))
    parts = {
        name: InStack(stack=getattr(w, name), layer=jnp.int32(2), dtype=np.dtype(np.float32)) for name in ("a", "b")
    }
    close(dataclasses.replace(w, base=w.base[2], **parts).materialise(jnp.float32), merged(w)[2])


def test_a_product_that_only_einsum_expresses():
    w = low_rank(0, (), (6,), (4, 5))
    x = np.random.default_rng(1).standard_normal((2, 3, 4, 5)).astype(np.float32)
    found = contract("bshn,lhn->bshl", jnp.asarray(x), w)
    close(found, np.einsum("bshn,lhn->bshl", x.astype(np.float64), merged(w)))


def test_a_fresh_pair_changes_no_bit():
    """B is zero, so products are those of the base; also in bfloat16."""
    for dtype in (jnp.float32, jnp.bfloat16):
        w = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), low_rank(0, (), (6,), (5,)))
        w = dataclasses.replace(w, b=jnp.zeros_like(w.b))
        x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6)), dtype)
        np.testing.assert_array_equal(project(x, w), project(x, w.base))
        np.testing.assert_array_equal(w.materialise(dtype), w.base)


def swish_gated(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


TOKENS, K, E, D, F = 11, 2, 4, 6, 5
WEIGHTS = [low_rank(i, (E,), *shape) for i, shape in enumerate([((D,), (F,)), ((D,), (F,)), ((F,), (D,))])]


def naive(pairs: Any, tokens: Any, gates: Any, ids: np.ndarray) -> Any:
    """Run a loop over tokens and choices, with merged matrices; jax differentiates it in float64."""
    gate, up, down = (
        jnp.asarray(w.base, jnp.float64) + SCALE * jnp.einsum("eir,ero->eio", a, b)
        for w, (a, b) in zip(WEIGHTS, pairs, strict=True)
    )
    sums = []
    for t in range(TOKENS):
        parts = [
            gates[t, k] * (swish_gated(tokens[t] @ gate[e], tokens[t] @ up[e]) @ down[e]) for k, e in enumerate(ids[t])
        ]
        sums.append(sum(parts))
    return jnp.stack(sums)


@pytest.mark.parametrize("backend", [None, "ragged_dot"])
def test_experts_and_their_gradients(backend):
    """Values and gradients by tokens, gates and both matrices of every expert; nothing is computed for the base."""
    rng = np.random.default_rng(5)
    # Expert 2 has no token.
    ids = np.stack([rng.choice([0, 1, 3], K, replace=False) for _ in range(TOKENS)])
    tokens, gates = (rng.standard_normal(shape) for shape in ((TOKENS, D), (TOKENS, K)))
    weigh = rng.standard_normal((TOKENS, D))
    pairs = [(w.a, w.b) for w in WEIGHTS]
    here = plan(jnp.asarray(ids, jnp.int32), 0, E)

    def loss(pairs: Any, tokens: Any, gates: Any) -> Any:
        weights = [dataclasses.replace(w, a=a, b=b) for w, (a, b) in zip(WEIGHTS, pairs, strict=True)]
        y = routed_mlp(tokens, gates, here, *weights, activation=swish_gated, implementation=backend)
        return (y * jnp.asarray(weigh, jnp.float32)).sum()

    single = [jnp.asarray(x, jnp.float32) for x in (tokens, gates)]
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(pairs, *single)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (pairs, tokens, gates))
        exact = lambda *operands: (naive(*operands, ids) * jnp.asarray(weigh)).sum()  # noqa: E731  # pyright: ignore[reportCallIssue]
        wanted = jax.device_get(jax.jit(jax.value_and_grad(exact, (0, 1, 2)))(*wide))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(ours, theirs)
    for a, b in found[1][0]:
        assert not a[2].any()
        assert not b[2].any()
        assert abs(a[0]).max() > 1e-3
        assert abs(b[0]).max() > 1e-3


def test_rows_beyond_the_groups_are_zero():
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((7, D)), jnp.float32).at[5:].set(jnp.nan)
    sizes = jnp.asarray([2, 0, 3, 0], jnp.int32)
    y = grouped_matmul(rows, WEIGHTS[0], sizes)
    close(y[:2], np.asarray(rows[:2], np.float64) @ merged(WEIGHTS[0])[0])
    close(y[2:5], np.asarray(rows[2:5], np.float64) @ merged(WEIGHTS[0])[2])
    assert not y[5:].any()
    assert not gated(rows, WEIGHTS[0], WEIGHTS[1], sizes, activation=swish_gated)[5:].any()


def test_over_zeros_a_pair_is_the_matrix_of_its_rank():
    """Every expert's: products with the pair are those with the array that it stands for."""
    w = dataclasses.replace(WEIGHTS[0], base=jnp.zeros_like(WEIGHTS[0].base))
    whole = w.materialise(jnp.float32)
    assert np.linalg.matrix_rank(whole).tolist() == [3] * E
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((7, D)), jnp.float32)
    sizes = jnp.asarray([2, 0, 3, 2], jnp.int32)
    close(grouped_matmul(rows, w, sizes), np.asarray(grouped_matmul(rows, whole, sizes)))


def test_beside_few_bits():
    """The base may be a container that kernels read matrix by matrix; no stack of it is made."""
    axes = Axes(Role.WEIGHT, ("expert",), ("inputs",), ("outputs",))
    w = low_rank(0, (E,), (32,), (16,))
    few = dataclasses.replace(w, base=BlockFP8.rounded(jnp.asarray(w.base), axes, size=(16, 16)))
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((7, 32)), jnp.float32)
    sizes = jnp.asarray([2, 0, 3, 2], jnp.int32)
    product = jax.jit(lambda rows, few: grouped_matmul(rows, few, sizes))
    groups = np.repeat(np.arange(E), np.asarray(sizes))
    close(product(rows, few), np.einsum("ni,nio->no", np.asarray(rows, np.float64), merged(few)[groups]))
    made = [v.aval.shape for e in product.trace(rows, few).jaxpr.eqns for v in e.outvars]
    assert (E, 32, 16) not in made


def test_parts_of_a_model():
    w = low_rank(0, (), (6,), (5,))
    tree = {"a": w, "b": jnp.ones(2)}
    bare = without_pairs(tree)
    assert bare["a"] is w.base
    pairs = only_pairs(tree)
    assert pairs["b"] is None
    assert pairs["a"].base is None
    again = with_bases(pairs, bare)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(tree)))
