"""What every backend of `attend` promises, against a loop over queries in float64."""

import contextlib
import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import largest_array

from moezoo.kernels.attention import Attended, Implementation, attend, chosen_backend, join
from moezoo.kernels.attention import chunked as chunked_module
from moezoo.kernels.attention import reference as reference_module
from moezoo.kernels.attention.base import NOTHING, Place
from moezoo.parallel.collectives import ATTENTION, vary_like
from moezoo.parallel.kernels import PLATFORMS, Target
from moezoo.parallel.traces import equations

BATCH, KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM = 2, 2, 3, 4, 5


class Case(NamedTuple):
    """What a program is compiled for; `block`: tokens of a block, of `chunked`, and of a chunk, of `reference`."""

    queries: int
    keys: int
    block: int
    window: int | None = None
    dtype: str = "float32"


# Several blocks with a rest, one block, one query, fewer queries than keys.
CASES = [Case(13, 13, 5), Case(13, 13, 5, 3), Case(13, 13, 5, 1), Case(13, 13, 64), Case(1, 11, 4), Case(6, 11, 4, 3)]


class Operands(NamedTuple):
    """What `attend` is differentiated by."""

    q: Any
    k: Any
    v: Any
    scale: Any


class Value(NamedTuple):
    """What `attend` should return, in float64."""

    result: Any
    logsumexp: Any


@pytest.fixture(params=get_args(Implementation))
def implementation(request) -> Implementation:
    """Every backend there is."""
    return request.param


def random_operands(case, seed=0, batch=BATCH):
    """Operands, and what flows back to the result and to the log-sum-exp."""
    rng = np.random.default_rng(seed)
    heads = KV_HEADS, GROUP
    shapes = (case.queries, *heads, HEAD_DIM), (case.keys, KV_HEADS, HEAD_DIM), (case.keys, KV_HEADS, VALUE_DIM)
    q, k, v, back = (
        jnp.asarray(rng.standard_normal((batch, *shape)), case.dtype)
        for shape in (*shapes, (case.queries, *heads, VALUE_DIM))
    )
    to_total = jnp.asarray(rng.standard_normal((batch, case.queries, *heads)), jnp.float32)
    return Operands(q, k, v, jnp.float32(0.7)), Attended(back, to_total)


def value_and_gradients(implementation, window, operands, queries, keys, cotangent):
    """Result and log-sum-exp, and the gradients of both by all operands."""

    def run(operands):
        *qkv, scale = operands
        return attend(*qkv, queries=queries, keys=keys, scale=scale, window=window, implementation=implementation)

    value, pull = jax.vjp(run, operands)
    return value, *pull(cotangent)


