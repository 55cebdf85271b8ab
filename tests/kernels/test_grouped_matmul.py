"""What every backend of `grouped_matmul` promises, against a loop over groups in float64."""

import functools
import inspect
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import largest_array

from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import Implementation, api, chosen_backend, gated, grouped_matmul
from moezoo.kernels.grouped_matmul import blocked as blocked_module
from moezoo.parallel.kernels import Target
from moezoo.parallel.traces import equations

GROUPS, INPUTS, OUTPUTS = 4, 5, 3
# (rows, rows a block of the blocked backend): fewer than one block, blocks of one size, blocks of two with a rest.
SHAPES = [(37, (128, 64)), (37, (4,)), (37, (8, 3))]
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # largest relative error of one rounding


@pytest.fixture(params=[*get_args(Implementation), None])
def implementation(request) -> Implementation | None:
    """Every backend there is, and the choice between them."""
    return request.param


def value_and_gradients(implementation, rows, weights, sizes, cotangent):
    """The product, and its gradients by rows and by weights for `cotangent`."""
    product = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
    value, pull = jax.vjp(product, rows, weights)
    return value, *pull(cotangent)


@functools.cache
def compiled(implementation, rows, blocks, dtype):
    """`value_and_gradients`, compiled once for all group sizes."""
    shapes = [
        ((rows, INPUTS), dtype),
        ((GROUPS, INPUTS, OUTPUTS), dtype),
        ((GROUPS,), "int32"),
        ((rows, OUTPUTS), dtype),
    ]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_module, "_BLOCKS", blocks)
        function = jax.jit(functools.partial(value_and_gradients, implementation))
        return function.lower(*arguments).compile()


def operands(rows, dtype="float32", seed=0):
    """Random rows, weights and cotangent."""
    rng = np.random.default_rng(seed)
    shapes = (rows, INPUTS), (GROUPS, INPUTS, OUTPUTS), (rows, OUTPUTS)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def loop(rows, weights, sizes, cotangent):
    """What `value_and_gradients` should return, group by group."""
    rows, weights, cotangent = (np.asarray(x, np.float64) for x in (rows, weights, cotangent))
    value = np.zeros((rows.shape[0], weights.shape[2]))
    by_rows, by_weights = np.zeros_like(rows), np.zeros_like(weights)
    first = 0
    for group, size in enumerate(sizes):
        mine = slice(first, first + size)
        value[mine] = rows[mine] @ weights[group]
        by_rows[mine] = cotangent[mine] @ weights[group].T
        by_weights[group] = rows[mine].T @ cotangent[mine]
        first += size
    return value, by_rows, by_weights


def check(results, rows, weights, sizes, cotangent):
    """Each result is its sum in float32 (a rounding a term) rounded once to its dtype; nothing is looser."""
    wanted = loop(rows, weights, sizes, cotangent)
    magnitudes = loop(jnp.abs(rows), jnp.abs(weights), sizes, jnp.abs(cotangent))
    for result, want, magnitude, terms in zip(results, wanted, magnitudes, (INPUTS, OUTPUTS, max(sizes)), strict=True):
        assert result.dtype == rows.dtype
        bound = terms * ROUNDING["float32"] * magnitude + ROUNDING[str(rows.dtype)] * np.abs(want)
        # The bound itself holds to first order in the rounding error.
        np.testing.assert_array_less(np.abs(np.asarray(result, np.float64) - want), 1.01 * bound + 1e-30)


