"""What every backend of `grouped_matmul` promises, compared with a loop over groups in float64."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import executed_products, largest_array

from moezoo.errors import UserError
from moezoo.kernels.grouped_matmul import BACKENDS, api, blocked, chosen_backend, gated, grouped_matmul
from moezoo.parallel.kernels import KernelOrder, Target
from moezoo.parallel.traces import equations

GROUPS, INPUTS, OUTPUTS, ROWS = 4, 5, 3, 37
# The sizes of blocks matter only to `blocked`: less than one block, blocks of one size, blocks of two sizes and a rest.
CASES = [
    ("blocked", (128, 64), "float32"),
    ("blocked", (4,), "bfloat16"),
    ("blocked", (8, 3), "float32"),
    ("blocked", (8, 3), "bfloat16"),
    *((name, (64,), dtype) for name in ("reference", "ragged_dot") for dtype in ("float32", "bfloat16")),
]
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # largest relative error of one rounding


@pytest.fixture(params=[name for name, one in BACKENDS.items() if one.takes(Target("cpu"), "float32")])
def implementation(request) -> str:
    """Every backend that runs on a CPU."""
    return request.param


def value_and_gradients(implementation, rows, weights, sizes, cotangent):
    """Return the product, and its gradients by rows and by weights for `cotangent`."""
    product = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
    value, pull = jax.vjp(product, rows, weights)
    return value, *pull(cotangent)


@functools.cache
def compiled(implementation, blocks, dtype):
    """Compile `value_and_gradients` once for all group sizes."""
    x, weights, cotangent = operands(ROWS, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCKS", blocks)
        function = jax.jit(functools.partial(value_and_gradients, implementation))
        return function.lower(x, weights, jnp.zeros(GROUPS, jnp.int32), cotangent).compile()


def operands(rows, dtype="float32", seed=0, inputs=INPUTS, outputs=OUTPUTS):
    """Return random rows, weights and cotangent."""
    rng = np.random.default_rng(seed)
    shapes = (rows, inputs), (GROUPS, inputs, outputs), (rows, outputs)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def slices(sizes):
    """Return the rows of each group."""
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def loop(rows, weights, sizes, cotangent):
    """Return what `value_and_gradients` should, group by group."""
    rows, weights, cotangent = (np.asarray(x, np.float64) for x in (rows, weights, cotangent))
    value = np.zeros((rows.shape[0], weights.shape[2]))
    by_rows, by_weights = np.zeros_like(rows), np.zeros_like(weights)
    for group, mine in enumerate(slices(sizes)):
        value[mine] = rows[mine] @ weights[group]
        by_rows[mine] = cotangent[mine] @ weights[group].T
        by_weights[group] = rows[mine].T @ cotangent[mine]
    return value, by_rows, by_weights


def check(results, rows, weights, sizes, cotangent):
    """Compare within the bound of a float32 sum (one rounding per term) that is rounded once to its dtype."""
    dtype = str(rows.dtype)
    rows, weights, cotangent = (np.asarray(x, np.float64) for x in (rows, weights, cotangent))
    wanted = loop(rows, weights, sizes, cotangent)
    magnitudes = loop(abs(rows), abs(weights), sizes, abs(cotangent))
    terms_of = (*weights.shape[1:], max(sizes))
    for result, want, magnitude, terms in zip(results, wanted, magnitudes, terms_of, strict=True):
        assert result.dtype == dtype
        bound = terms * ROUNDING["float32"] * magnitude + ROUNDING[dtype] * np.abs(want)
        # The bound itself holds to first order in the rounding error.
        np.testing.assert_array_less(np.abs(np.asarray(result, np.float64) - want), 1.01 * bound + 1e-30)


@st.composite
def group_sizes(draw, rows):
    """Draw sizes that sum to at most `rows`, by cuts anywhere: empty groups and rows left over are common."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=GROUPS, max_size=GROUPS)))
    return tuple(np.diff([0, *cuts]).tolist())


def with_nan(sizes, *arrays):
    """Return arrays of rows with NaN beyond the last group."""
    beyond = np.arange(arrays[0].shape[0])[:, None] >= sum(sizes)
    return [jnp.where(beyond, jnp.nan, x) for x in arrays]