@contextlib.contextmanager
def blocks_of(tokens):
    """Backends with blocks of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_module, "_BLOCKS", (tokens, tokens))
        patch.setattr(reference_module, "_QUERY_CHUNK", tokens)
        yield


@functools.cache
def compiled(implementation, case):
    """`value_and_gradients`, compiled once for all places."""
    operands, cotangent = random_operands(case)
    queries, keys = (Place(*jnp.zeros((2, BATCH, n), jnp.int32)) for n in case[:2])
    with blocks_of(case.block):
        function = jax.jit(functools.partial(value_and_gradients, implementation, case.window))
        return function.lower(operands, queries, keys, cotangent).compile()


def sees(queries, keys, window):
    """Whether each query sees each key, by definition; [batch queries keys]."""
    at, key_at = np.asarray(queries.position)[:, :, None], np.asarray(keys.position)[:, None]
    seen = np.asarray(queries.segment)[:, :, None] == np.asarray(keys.segment)[:, None]
    return seen & (key_at <= at) & (window is None or at - key_at < window)


def loop(window, operands, queries, keys, cotangent):
    """What `value_and_gradients` should return: query by query, over the keys that it sees."""
    q, k, v, scale = (np.asarray(x, np.float64) for x in operands)
    back, to_total = (np.asarray(x, np.float64) for x in cotangent)
    result, total = np.zeros(back.shape), np.full(to_total.shape, NOTHING)
    by_q, by_k, by_v, by_scale = (np.zeros(x.shape) for x in (q, k, v, scale))
    seen = sees(queries, keys, window)
    for at in np.ndindex(total.shape):
        b, i, head, _ = at
        mine = np.flatnonzero(seen[b, i])
        if not mine.size:
            continue
        key, value = k[b, mine, head], v[b, mine, head]
        products = key @ q[at]
        weights = np.exp(scale * products - (scale * products).max())
        total[at] = np.log(weights.sum()) + (scale * products).max()
        weights /= weights.sum()
        result[at] = weights @ value
        by_score = weights * (value @ back[at] - result[at] @ back[at] + to_total[at])
        by_q[at] = scale * by_score @ key
        by_k[b, mine, head] += scale * np.outer(by_score, q[at])
        by_v[b, mine, head] += np.outer(weights, back[at])
        by_scale += by_score @ products
    return Value(result, total), Operands(by_q, by_k, by_v, by_scale)


def check(results, wanted, dtype="float32"):
    """Each result within its rounding.

    In float32: scores of order ten, whose roundings weights multiply, and sums of a few dozen terms. In bfloat16:
    scaled queries, weights, results and gradients of scores are each rounded once, relative to the largest number. The
    gradient by the scale, a single number, sums up to 156 queries' shares, whose errors are independent.
    """
    precision = {"float32": 50 * 2.0**-24, "bfloat16": 8 * 2.0**-8}[dtype]
    for result, want in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        result, something = np.asarray(result, np.float64), want != NOTHING
        np.testing.assert_array_equal(result[~something], np.float32(NOTHING))
        atol = precision * max(1 if want.ndim else 156**0.5, np.abs(want[something]).max(initial=0))
        np.testing.assert_allclose(result[something], want[something], rtol=0, atol=atol)


def ordered_places(cuts, padding, tokens):
    """One row: documents that begin at `cuts`, of which those whose number is in `padding` are padding."""
    starts = np.zeros(tokens, np.int32)
    starts[[cut for cut in cuts if cut < tokens]] = 1
    number = np.cumsum(starts) + 1 - starts[0]
    position = np.arange(tokens) - np.maximum.accumulate(np.where(starts, np.arange(tokens), 0))
    return position, np.where(np.isin(number, padding), 0, number)


@st.composite
def places(draw, queries, keys):
    """Places of queries and keys: documents cut anywhere, padding anywhere, tokens in any order.

    As many queries as keys are the same tokens, in an order of their own; fewer are some of them, or ones after them.
    """
    rows = []
    for _ in range(BATCH):
        cuts = draw(st.lists(st.integers(0, keys), max_size=3))
        position, segment = ordered_places(cuts, draw(st.lists(st.integers(1, 4), max_size=2)), keys)
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        orders = [rng.permutation(keys) if draw(st.booleans()) else np.arange(keys) for _ in range(2)]
        late = draw(st.integers(0, 2)) if queries < keys else 0
        rows.append([position[orders[0]][-queries:] + late, segment[orders[0]][-queries:]])
        rows[-1] += [position[orders[1]], segment[orders[1]]]
    at = [jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)]
    return Place(*at[:2]), Place(*at[2:])


@pytest.mark.parametrize("case", [*CASES, Case(13, 13, 5, 3, "bfloat16")], ids=str)
def test_equals_a_loop(implementation, case):
    """Value and log-sum-exp, and gradients through both."""
    run = compiled(implementation, case)

    @settings(max_examples=25)
    @given(places=places(case.queries, case.keys), seed=st.integers(0, 9))
    def compare(places: Any, seed: int):
        operands, cotangent = random_operands(case, seed)
        queries, keys = places
        results = run(operands, queries, keys, cotangent)
        assert [x.dtype for x in results[0]] == [case.dtype, "float32"]
        assert [x.dtype for x in results[1]] == [x.dtype for x in operands]
        check(results, loop(case.window, operands, queries, keys, cotangent), case.dtype)

    compare()


def packed(case):
    """Documents of some tokens in the first row; fewer, and padding behind them, in the second."""
    rows = ordered_places([4, 9], [], case.keys), ordered_places([7], [2], case.keys)
    keys = Place(*(jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)))
    return Place(*(x[:, -case.queries :] for x in keys)), keys


def test_gradients_of_the_loop_are_its_differences():
    case = CASES[1]
    (operands, cotangent), places = random_operands(case), packed(case)
    gradients = loop(case.window, operands, *places, cotangent)[1]
    rng = np.random.default_rng(1)
    for argument, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = [np.asarray(x, np.float64) for x in operands]
            moved[argument] = moved[argument] + step * direction
            value, _ = loop(case.window, moved, *places, cotangent)
            values.append(
                sum((x * np.asarray(back, np.float64)).sum() for x, back in zip(value, cotangent, strict=True))
            )
        assert (values[0] - values[1]) / 2e-5 == pytest.approx((gradient * direction).sum(), rel=1e-6)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_unseen_keys_are_nowhere(implementation, case):
    """To the bit, whatever they hold; and nothing flows back to them.

    `chunked` bears any finite number; `reference` those whose products with others are finite.
    """
    operands, cotangent = random_operands(case)
    queries, keys = packed(case)
    keys = keys._replace(segment=keys.segment.at[:, 3:8].set(7), position=keys.position.at[:, 9].set(100))
    unseen = ~sees(queries, keys, case.window).any(1)
    assert 4 <= unseen.sum() < unseen.size
    run = compiled(implementation, case)
    results = []
    for held in (0, 3e38 if implementation == "chunked" else 1e30):
        k, v = (jnp.where(unseen[:, :, None, None], held, x) for x in operands[1:3])
        results.append(run(operands._replace(k=k, v=v), queries, keys, cotangent))
    jax.tree.map(np.testing.assert_array_equal, *results)
    for gradient in results[0][1][1:3]:
        assert not np.asarray(gradient)[unseen].any()
        assert np.asarray(gradient)[~unseen].all()


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]], ids=str)
def test_a_query_that_sees_nothing(implementation, case):
    """A result of zero, a log-sum-exp that is finite, no gradient."""
    operands, cotangent = random_operands(case)
    queries, keys = packed(case)
    queries = Place(queries.position.at[0, 0].set(-1), queries.segment.at[1].set(99))
    results = compiled(implementation, case)(operands, queries, keys, cotangent)
    for row in (np.index_exp[0, 0], np.index_exp[1]):
        assert not np.asarray(results[0].result)[row].any()
        np.testing.assert_array_equal(np.asarray(results[0].logsumexp)[row], np.float32(NOTHING))
        assert not np.asarray(results[1].q)[row].any()
    check(results, loop(case.window, operands, queries, keys, cotangent))


def test_sinks_are_a_key_more(implementation):
    """With a score of its own and a value of zero."""
    case = CASES[0]
    (operands, cotangent), (queries, keys) = random_operands(case), packed(case)
    sinks = jnp.linspace(-1, 2, KV_HEADS * GROUP).reshape(KV_HEADS, GROUP)
    *qkv, scale = operands
    run = functools.partial(attend, queries=queries, keys=keys, window=None, implementation=implementation)

    def both(*operands):
        value, pull = jax.vjp(lambda *x: run(*x[:3], scale=scale, sinks=x[3]), *operands)
        return value, pull(cotangent)[3]

    value, gradient = jax.jit(both)(*qkv, sinks)
    plain = loop(None, operands, queries, keys, cotangent)[0]
    total = np.logaddexp(plain.logsumexp, np.asarray(sinks, np.float64))
    check(value, Value(plain.result * np.exp(plain.logsumexp - total)[..., None], total))
    # A sink's weight is what is left of one; its value of zero stands for the result.
    left = np.exp(np.asarray(sinks, np.float64) - total)
    through_result = (np.asarray(value.result, np.float64) * np.asarray(cotangent.result, np.float64)).sum(-1)
    by_sinks = (left * (np.asarray(cotangent.logsumexp) - through_result)).sum((0, 1))
    check(gradient, by_sinks)


def test_parts_joined_are_the_whole(implementation):
    """Value and gradients, of keys cut in two; some queries see nothing of one part."""
    case = CASES[1]
    (operands, cotangent), (queries, keys) = random_operands(case), packed(case)

    def run(operands):
        *_, scale = operands

        def part(which):
            k, v = (x[:, which] for x in operands[1:3])
            at = Place(*(x[:, which] for x in keys))
            options: Any = {"scale": scale, "window": case.window, "implementation": implementation}
            return attend(operands[0], k, v, queries=queries, keys=at, **options)

        return join(part(slice(6)), part(slice(6, None)))

    def both(operands):
        value, pull = jax.vjp(run, operands)
        return value, *pull(cotangent)

    check(jax.jit(both)(operands), loop(case.window, operands, queries, keys, cotangent))


def test_sinks_come_in_once(implementation):
    """Given to one part and not to the other, they are what they are for the whole."""
    case = CASES[1]
    (operands, _), (queries, keys) = random_operands(case), packed(case)
    q, k, v, scale = operands
    sinks = jnp.linspace(-1, 2, KV_HEADS * GROUP).reshape(KV_HEADS, GROUP)
    options: Any = {"queries": queries, "scale": scale, "window": case.window, "implementation": implementation}
    first, last = (Place(*(x[:, which] for x in keys)) for which in (slice(6), slice(6, None)))

    def both(q, k, v, sinks):
        one = attend(q, k[:, :6], v[:, :6], keys=first, **options, sinks=sinks)
        other = attend(q, k[:, 6:], v[:, 6:], keys=last, **options)
        return join(one, other), attend(q, k, v, keys=keys, **options, sinks=sinks)

    joined, whole = jax.jit(both)(q, k, v, sinks)
    check(joined, Value(*(np.asarray(x, np.float64) for x in whole)))


@pytest.mark.parametrize("size", [1e4, 1e7])
def test_weights_of_large_scores_sum_to_one(implementation, size):
    """Also those that the backward pass makes: what flows to values of one is what flows to their averages."""
    tokens = 40
    place = Place(jnp.arange(tokens, dtype=jnp.int32)[None], jnp.ones((1, tokens), jnp.int32))
    q, k, v = (jnp.ones((1, tokens, *heads, 1)) for heads in ((1, 1), (1,), (1,)))
    run = functools.partial(attend, queries=place, keys=place, scale=size, window=None, implementation=implementation)
    by_v = jax.jit(jax.grad(lambda v: run(q, k, v).result[:, -1].sum()))(v)
    assert float(by_v.sum()) == pytest.approx(1, rel=1e-5)


def test_backends_of_several_platforms_vary_alike():
    """Without a target every one is traced: both results vary wherever an operand does, here the values alone."""
    place = Place(jnp.arange(80, dtype=jnp.int32)[None], jnp.ones((1, 80), jnp.int32))
    q, k, v = jnp.ones((1, 80, 1, 1, 2)), jnp.ones((1, 80, 1, 2)), jnp.ones((2, 80, 1, 2))
    run = lambda q, k, v: tuple(attend(q, k, v, queries=place, keys=place, scale=1.0, window=None))  # noqa: E731
    split, whole = PartitionSpec("a"), PartitionSpec()
    mapped = jax.shard_map(run, mesh=auto_mesh(a=2), in_specs=(whole, whole, split), out_specs=(split, split))
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v)[0], 1, rtol=1e-6)


@settings(max_examples=60)
@given(places=places(8, 14), window=st.sampled_from([None, 1, 4]))
def test_every_pair_with_something_seen_is_visited(places: Any, window):
    queries, keys = places
    seen = sees(queries, keys, window).reshape(BATCH, 2, 4, 7, 2).any((2, 4))
    queries, keys = (Place(*(x.reshape(BATCH, n, -1) for x in p)) for p, n in ((queries, 2), (keys, 7)))
    visited = np.asarray(chunked_module._visible(queries, keys, window))
    assert not (seen & ~visited).any()


@pytest.mark.parametrize("window", [None, 3])
def test_other_pairs_are_skipped(monkeypatch, window):
    """Forward two products a pair in which something is seen, backward five, where documents are in order."""
    computed = []
    plain = chunked_module._dot

    def counted(x, *rest):
        jax.debug.callback(lambda _: computed.append(x.shape), x[0, 0])
        return plain(x, *rest)

    monkeypatch.setattr(chunked_module, "_dot", counted)
    case = Case(23, 23, 4, window)
    rows = ordered_places([8, 13, 20], [4], case.keys), ordered_places([5, 9], [3], case.keys)  # padding behind
    places = Place(*(jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)))
    padded = np.pad(sees(places, places, window), ((0, 0), (0, 1), (0, 1)))
    pairs = padded.reshape(BATCH, 6, 4, 6, 4).any((2, 4)).sum()
    assert pairs < BATCH * 6 * 7 / 2  # fewer than causality leaves
    operands, cotangent = random_operands(case)
    with blocks_of(case.block):
        run = jax.jit(functools.partial(value_and_gradients, "chunked", window))
        results = run(operands, places, places, cotangent)
    check(results, loop(window, operands, places, places, cotangent))
    jax.effects_barrier()
    assert len(computed) == (2 + 5) * pairs


@pytest.mark.parametrize("over", [("a", "", "", "", ""), ("", "a", "b", "", ""), ("", "", "", "b", "a")], ids=str)
def test_on_a_mesh(implementation, over):
    """Operands (q, k, v, places of queries and of keys) that differ along some axes and are the same along others.

    The results vary wherever an operand does, and an operand that is the same on several devices gets the sum of their
    gradients.
    """
    mesh, case = auto_mesh(a=2, b=2), Case(6, 9, 4, 3)
    anywhere = "".join(sorted(set("".join(over))))
    devices = [random_operands(case, seed) for seed in range(4)]
    at = [packed(case), packed(case._replace(queries=case.keys))]
    at.append((Place(*(x[::-1, : case.queries] for x in at[1][1])), Place(*(x[::-1] for x in at[1][1]))))
    at = [at[0], at[2], at[0], at[2]]

    def stacked(axes, leaves):
        """Of four devices' arrays those of devices that differ along `axes`."""
        tree = jax.tree.map(lambda *x: np.stack(x).reshape(2, 2, *x[0].shape), *leaves)
        return jax.tree.map(lambda x: x[: 1 + ("a" in axes), : 1 + ("b" in axes)], tree)

    def spec(axes):
        return PartitionSpec(*(axis if axis in axes else None for axis in "ab"))

    def local(q, k, v, queries, keys, cotangent):
        q, k, v, queries, keys, cotangent = jax.tree.map(lambda x: x[0, 0], (q, k, v, queries, keys, cotangent))
        options: Any = {"scale": 0.7, "window": 3, "implementation": implementation}

        def run(*qkv):
            result, total = attend(*qkv, queries=queries, keys=keys, **options)
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
        value, gradients = loop(3, (q, k, v, 0.7), queries, keys, cotangent)
        for want, part in zip(wanted, (*value, *gradients[:3]), strict=True):
            want[tuple(np.minimum(device, np.subtract(want.shape[:2], 1)))] += part
    check(results, wanted)