@st.composite
def group_sizes(draw, rows):
    """Sizes that sum to at most `rows`: cuts anywhere, so empty groups, all in one, and rows left over are common."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=GROUPS, max_size=GROUPS)))
    return tuple(np.diff([0, *cuts]).tolist())


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_equals_a_loop_over_groups(implementation, rows, blocks, dtype):
    run = compiled(implementation, rows, blocks, dtype)

    @settings(max_examples=25)
    @given(sizes=group_sizes(rows), seed=st.integers(0, 9))
    @example(sizes=(0, 0, 0, 0), seed=0)
    @example(sizes=(0, 0, rows, 0), seed=0)  # all rows in one
    @example(sizes=(0, 8, 4, 12), seed=0)  # whole blocks of 4, an empty group first
    @example(sizes=(1, 7, 0, rows - 8), seed=0)  # none aligned, no row left over
    def compare(sizes, seed):
        x, weights, cotangent = operands(rows, dtype, seed)
        check(run(x, weights, jnp.asarray(sizes, jnp.int32), cotangent), x, weights, sizes, cotangent)

    compare()


def test_products_are_accumulated_in_float32(implementation):
    """Said in the program: a CPU does so unasked, other hardware may not."""
    run = functools.partial(value_and_gradients, implementation)
    x, weights, cotangent = operands(8, "bfloat16")
    program = jax.make_jaxpr(run)(x, weights, jnp.zeros(GROUPS, jnp.int32), cotangent)
    products = [e for e, *_ in equations(program) if e.primitive.name in ("dot_general", "ragged_dot_general")]
    assert products
    assert all(product.params["preferred_element_type"] == jnp.float32 for product in products)


@pytest.mark.parametrize("sizes", [(0, 0, 0, 0), (3, 0, 9, 0), (0, 0, 0, 30)])
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_rows_beyond_the_last_group_are_nowhere(implementation, rows, blocks, sizes):
    """Zero, to the bit, in value and gradients, even where they and what flows back to them are NaN."""
    x, weights, cotangent = operands(rows)
    used = sum(sizes)
    x, cotangent = x.at[used:].set(jnp.nan), cotangent.at[used:].set(jnp.nan)
    results = compiled(implementation, rows, blocks, "float32")(x, weights, jnp.asarray(sizes, jnp.int32), cotangent)
    value, by_rows, by_weights = map(np.asarray, results)
    assert not value[used:].any()
    assert not by_rows[used:].any()
    assert not by_weights[np.equal(sizes, 0)].any()
    check(results, x.at[used:].set(0), weights, sizes, cotangent.at[used:].set(0))


@functools.cache
def cover(rows, blocks):
    """How often each row of [start, stop) is in a block, and how many rows blocks have together; compiled."""

    def step(carry, first, mask, block):
        times, computed = carry
        here = jnp.ones((block, 1), bool) if mask is None else mask
        return times.at[first + jnp.arange(block)].add(here[:, 0].astype(jnp.int32)), computed + block

    def run(start, stop):
        nothing = jnp.zeros(rows, jnp.int32), jnp.int32(0)
        return blocked_module._over_rows(start, stop, rows, step, nothing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_module, "_BLOCKS", blocks)
        return jax.jit(run).lower(jnp.int32(0), jnp.int32(0)).compile()


@settings(max_examples=60)
@given(blocks=st.sampled_from([(7, 2), (4, 1), (64, 16), (3,)]), ends=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_blocks_cover_a_group_once_and_little_else(blocks, ends):
    start, stop = sorted(ends)
    times, computed = cover(50, blocks)(jnp.int32(start), jnp.int32(stop))
    np.testing.assert_array_equal(times, [start <= row < stop for row in range(50)])
    assert stop - start <= computed < stop - start + blocks[-1]


def test_blocked_computes_nothing_beyond_the_last_group(monkeypatch):
    """The blocks of rows in its three products (value and both gradients), however many rows there are."""
    computed = []
    plain = blocked_module._dot

    def counted(x, *rest):
        jax.debug.callback(lambda _: computed.append(x.shape[0]), x[0, 0])
        return plain(x, *rest)

    monkeypatch.setattr(blocked_module, "_dot", counted)
    monkeypatch.setattr(blocked_module, "_BLOCKS", (8, 2))
    sizes = jnp.asarray((0, 5, 17, 1), jnp.int32)
    by_row, by_group = [2, 2, 2, 8, 8, 2, 2], [6, 8, 8, 2, 2]
    x, weights, cotangent = operands(400)
    jax.block_until_ready(jax.jit(value_and_gradients, static_argnums=0)("blocked", x, weights, sizes, cotangent))
    jax.effects_barrier()
    assert sorted(computed) == sorted(2 * by_row + by_group)


@pytest.mark.parametrize("over", [("a", "", ""), ("", "a", ""), ("", "", "a"), ("a", "b", ""), ("ab", "b", "a")])
def test_on_a_mesh(implementation, over):
    """Operands (rows, weights, group sizes) that differ along some axes and are the same along others.

    The result varies wherever an operand does: typed as the same on all devices while it is not, it would make
    gradients silently wrong. An operand that is the same on several devices gets the sum of their gradients.
    """
    mesh = auto_mesh(a=2, b=2)
    anywhere = "".join(sorted(set("".join(over))))
    rows, sizes = 12, [[(0, 5, 2, 4), (3, 0, 0, 1)], [(12, 0, 0, 0), (1, 1, 1, 1)]]

    def stacked(axes, seed, shape):
        """A block a device along `axes`."""
        return np.random.default_rng(seed).standard_normal((1 + ("a" in axes), 1 + ("b" in axes), *shape), np.float32)

    def spec(axes):
        return PartitionSpec(*(axis if axis in axes else None for axis in "ab"))

    def local(x, weights, sizes, cotangent):
        results = value_and_gradients(implementation, x[0, 0], weights[0, 0], sizes[0, 0], cotangent[0, 0])
        assert [set(jax.typeof(result).mat.varying) for result in results] == [set(anywhere), *map(set, over[:2])]
        return [result[None, None] for result in results]

    operands = (
        stacked(over[0], 0, (rows, INPUTS)),
        stacked(over[1], 1, (GROUPS, INPUTS, OUTPUTS)),
        np.asarray(sizes, np.int32)[: 1 + ("a" in over[2]), : 1 + ("b" in over[2])],
        stacked(anywhere, 2, (rows, OUTPUTS)),
    )
    in_specs, out_specs = (*map(spec, over), spec(anywhere)), [spec(anywhere), *map(spec, over[:2])]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    results = jax.jit(mapped)(*operands)

    wanted = [np.zeros(result.shape) for result in results]
    for device in np.ndindex(operands[3].shape[:2]):
        blocks = [np.minimum(device, np.subtract(x.shape[:2], 1)) for x in operands]
        for want, part in zip(wanted, loop(*(x[tuple(b)] for x, b in zip(operands, blocks, strict=True))), strict=True):
            want[tuple(np.minimum(device, np.subtract(want.shape[:2], 1)))] += part
    for result, want in zip(results, wanted, strict=True):
        # Sums of at most 4 x 12 products of order one, each term rounded once to float32.
        np.testing.assert_allclose(result, want, rtol=0, atol=48 * ROUNDING["float32"] * np.abs(want).max())


def test_unknown_implementation():
    x, weights, _ = operands(4)
    with pytest.raises(UserError, match=r"^grouped_matmul: no backend 'block'; did you mean 'blocked'\?$"):
        grouped_matmul(x, weights, jnp.zeros(4, jnp.int32), implementation="block")


def test_none_is_settled_by_the_platform_compiled_for():
    """And not by this machine's, which is a CPU here."""
    x, weights, cotangent = operands(8)
    run = jax.jit(functools.partial(value_and_gradients, None))
    arguments = x, weights, jnp.zeros(GROUPS, jnp.int32), cotangent
    for platform in ("cpu", "cuda", "tpu"):
        program = run.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        expected = chosen_backend(Target(platform))
        assert ("ragged_dot" in program) == (expected == "ragged_dot"), platform
        assert ("stablehlo.while" in program) == (expected == "blocked"), platform
    assert chosen_backend(Target("tpu")) == "ragged_dot"