def compare_with_loop(run, examples, *, most=20, rows=ROWS, dtype="bfloat16", **widths):
    """Compare products of no row, of `examples` and of up to `most` random sizes with the loop.

    Rows beyond the last group hold NaN, in operands and cotangents; results and gradients there are exactly zero.
    """

    def compare(sizes, seed):
        x, weights, cotangent = operands(rows, dtype, seed, **widths)
        given_x, given_cotangent = with_nan(sizes, x, cotangent)
        results = run(given_x, weights, jnp.asarray(sizes, jnp.int32), given_cotangent)
        check(results, x, weights, sizes, cotangent)
        value, by_rows, by_weights = (np.asarray(result, np.float32) for result in results)
        assert not value[sum(sizes) :].any()
        assert not by_rows[sum(sizes) :].any()
        assert not by_weights[np.equal(sizes, 0)].any()

    for sizes in ((0, 0, 0, 0), *examples):
        compare = example(sizes=sizes, seed=0)(compare)
    settings(max_examples=most)(given(sizes=group_sizes(rows), seed=st.integers(0, 9))(compare))()


@pytest.mark.parametrize(("implementation", "blocks", "dtype"), CASES)
def test_equals_a_loop_over_groups(implementation, blocks, dtype):
    examples = [
        (0, 0, ROWS, 0),  # all rows in one
        (0, 8, 4, 12),  # whole blocks of 4, an empty group first
        (1, 7, 0, ROWS - 8),  # none aligned, no row left over
    ]
    compare_with_loop(compiled(implementation, blocks, dtype), examples, dtype=dtype)


def test_products_are_accumulated_in_float32(implementation):
    """The program asks for it: a CPU accumulates so in any case, other hardware may not."""
    run = functools.partial(value_and_gradients, implementation)
    x, weights, cotangent = operands(8, "bfloat16")
    program = jax.make_jaxpr(run)(x, weights, jnp.zeros(GROUPS, jnp.int32), cotangent)
    products = [e for e, *_ in equations(program) if e.primitive.name in ("dot_general", "ragged_dot_general")]
    assert products
    assert all(product.params["preferred_element_type"] == jnp.float32 for product in products)


def test_blocked_computes_nothing_beyond_the_last_group(monkeypatch):
    """Its three products, the value and both gradients, take only the blocks of rows that groups need."""
    monkeypatch.setattr(blocked, "BLOCKS", (8, 2))
    sizes = jnp.asarray((0, 5, 17, 1), jnp.int32)
    by_row, by_group = [2, 2, 2, 8, 8, 2, 2], [6, 8, 8, 2, 2]
    x, weights, cotangent = operands(40)
    products = executed_products(functools.partial(value_and_gradients, "blocked"), x, weights, sizes, cotangent)
    assert sorted(shape[0] for shape in products) == sorted(2 * by_row + by_group)


@pytest.mark.parametrize("over", [("a", "b", ""), ("", "", "a"), ("ab", "b", "a")])
def test_on_a_mesh(implementation, over):
    """Each of rows, weights and group sizes differs along the axes in `over`, and only there.

    The result varies wherever an operand does; otherwise gradients would be silently wrong. The gradient of an operand
    that is the same on several devices is the sum of theirs.
    """
    mesh = auto_mesh(a=2, b=2)
    anywhere = "".join(sorted(set("".join(over))))
    rows, sizes = 12, [[(0, 5, 2, 4), (3, 0, 0, 1)], [(12, 0, 0, 0), (1, 1, 1, 1)]]

    def stacked(axes, seed, shape):
        """Return one block per device along `axes`."""
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


def test_the_default_follows_the_platform_compiled_for():
    """It does not depend on this machine, which runs it on a CPU."""
    x, weights, cotangent = operands(8)
    run = jax.jit(functools.partial(value_and_gradients, None))
    sizes = (1, 0, 4, 2)
    arguments = x, weights, jnp.asarray(sizes, jnp.int32), cotangent
    for platform in ("cpu", "cuda", "tpu"):
        program = run.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        expected = chosen_backend(Target(platform))
        assert ("ragged_dot" in program) == (expected == "ragged_dot"), platform
        assert ("stablehlo.while" in program) == (expected == "blocked"), platform
    assert chosen_backend(Target("tpu")) == "ragged_dot"
    check(run(*arguments), x, weights, sizes, cotangent)