@pytest.mark.parametrize("saved", [(), (ATTENTION,)], ids=["nothing", "results"])
def test_rematerialised_in_a_scan_over_layers(implementation, saved):
    """The same gradients; where a policy saves what the kernel returns, `chunked` runs no loop of it twice."""
    case = Case(9, 9, 4)
    (operands, _), (queries, keys) = random_operands(case), packed(case)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    options: Any = {"queries": queries, "keys": keys, "window": None, "implementation": implementation}

    def layer(q, k):
        result, total = attend(q, k, k, scale=0.5, **options)
        return result * jnp.tanh(total)[..., None], None

    def loss(layer, q, k):
        return (jax.lax.scan(layer, q, jnp.stack([k, 2 * k]))[0] ** 2).sum()

    with blocks_of(case.block):
        gradients = [
            jax.grad(functools.partial(loss, one), (0, 1))
            for one in (layer, jax.checkpoint(layer, policy=policy, prevent_cse=False))
        ]
        plain, again = (jax.jit(gradient)(*operands[:2]) for gradient in gradients)
        program = jax.make_jaxpr(gradients[1])(*operands[:2])
    for one, other in zip(plain, again, strict=True):
        # Two layers, each with the precision of `check`, and the second amplifies what the first rounds.
        np.testing.assert_allclose(one, other, rtol=0, atol=200 * 2.0**-24 * np.abs(one).max())
    if implementation == "chunked":
        products = [e for e, *_ in equations(program) if e.primitive.name == "dot_general"]
        assert len(products) == 2 + 5 + (0 if saved else 2)
        assert all(product.params["preferred_element_type"] == jnp.float32 for product in products)