def test_blocked_makes_no_array_of_every_row_for_every_group():
    """The largest array of the compiled program is an operand, a result or the like of one."""
    rows, groups, inputs, outputs = 384, 16, 24, 40
    shapes = [(rows, inputs), (groups, inputs, outputs), (groups,), (rows, outputs)]
    dtypes = ["float32", "float32", "int32", "float32"]
    arguments = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, dtypes, strict=True)]
    largest = {}
    for implementation in ("blocked", "reference"):
        run = jax.jit(functools.partial(value_and_gradients, implementation))
        largest[implementation] = largest_array(run.lower(*arguments).compile().as_text() or "")
    assert largest == {"blocked": max(rows * outputs, groups * inputs * outputs), "reference": groups * rows * outputs}


def test_a_size_for_each_matrix(implementation):
    x, weights, _ = operands(8)
    run = inspect.unwrap(grouped_matmul)
    for sizes in ((1, 2, 3), (1, 2, 3, 1, 1)):
        with pytest.raises(UserError, match=rf"^grouped_matmul: {len(sizes)} group sizes for 4 matrices; give one"):
            run(x, weights, jnp.asarray(sizes, jnp.int32), implementation=implementation)
    sizes = np.asarray((2, 0, 5, 0), np.int8)  # any integers will do, from NumPy too
    want = loop(x, weights, sizes.tolist(), np.zeros((8, OUTPUTS)))[0]
    np.testing.assert_allclose(run(x, weights, sizes, implementation=implementation), want, atol=1e-5)