def test_the_choice_on_gpus():
    """Kernels of a chip are taken by capability and dtype. Elsewhere they are refused before anything is traced."""
    hopper = Target("cuda", "9.0")
    for target, own in ((hopper, "hopper"), (Target("cuda", "10.0"), "blackwell")):
        assert [chosen_backend(target, (), dtype) for dtype in ("bfloat16", "float32")] == [own, "blocked"]
    for capability in ("8.0", "10.3", None):
        assert chosen_backend(Target("cuda", capability)) == "blocked"
    assert chosen_backend(hopper, ("hopper", "reference"), "float32") == "reference"
    assert chosen_backend(hopper, ("hopper_persistent",)) == "hopper_persistent"
    x, weights, _ = operands(4)
    refused = itertools.product(
        ("hopper", "hopper_persistent"), ((hopper, "cuda 9.0 with float32"), (Target("cpu"), "cpu with float32"))
    )
    for name, (target, where) in refused:
        order = KernelOrder((name,), target)
        wanted = f"^grouped_matmul={name}: does not run on {where}; choose reference or blocked or ragged_dot$"
        with pytest.raises(UserError, match=wanted):
            grouped_matmul(x, weights, jnp.zeros(4, jnp.int32), implementation=order)


def test_blocked_makes_no_array_of_every_row_for_every_group():
    """The largest array of the compiled program has the size of an operand or a result."""
    rows, groups, inputs, outputs = 384, 16, 24, 40
    shapes = [(rows, inputs), (groups, inputs, outputs), (groups,), (rows, outputs)]
    dtypes = ["float32", "float32", "int32", "float32"]
    arguments = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, dtypes, strict=True)]
    largest = {}
    for implementation in ("blocked", "reference"):
        run = jax.jit(functools.partial(value_and_gradients, implementation))
        largest[implementation] = largest_array(run.lower(*arguments).compile().as_text() or "")
    assert largest == {"blocked": max(rows * outputs, groups * inputs * outputs), "reference": groups * rows * outputs}


def test_a_size_for_each_matrix():
    x, weights, _ = operands(8)
    run = inspect.unwrap(grouped_matmul)  # past the suite's type checker, which refuses first
    for sizes in ((1, 2, 3), (1, 2, 3, 1, 1)):
        with pytest.raises(UserError, match=rf"^grouped_matmul: {len(sizes)} group sizes for 4 matrices; give one"):
            run(x, weights, jnp.asarray(sizes, jnp.int32))
    sizes = np.asarray((2, 0, 5, 0), np.int8)  # any integers, from NumPy too
    want = loop(x, weights, sizes.tolist(), np.zeros((8, OUTPUTS)))[0]
    np.testing.assert_allclose(run(x, weights, sizes, implementation="reference"), want, atol=1e-5)


def shifted_tanh(gate, up):
    """An activation that is not zero where both operands are, as in some families."""
    return jnp.tanh(gate) * (up + 1) + 0.5


def gated_operands():
    """Return rows, both matrices, both biases, and a cotangent."""
    rng = np.random.default_rng(5)
    shapes = (12, INPUTS), *((GROUPS, INPUTS, OUTPUTS),) * 2, *((GROUPS, OUTPUTS),) * 2, (12, OUTPUTS)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def gated_loop(sizes, cotangent, *operands):
    """Return `gated` with `shifted_tanh`, and its gradients by rows, matrices and biases, group by group."""
    cotangent, rows, gate, up, gate_bias, up_bias = (np.asarray(x, np.float64) for x in (cotangent, *operands))
    shapes = [x.shape for x in (cotangent, rows, gate, up, gate_bias, up_bias)]
    value, by_rows, by_gate, by_up, by_gate_bias, by_up_bias = map(np.zeros, shapes)
    for group, mine in enumerate(slices(sizes)):
        x = rows[mine]
        tanh, shifted = np.tanh(x @ gate[group] + gate_bias[group]), x @ up[group] + up_bias[group] + 1
        value[mine] = tanh * shifted + 0.5
        at_gate, at_up = cotangent[mine] * (1 - tanh**2) * shifted, cotangent[mine] * tanh
        by_rows[mine] = at_gate @ gate[group].T + at_up @ up[group].T
        by_gate[group], by_up[group] = x.T @ at_gate, x.T @ at_up
        by_gate_bias[group], by_up_bias[group] = at_gate.sum(0), at_up.sum(0)
    return value, by_rows, by_gate, by_up, by_gate_bias, by_up_bias