def test_chunked_makes_no_array_of_every_query_for_every_key():
    """The largest array of the compiled program is an operand, a result or the like of one, or a pair of blocks."""
    tokens, block = 256, 32
    case = Case(tokens, tokens, block)
    operands, cotangent = jax.eval_shape(lambda: random_operands(case, batch=1))
    place: Any = Place(*jnp.zeros((2, 1, tokens), jnp.int32))
    largest = {}
    with blocks_of(block):
        for implementation in get_args(Implementation):
            run = jax.jit(functools.partial(value_and_gradients, implementation, None))
            program = run.lower(operands, place, place, cotangent).compile()
            largest[implementation] = largest_array(program.as_text() or "")
    heads = KV_HEADS * GROUP
    assert largest["chunked"] <= heads * max(tokens * VALUE_DIM, block * block)
    assert largest["reference"] >= heads * block * tokens


def test_repeatable(implementation):
    case = CASES[0]
    (operands, cotangent), places = random_operands(case), packed(case)
    one, other = (compiled(implementation, case)(operands, *places, cotangent) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_traces_for_every_platform(implementation, platform):
    case = CASES[0]
    (operands, cotangent), places = random_operands(case), packed(case)
    run = jax.jit(functools.partial(value_and_gradients, implementation, None))
    assert run.trace(operands, *places, cotangent).lower(lowering_platforms=(platform,)).as_text()


def test_work_too_small_for_blocks_is_not_cut():
    chosen = functools.partial(chosen_backend, Target("cpu"))
    assert [chosen(1, 16384), chosen(32, 32), chosen(128, 128), chosen(16, 4096)] == ["reference"] * 2 + ["chunked"] * 2