def plus_one(gate, up):
    """Not zero where both are zero, as activations of some families."""
    return jnp.tanh(gate) * (up + 1) + 0.5


def gated_loop(rows, gate, up, gate_bias, up_bias, sizes):
    """`gated` by its definition, group by group; zero beyond the groups."""
    parts, first = [], 0
    for group, size in enumerate(sizes):
        mine = rows[first : first + size]
        parts.append(plus_one(mine @ gate[group] + gate_bias[group][None], mine @ up[group] + up_bias[group][None]))
        first += size
    return jnp.concatenate([*parts, jnp.zeros((rows.shape[0] - first, gate.shape[2]))])


def gated_operands():
    """Rows, both matrices and both biases; what flows back."""
    rng = np.random.default_rng(5)
    shapes = (12, INPUTS), *((GROUPS, INPUTS, OUTPUTS),) * 2, *((GROUPS, OUTPUTS),) * 2, (12, OUTPUTS)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(("sizes", "biases"), [((3, 0, 5, 2), "both"), ((0, 0, 12, 0), "none")])
def test_gated_equals_a_loop(implementation, sizes, biases):
    """Value and gradients; what lies beyond the groups is zero to the bit, whatever it holds."""
    x, gate, up, gate_bias, up_bias, cotangent = gated_operands()
    x, cotangent = x.at[sum(sizes) :].set(jnp.nan), cotangent.at[sum(sizes) :].set(jnp.nan)
    group_sizes = jnp.asarray(sizes, jnp.int32)

    def run(x, gate, up, *biases):
        named = dict(zip(("gate_bias", "up_bias"), biases, strict=False))
        options = {"activation": plus_one, "implementation": implementation}
        return gated(x, gate, up, group_sizes, **named, **options)

    def want(x, gate, up, one=None, other=None):
        nothing = jnp.zeros((GROUPS, OUTPUTS))
        return gated_loop(x, gate, up, nothing if one is None else one, nothing if other is None else other, sizes)

    arguments = x, gate, up, *((gate_bias, up_bias) if biases == "both" else ())
    value, pull = jax.vjp(run, *arguments)
    assert not np.asarray(value)[sum(sizes) :].any()
    wanted, pull_wanted = jax.vjp(want, jnp.nan_to_num(x), *arguments[1:])
    found = [value, *pull(cotangent)]
    for result, target in zip(found, [wanted, *pull_wanted(jnp.nan_to_num(cotangent))], strict=True):
        # Sums of at most 12 products of order ten.
        np.testing.assert_allclose(result, target, rtol=0, atol=120 * ROUNDING["float32"])


def test_a_backend_with_a_gated_kernel_runs_it(monkeypatch):
    """On mesh axes its operands vary alike, and where it is one of several the lowering chooses."""
    seen = []

    def fused(rows, gate, up, group_sizes, gate_bias, up_bias, *, activation):
        seen.append({frozenset(jax.typeof(x).mat.varying) for x in (rows, gate, up, group_sizes, gate_bias)})
        assert up_bias is None
        return activation(rows @ gate[0] + gate_bias[0][None], rows @ up[0])

    new = api.Backend(blocked_module.multiply, blocked_module.outer, fused, lambda target: target.platform == "cpu")
    monkeypatch.setitem(api._BACKENDS, "fused", new)
    monkeypatch.setitem(api._RUNS_ON, "fused", new.runs_on)
    monkeypatch.setattr(api, "_own_order", lambda target: ("fused", "reference"))
    x, gate, up, bias, *_ = gated_operands()
    sizes = jnp.asarray((12, 0, 0, 0), jnp.int32)
    run = functools.partial(gated, activation=plus_one)
    split, whole = PartitionSpec("a"), PartitionSpec()
    mapped = jax.shard_map(
        lambda x, gate, up, bias: run(x, gate, up, sizes // 2, gate_bias=bias),
        mesh=auto_mesh(a=2),
        in_specs=(split, whole, whole, whole),
        out_specs=split,
    )
    want = gated_loop(x, gate, up, bias, jnp.zeros_like(bias), sizes)
    np.testing.assert_allclose(jax.jit(mapped)(x, gate, up, bias), want, atol=1e-5)
    assert seen == [{frozenset("a")}]
    text = jax.jit(run).trace(x, gate, up, sizes, gate_bias=bias).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.compare" in text  # the reference's mask: a composed product