def test_gated_equals_a_loop(implementation):
    """Rows beyond the groups hold NaN, in operands and cotangents; results and gradients there are exactly zero."""

    @jax.jit
    def run(sizes, cotangent, *operands):
        def product(x, gate, up, gate_bias, up_bias):
            options = {"activation": shifted_tanh, "implementation": implementation}
            return gated(x, gate, up, sizes, gate_bias=gate_bias, up_bias=up_bias, **options)

        value, pull = jax.vjp(product, *operands)
        return value, *pull(cotangent)

    x, *parameters, cotangent = gated_operands()
    for sizes in ((3, 0, 5, 2), (0, 0, 12, 0)):
        beyond = np.arange(x.shape[0])[:, None] >= sum(sizes)
        given_x, given_cotangent = (jnp.where(beyond, jnp.nan, y) for y in (x, cotangent))
        results = run(jnp.asarray(sizes, jnp.int32), given_cotangent, given_x, *parameters)
        for result, want in zip(results, gated_loop(sizes, cotangent, x, *parameters), strict=True):
            # Sums of at most 12 products of order ten.
            np.testing.assert_allclose(result, want, rtol=0, atol=120 * ROUNDING["float32"])
        for result in results[:2]:
            assert not np.asarray(result)[beyond[:, 0]].any()


def test_gated_without_biases():
    """`gated` omits them before it calls a backend, so one backend is enough."""
    options = {"activation": shifted_tanh, "implementation": "reference"}
    x, gate, up, *biases, cotangent = gated_operands()
    sizes = (3, 0, 7, 2)
    run = functools.partial(gated, group_sizes=jnp.asarray(sizes, jnp.int32), **options)
    value, pull = jax.vjp(run, x, gate, up)
    wanted = gated_loop(sizes, cotangent, x, gate, up, *map(jnp.zeros_like, biases))[:4]
    for result, want in zip((value, *pull(cotangent)), wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=120 * ROUNDING["float32"])


def test_a_backend_with_a_gated_kernel_runs_it(monkeypatch):
    """Its operands vary alike on a mesh. If it is one of several backends, the lowering chooses."""
    seen = []

    def fused(rows, gate, up, group_sizes, gate_bias, up_bias, *, activation, keep):
        assert keep == "products"
        seen.append({frozenset(jax.typeof(x).mat.varying) for x in (rows, gate, up, group_sizes, gate_bias)})
        assert up_bias is None
        return activation(rows @ gate[0] + gate_bias[0][None], rows @ up[0])

    new = api.Backend(blocked.multiply, blocked.outer, fused, lambda target: target.platform == "cpu")
    monkeypatch.setitem(api.BACKENDS, "fused", new)
    x, gate, up, bias, _, cotangent = gated_operands()
    sizes = jnp.asarray((12, 0, 0, 0), jnp.int32)
    run = functools.partial(gated, activation=shifted_tanh, implementation=KernelOrder(("fused", "reference")))
    split, whole = PartitionSpec("a"), PartitionSpec()
    mapped = jax.shard_map(
        lambda x, gate, up, bias: run(x, gate, up, sizes // 2, gate_bias=bias),
        mesh=auto_mesh(a=2),
        in_specs=(split, whole, whole, whole),
        out_specs=split,
    )
    want = gated_loop(sizes.tolist(), cotangent, x, gate, up, bias, jnp.zeros_like(bias))[0]
    np.testing.assert_allclose(jax.jit(mapped)(x, gate, up, bias), want, atol=1e-5)
    assert seen == [{frozenset("a")}]
    text = jax.jit(run).trace(x, gate, up, sizes, gate_bias=bias).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.compare" in text  # the reference's mask: a composed product
