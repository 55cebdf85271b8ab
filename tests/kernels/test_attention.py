"""What every backend of `attend` promises, compared with a loop over queries in float64."""

import contextlib
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_loop import (
    BATCH,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    VALUE_DIM,
    Case,
    Inputs,
    check,
    draw_coordinates,
    loop,
    make_row,
    packed,
    random_operands,
    sees,
    stack_rows,
    with_sinks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import largest_array
from refusals import refused

import moezoo
from moezoo.errors import UserError
from moezoo.kernels.attention import (
    BACKENDS,
    FLOOR,
    REFUSED,
    Attended,
    Operands,
    Softmax,
    attend,
    attend_part,
    chosen_backend,
    chunked,
    join,
    join_softmax,
    part_gradients,
    reasons,
    reference,
)
from moezoo.kernels.attention.base import NOTHING, Coordinates
from moezoo.kernels.attention.intervals import intervals
from moezoo.parallel.collectives import ATTENTION, vary_like
from moezoo.parallel.context_parallel import Stretches
from moezoo.parallel.kernels import PLATFORMS, KernelOrder, Target
from moezoo.parallel.traces import equations

# Kernels for GPUs and TPUs are interpreted in test_hopper_attention.py and test_splash_attention.py.
PORTABLE = [name for name in BACKENDS if name not in ("hopper", "splash")]
# Several blocks, of which the last is partly filled; one block; one query; fewer queries than keys; bfloat16. The last
# case has stretches.
CASES = [Case(10, 10, 4), Case(10, 10, 64, 1), Case(1, 9, 4), Case(6, 9, 4, 3), Case(10, 10, 4, 3, "bfloat16")]
CASES.append(Case(6, 9, 4, Stretches(3)))


@pytest.fixture(params=PORTABLE)
def implementation(request) -> str:
    """Every backend."""
    return request.param


def value_and_gradients(implementation, window, operands, queries, keys, cotangent):
    """Return both results, and the gradients through both by all operands."""

    def run(operands):
        q, k, v, scale, sinks = operands
        return attend(Operands(q, k, v, queries, keys, window), scale, sinks=sinks, implementation=implementation)

    value, pull = jax.vjp(run, operands)
    return value, *pull(cotangent)


@contextlib.contextmanager
def blocks_of(tokens):
    """Set the size of blocks and chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BLOCKS", (tokens, tokens))
        patch.setattr(reference, "QUERY_CHUNK", tokens)
        yield


@functools.cache
def compiled(implementation, case, batch=BATCH):
    """Compile `value_and_gradients` once for all coordinates."""
    operands, cotangent = random_operands(case, batch=batch)
    queries, keys = (Coordinates(*jnp.zeros((2, batch, n), jnp.int32)) for n in case[:2])
    with blocks_of(case.block):
        function = jax.jit(functools.partial(value_and_gradients, implementation, case.window))
        return function.lower(operands, queries, keys, cotangent).compile()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_loop(case):
    """With every backend: results and gradients; exact zeros for queries and keys that see nothing or are not seen."""

    @settings(max_examples=20)
    @given(at=draw_coordinates(case.queries, case.keys), seed=st.integers(0, 9))
    def compare(at: Any, seed: int):
        operands, cotangent = random_operands(case, seed)
        queries, keys = at
        wanted, seen = loop(case.window, operands, queries, keys, cotangent), sees(queries, keys, case.window)
        for implementation in PORTABLE:
            value, gradients = compiled(implementation, case)(operands, queries, keys, cotangent)
            assert [x.dtype for x in value] == [case.dtype, "float32"], implementation
            assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, operands)
            check((value, gradients), wanted, case.dtype)
            for x in (value.result, gradients.q):
                assert not np.asarray(x, np.float32)[~seen.any(2)].any(), implementation
            for x in (gradients.k, gradients.v):
                assert not np.asarray(x, np.float32)[~seen.any(1)].any(), implementation

    compare()


def test_documents_with_real_blocks(implementation):
    """Several blocks of the size that users get: a document begins in each of them, one after the first chunk.

    `chunked` has five blocks of 107, and padding behind the last one. The first query of a block sees one key of the
    block before the previous one. Padding fills the end of the second row, and documents are longer than their window.
    """
    tokens, window = 533, 109
    assert tokens > reference.QUERY_CHUNK >= 2 * max(chunked.BLOCKS)
    at = stack_rows(make_row([40, 130, 300, 515], [], tokens), make_row([20, 220, 440], [4], tokens))
    operands, cotangent = random_operands(Case(tokens, tokens, 0))
    run = jax.jit(functools.partial(value_and_gradients, implementation, window))
    check(run(operands, at, at, cotangent), loop(window, operands, at, at, cotangent))


def test_gradients_of_the_loop_are_its_differences():
    case = Case(7, 7, 64, 3)
    (operands, cotangent), at = random_operands(case), packed(case)
    operands = with_sinks(operands)
    gradients = loop(case.window, operands, *at, cotangent)[1]
    rng = np.random.default_rng(1)
    for name, gradient in gradients._asdict().items():
        direction = rng.standard_normal(gradient.shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = np.asarray(getattr(operands, name), np.float64) + step * direction
            value, _ = loop(case.window, operands._replace(**{name: moved}), *at, cotangent)
            values.append(
                sum((x * np.asarray(back, np.float64)).sum() for x, back in zip(value, cotangent, strict=True))
            )
        assert (values[0] - values[1]) / 2e-5 == pytest.approx((gradient * direction).sum(), rel=1e-6)


def test_unseen_keys_do_not_matter(implementation):
    """All results are equal to the bit, whatever unseen keys hold.

    `chunked` admits any finite number, `reference` numbers whose products with others are finite.
    """
    case = CASES[0]
    (operands, cotangent), (queries, keys) = random_operands(case), packed(case)
    keys = keys._replace(segment=keys.segment.at[:, 3:6].set(7), position=keys.position.at[:, 8].set(100))
    unseen = ~sees(queries, keys, case.window).any(1)
    assert 4 <= unseen.sum() < unseen.size
    results = []
    for held in (0, 3e38 if implementation == "chunked" else 1e30):
        k, v = (jnp.where(unseen[:, :, None, None], held, x) for x in operands[1:3])
        results.append(compiled(implementation, case)(operands._replace(k=k, v=v), queries, keys, cotangent))
    jax.tree.map(np.testing.assert_array_equal, *results)
    for gradient in results[0][1][1:3]:
        assert np.asarray(gradient)[~unseen].all()


@pytest.mark.parametrize("sizes", [(0, 3, 3, 2, 2), (2, 0, 3, 2, 2), (2, 3, 0, 2, 2), (2, 3, 3, 0, 2), (2, 3, 3, 2, 0)])
def test_empty_operands(implementation, sizes):
    """Without a row, query, key, key head or query head, results and gradients are zeros."""
    batch, queries, keys, kv_heads, group = sizes
    at, key_at = (Coordinates(*jnp.ones((2, batch, n), jnp.int32)) for n in (queries, keys))
    q = jnp.ones((batch, queries, kv_heads, group, HEAD_DIM))
    k, v = (jnp.ones((batch, keys, kv_heads, dim)) for dim in (HEAD_DIM, VALUE_DIM))
    cotangent = Attended(jnp.ones((*q.shape[:4], VALUE_DIM)), jnp.ones(q.shape[:4]))
    operands = Inputs(q, k, v, jnp.float32(1))
    value, gradients = value_and_gradients(implementation, None, operands, at, key_at, cotangent)
    assert (value.result.shape, value.logsumexp.shape) == (cotangent.result.shape, cotangent.logsumexp.shape)
    assert (np.asarray(value.logsumexp) == np.float32(NOTHING)).all()
    assert not any(np.asarray(x).any() for x in (value.result, *jax.tree.leaves(gradients)))


def test_sinks_and_parts(implementation):
    """A sink is one more key. Parts over different keys, one of them with sinks, join to the whole."""
    case = Case(9, 9, 64, 3)
    (operands, cotangent), (queries, keys) = random_operands(case), packed(case)
    operands = with_sinks(operands)
    queries = queries._replace(segment=queries.segment.at[1, 4].set(99))  # sees no key, only the sink

    def part(operands, which):
        k, v = (x[:, which] for x in operands[1:3])
        at, sinks = Coordinates(*(x[:, which] for x in keys)), operands.sinks if which.start is None else None
        given = Operands(operands.q, k, v, queries, at, case.window)
        return attend(given, operands.scale, sinks=sinks, implementation=implementation)

    def whole(operands):
        return part(operands, slice(None))

    def joined(operands):
        return join(part(operands, slice(None, 4)), part(operands, slice(4, None)))

    def both(operands):
        pairs = [jax.vjp(function, operands) for function in (whole, joined)]
        return [(value, *pull(cotangent)) for value, pull in pairs]

    wanted = loop(case.window, operands, queries, keys, cotangent)
    for results in jax.jit(both)(operands):
        check(results, wanted)


def test_weights_of_large_scores_sum_to_one(implementation):
    """In the backward pass too: the gradients by values of one sum to the gradient by their average."""
    tokens = 40
    at = Coordinates(jnp.arange(tokens, dtype=jnp.int32)[None], jnp.ones((1, tokens), jnp.int32))
    q, k, v = (jnp.ones((1, tokens, *heads, 1)) for heads in ((1, 1), (1,), (1,)))
    run = functools.partial(attend, implementation=implementation)
    by_v = jax.jit(jax.grad(lambda v, scale: run(Operands(q, k, v, at, at, None), scale).result[:, -1].sum()))
    for scale in (1e4, 1e7):
        assert float(by_v(v, jnp.float32(scale)).sum()) == pytest.approx(1, rel=1e-5)


def test_backends_of_several_platforms_vary_alike():
    """Without a target every platform's backend is traced. Both results vary over the axis that only values do."""
    at = Coordinates(jnp.arange(80, dtype=jnp.int32)[None], jnp.ones((1, 80), jnp.int32))
    q, k, v = jnp.ones((1, 80, 1, 1, 2)), jnp.ones((1, 80, 1, 2)), jnp.ones((2, 80, 1, 2))
    run = lambda q, k, v: tuple(attend(Operands(q, k, v, at, at, None), 1.0))  # noqa: E731
    split, whole = PartitionSpec("a"), PartitionSpec()
    mapped = jax.shard_map(run, mesh=auto_mesh(a=2), in_specs=(whole, whole, split), out_specs=(split, split))
    assert [x.shape[0] for x in jax.eval_shape(mapped, q, k, v)] == [2, 2]


@pytest.mark.parametrize("window", [None, 3, Stretches(3)], ids=str)
def test_chunked_visits_only_visible_pairs_of_blocks(window):
    """A block of NaN reaches, in both passes, exactly the blocks that see it or that it sees.

    Documents are in order. Each row of the batch has NaN in one of six blocks.
    """
    case, block, rows = Case(23, 23, 4, window), 4, 12
    patterns = make_row([8, 13, 20], [4], case.keys), make_row([5, 9], [3], case.keys)  # padding behind
    at = stack_rows(*(pattern for pattern in patterns for _ in range(6)))
    padded = np.pad(sees(at, at, window), ((0, 0), (0, 1), (0, 1)))
    visible: Any = padded.reshape(rows, 6, block, 6, block).any((2, 4))
    assert visible.sum() < rows * 6 * 7 / 2  # fewer than causality leaves
    bad = np.arange(rows) % 6
    poisoned = np.repeat(np.arange(6), block)[None, : case.keys] == bad[:, None]

    def poison(x):
        return jnp.where(poisoned.reshape(*poisoned.shape, *[1] * (x.ndim - 2)), jnp.nan, x)

    def reached(x):
        nan = np.isnan(np.asarray(x)).any(tuple(range(2, x.ndim)))
        return np.pad(nan, ((0, 0), (0, 1))).reshape(rows, 6, block).any(2)

    (operands, cotangent), run = random_operands(case, batch=rows), compiled("chunked", case, rows)
    value, gradients = run(operands._replace(k=poison(operands.k), v=poison(operands.v)), at, at, cotangent)
    for x in (value.result, gradients.q):
        np.testing.assert_array_equal(reached(x), visible[np.arange(rows), :, bad])
    _, gradients = run(operands._replace(q=poison(operands.q)), at, at, cotangent)
    for x in (gradients.k, gradients.v):
        np.testing.assert_array_equal(reached(x), visible[np.arange(rows), bad])


@pytest.mark.parametrize("over", [("a", "", "b", "", ""), ("", "b", "", "b", "a")], ids=str)
def test_on_a_mesh(implementation, over):
    """Each of q, k, v and the coordinates of queries and of keys differs along the axes in `over`, and only there.

    The results vary wherever an operand does. The gradient of an operand that is the same on several devices is the sum
    of theirs.
    """
    mesh, case = auto_mesh(a=2, b=2), Case(6, 9, 4, 3)
    anywhere = "".join(sorted(set("".join(over))))
    devices = [random_operands(case, seed) for seed in range(4)]
    at = [packed(case), packed(case._replace(queries=case.keys))]
    at.append((Coordinates(*(x[::-1, : case.queries] for x in at[1][1])), Coordinates(*(x[::-1] for x in at[1][1]))))
    at = [at[0], at[2], at[0], at[2]]

    def stacked(axes, leaves):
        """Stack four devices' arrays, keeping those of devices that differ along `axes`."""
        tree = jax.tree.map(lambda *x: np.stack(x).reshape(2, 2, *x[0].shape), *leaves)
        return jax.tree.map(lambda x: x[: 1 + ("a" in axes), : 1 + ("b" in axes)], tree)

    def spec(axes):
        return PartitionSpec(*(axis if axis in axes else None for axis in "ab"))

    def local(q, k, v, queries, keys, cotangent):
        q, k, v, queries, keys, cotangent = jax.tree.map(lambda x: x[0, 0], (q, k, v, queries, keys, cotangent))

        def run(q, k, v):
            result, total = attend(Operands(q, k, v, queries, keys, 3), 0.7, implementation=implementation)
            assert set(jax.typeof(result).mat.varying) == set(anywhere)
            assert set(jax.typeof(total).mat.varying) >= set("".join(over[:2] + over[3:]))
            return Attended(result, vary_like(total, result))

        value, pull = jax.vjp(run, q, k, v)
        results = (*value, *pull(cotangent))
        assert [set(jax.typeof(x).mat.varying) for x in results[2:]] == [set(axes) for axes in over[:3]]
        return jax.tree.map(lambda x: x[None, None], results)

    columns = [[d[0][i] for d in devices] for i in range(3)] + [[x[i] for x in at] for i in range(2)]
    given = [stacked(axes, column) for axes, column in zip(over, columns, strict=True)]
    given.append(stacked(anywhere, [d[1] for d in devices]))
    in_specs, out_specs = (*map(spec, over), spec(anywhere)), (*[spec(anywhere)] * 2, *map(spec, over[:3]))
    with blocks_of(case.block):
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        results = jax.jit(mapped)(*given)

    wanted = [np.zeros(result.shape) for result in results]
    for device in np.ndindex(jax.tree.leaves(given[-1])[0].shape[:2]):
        here = lambda x, device=device: x[tuple(np.minimum(device, np.subtract(x.shape[:2], 1)))]  # noqa: E731
        q, k, v, queries, keys, cotangent = jax.tree.map(here, tuple(given))
        value, gradients = loop(3, Inputs(q, k, v, 0.7), queries, keys, cotangent)
        for want, part in zip(wanted, (*value, *gradients[:3]), strict=True):
            want[tuple(np.minimum(device, np.subtract(want.shape[:2], 1)))] += part
    check(results, wanted)


def test_rematerialised_in_a_scan_over_layers(implementation):
    """The gradients are the same. If a policy saves the kernel's results, `chunked` runs no loop twice."""
    case = Case(9, 9, 4)
    (operands, _), (queries, keys) = random_operands(case), packed(case)

    def layer(q, k):
        result, total = attend(Operands(q, k, k, queries, keys, None), 0.5, implementation=implementation)
        return result * jnp.tanh(total)[..., None], None

    def loss(layer, q, k):
        return (jax.lax.scan(layer, q, jnp.stack([k, 2 * k]))[0] ** 2).sum()

    layers: list[Any] = [layer]
    for saved in ((), (ATTENTION,)):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        layers.append(jax.checkpoint(layer, policy=policy, prevent_cse=False))
    gradients = [jax.grad(functools.partial(loss, one), (0, 1)) for one in layers]
    with blocks_of(case.block):
        plain, *others = jax.jit(lambda q, k: [gradient(q, k) for gradient in gradients])(*operands[:2])
        programs = [jax.make_jaxpr(gradient)(*operands[:2]) for gradient in gradients]
    for other in others:
        for one, same in zip(plain, other, strict=True):
            # Two layers, each with the precision of `check`, and the second amplifies what the first rounds.
            np.testing.assert_allclose(one, same, rtol=0, atol=200 * 2.0**-24 * np.abs(one).max())
    if implementation == "chunked":
        for program, count in zip(programs, (2 + 5, 2 + 5 + 2, 2 + 5), strict=True):
            products = [e for e, *_ in equations(program) if e.primitive.name == "dot_general"]
            assert [e.params["preferred_element_type"] for e in products] == [jnp.float32] * count


def test_chunked_makes_no_array_of_every_query_for_every_key():
    """The largest array of the compiled program has the size of an operand or a result, or of a pair of blocks."""
    case = Case(128, 128, 16)
    heads = KV_HEADS * GROUP
    largest = {
        implementation: largest_array(compiled(implementation, case, 1).as_text() or "") for implementation in PORTABLE
    }
    assert largest["chunked"] <= heads * max(case.queries * VALUE_DIM, case.block**2)
    assert largest["reference"] >= heads * case.block * case.keys


def test_lowers_for_every_platform(implementation):
    case = CASES[0]
    (operands, cotangent), at = random_operands(case), packed(case)
    run = jax.jit(functools.partial(value_and_gradients, implementation, None))
    assert run.trace(operands, *at, cotangent).lower(lowering_platforms=PLATFORMS).as_text()


def test_small_work_is_not_cut_into_blocks():
    chosen = functools.partial(chosen_backend, Target("cpu"))
    assert [chosen(32, 32), chosen(128, 128), chosen(16, 4096)] == ["reference", "chunked", "chunked"]


def test_one_query_takes_a_backend_of_its_own():
    assert {chosen_backend(Target(platform), 1, 16384) for platform in PLATFORMS} == {"one_query"}


def test_what_has_no_parts_is_not_taken_for_them():
    """Not replaced silently: refused where it is named alone, passed over with the reason elsewhere."""
    cpu = Target("cpu")
    assert chosen_backend(cpu, 1, 64, in_parts=True) == "reference"
    assert chosen_backend(cpu, 64, 64, ("one_query", "chunked"), in_parts=True) == "chunked"
    assert reasons("chunked", cpu, ("one_query", "chunked"), "float32", in_parts=True) == [
        "one_query has no parts of keys"
    ]
    (inputs, _), at = random_operands(CASES[0]), packed(CASES[0])
    wanted = r"^attention=one_query: does not run on cpu with float32 and keys in an unknown order and parts of keys; "
    with pytest.raises(UserError, match=wanted):
        attend_part(Operands(*inputs[:3], *at, None), "one_query")


_EQUAL_VALUES = """
import sys, jax, jax.numpy as jnp
from moezoo.kernels.attention import Operands, attend
from moezoo.parallel.context_parallel import Coordinates

x, values = jnp.ones((4, 1, 2, 4, 64), jnp.bfloat16), jnp.ones((3, 4, 2, 2048, 64), jnp.bfloat16)
at, keys = (Coordinates(jnp.full((4, n), n), jnp.ones((4, n), jnp.int32)) for n in (1, 2048))
at = at._replace(position=at.position + 2048)
for name in sys.argv[1:]:
    def layer(x, number):
        v = jax.lax.dynamic_index_in_dim(values, number, keepdims=False).swapaxes(1, 2)
        return attend(Operands(x, v, v, at, keys, None), 0.1, implementation=name).result, None
    y = jax.jit(lambda x: jax.lax.scan(layer, x, jnp.arange(3))[0])(x)
    assert (y == 1).all(), (name, y.min())
"""


def test_averages_of_equal_values_are_these_values():
    """Over more keys than XLA's fused CPU kernels add up in bfloat16, with few threads: so in a process of its own."""
    command = [sys.executable, "-c", _EQUAL_VALUES, *PORTABLE]
    subprocess.run(command, env={**os.environ, "NPROC": "2", "XLA_FLAGS": ""}, check=True)


def test_the_choice_on_accelerators():
    """By capability, dtype, and whether the order of keys is known; no scores of many queries and keys are held."""
    hopper: Any = Target("cuda", "9.0")
    many: Any = {"queries": 4096, "keys": 4096}
    assert chosen_backend(hopper, **many) == "hopper"
    assert chosen_backend(hopper, **many, dtype="float32") == "chunked"
    assert chosen_backend(hopper, **many, is_sorted=False) == "chunked"
    # Heads of 512 do not fit into the shared memory of Hopper's kernel.
    assert [chosen_backend(hopper, **many, width=width) for width in (256, 512)] == ["hopper", "chunked"]
    assert reasons("chunked", hopper, (), "bfloat16", width=512) == ["hopper takes heads of at most 256, not 512"]
    with refused("attention=hopper: does not run on cuda 9.0 with bfloat16 and heads of 512; "):
        chosen_backend(hopper, **many, names=("hopper",), width=512)
    tpu = Target("tpu")
    assert chosen_backend(tpu, **many, width=512) == "splash"
    assert [chosen_backend(tpu, **many, dtype=dtype) for dtype in ("bfloat16", "float32")] == ["splash"] * 2
    assert chosen_backend(tpu, **many, dtype="float16") == "chunked"
    assert chosen_backend(tpu, **many, is_sorted=False) == "chunked"
    assert [chosen_backend(tpu, *sizes) for sizes in ((128, 100), (128, 128))] == ["reference", "splash"]
    others = ("cuda", None), ("cuda", "8.0"), ("cuda", "10.0"), ("rocm", "gfx942")
    for target in (Target(*each) for each in others):
        assert chosen_backend(target, **many) == "chunked"
        assert chosen_backend(target, 512, 1024) == "reference"
    case = CASES[4]
    (inputs, _), (queries, keys) = random_operands(case), packed(case)
    for target, name, on in ((hopper, "hopper", "cuda 9.0"), (tpu, "splash", "tpu"), (Target("cpu"), "splash", "cpu")):
        wanted = f"^attention={name}: does not run on {on} with bfloat16 and keys in an unknown order; choose ref"
        with pytest.raises(UserError, match=wanted):
            attend(Operands(*inputs[:3], queries, keys, None), 1.0, implementation=KernelOrder((name,), target))


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_no_backends(name):
    """Each is refused by one line with the reason, unless somebody registers a backend of that name."""
    with refused(f"attention: no backend '{name}'; ", "gradient by the log-sum-exp", "; take hopper or chunked"):
        chosen_backend(Target("cuda", "9.0"), 512, 512, (name,))
    with refused(f"execution.attention[0]={name}: ", "gradient by the log-sum-exp", "; take hopper or chunked"):
        moezoo.compose(f"execution.attention=[{name}]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, name, BACKENDS["chunked"])
        names = moezoo.compose(f"execution.attention={name}").execution.attention
        assert chosen_backend(Target("cpu"), 512, 512, names or ()) == name


@pytest.mark.weekly
def test_a_known_order_of_keys_changes_nothing():
    """`chunked` goes by intervals of keys instead of coordinates; padding is first in one row and last in the other."""
    case = Case(10, 10, 4, 3)
    operands, cotangent = random_operands(case)
    at = stack_rows(make_row([3, 7], [1], 10), make_row([2, 8], [3], 10))
    seen = intervals(at, at, case.window)

    def run(seen: Any, operands: Any) -> Any:
        def both(q: Any, k: Any, v: Any) -> Any:
            return attend(Operands(q, k, v, at, at, case.window, seen), operands.scale, implementation="chunked")

        value, pull = jax.vjp(both, *operands[:3])
        return value, *pull(cotangent)

    with blocks_of(case.block):
        jax.clear_caches()
        for one, other in zip(*(jax.tree.leaves(run(each, operands)) for each in (seen, None)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@functools.cache
def compiled_parts(implementation: Any, case: Case, first: int) -> Any:
    """Compile attention to the `first` keys and to the rest, joined, and the gradients that go through each."""

    def run(q, k, v, queries, keys, back):
        cuts = [[x[:, rows] for x in (k, v, *keys)] for rows in (slice(first), slice(first, None))]
        parts = [Operands(q, k_, v_, queries, Coordinates(*at), case.window) for k_, v_, *at in cuts]
        whole = Softmax(jnp.zeros(back.shape), jnp.full(q.shape[:-1], FLOOR), jnp.ones(q.shape[:-1]))
        for operands in parts:
            whole = join_softmax(whole, attend_part(operands, implementation))
        by_part = [part_gradients(operands, whole, back, implementation) for operands in parts]
        by_q, by_k, by_v = zip(*by_part, strict=True)
        return whole, (sum(x.astype(jnp.float32) for x in by_q), *(jnp.concatenate(x, 1) for x in (by_k, by_v)))

    (q, k, v, *_), cotangent = random_operands(case)
    queries, keys = (Coordinates(*jnp.zeros((2, BATCH, n), jnp.int32)) for n in case[:2])
    with blocks_of(case.block):
        return jax.jit(run).lower(q, k, v, queries, keys, cotangent.result).compile()


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=str)
def test_parts_of_the_keys_equal_a_loop_over_all(case):
    """Results joined from two parts, of which queries may see none; and gradients by all keys, from both parts."""

    @settings(max_examples=15)
    @given(at=draw_coordinates(case.queries, case.keys), seed=st.integers(0, 9))
    def compare(at: Any, seed: int):
        operands, cotangent = random_operands(case, seed)
        operands, back = operands._replace(scale=jnp.float32(1)), cotangent.result
        queries, keys = at
        wanted = loop(case.window, operands, queries, keys, Attended(back, jnp.zeros_like(cotangent.logsumexp)))
        for implementation in ("reference", "chunked"):
            whole, by_operands = compiled_parts(implementation, case, 4)(*operands[:3], queries, keys, back)
            total = jnp.where(whole.highest > FLOOR, whole.highest + jnp.log(whole.total), NOTHING)
            joined = Attended(whole.result.astype(case.dtype), total)
            # There is no gradient by the scale: the caller has scaled the queries.
            gradients = wanted[1]._replace(q=by_operands[0], k=by_operands[1], v=by_operands[2])
            check((joined, gradients), wanted, case.dtype)

    compare()


def test_wide_blocks():
    """Long rows of few query heads that share key heads are cut into them, and a row of five equals the loop."""
    tokens = 1100
    at = stack_rows(make_row([300, 900], [], tokens))

    def blocks(kv_heads, group, window):
        return chunked.on_cpu(at, at, kv_heads, group, window)

    assert blocks(4, 2, None) == blocks(2, 4, 256) == (256, 256)
    assert blocks(8, 1, None) == blocks(8, 2, None) == blocks(4, 2, 255) == (128, 128)
    assert GROUP > 1
    assert KV_HEADS * GROUP <= 8
    operands, cotangent = random_operands(Case(tokens, tokens, 0), batch=1)
    run = jax.jit(functools.partial(value_and_gradients, "chunked", None))
    check(run(operands, at, at, cotangent), loop(None, operands, at, at, cotangent))
