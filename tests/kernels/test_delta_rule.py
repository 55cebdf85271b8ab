"""Every backend of the delta rule, and its gradients, compared with a loop over tokens in float64."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from meshes import auto_mesh
from programs import largest_array
from refusals import refused

from moezoo.kernels.delta_rule import (
    BACKENDS,
    Backend,
    Operands,
    Start,
    chunked,
    delta_rule,
    register,
    span_map,
    then,
    times,
)
from moezoo.parallel.collectives import ATTENTION

BATCH, HEADS, GROUP, KEY, VALUE = 2, 2, 2, 8, 6
# Float32 against float64's largest number: sums of some hundred products, each rounded once.
NEAR = 1e-5


class Floats(NamedTuple):
    """The differentiable operands."""

    q: Any
    k: Any
    v: Any
    decay: Any
    strength: Any
    initial: Any


def make(
    tokens: int, per_channel: bool, largest: float, seed: int = 0, equal_keys: bool = False, corrects: bool = True
) -> Floats:
    """Return random operands; decays are between 0 and -`largest`, most of them near 0. The rule `corrects` or not."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    rows = (BATCH, tokens, HEADS)
    k = unit(draw(*rows, KEY))
    strength = 1 / (1 + np.exp(-draw(*rows, GROUP)))
    if equal_keys:
        k, strength = np.broadcast_to(k[:, :1], k.shape), np.ones_like(strength)
    decay = -largest * rng.random((*rows, GROUP, KEY) if per_channel else (*rows, GROUP)) ** 4
    q, v = unit(draw(*rows, KEY)), draw(*rows, GROUP, VALUE)
    initial = draw(BATCH, HEADS, GROUP, KEY, VALUE)
    found = Floats(*(np.asarray(x, np.float32) for x in (q, k, v, decay, strength, initial)))
    return found if corrects else found._replace(strength=None)


def operands(floats: Floats, segment: Any) -> Operands:
    """Return the operands of the kernel."""
    q, k, v, decay, strength, _ = jax.tree.map(jnp.asarray, floats)
    return Operands(q, k, v, decay, strength, jnp.asarray(segment))


def start_at(segment: Any, floats: Floats) -> Start:
    """Return what was read before."""
    return Start(jnp.asarray(segment), jnp.asarray(floats.initial))


def cut(floats: Floats, first: int, after: int) -> Floats:
    """Return the operands of some tokens."""
    return jax.tree.map(lambda x: x[:, first:after], floats)._replace(initial=floats.initial)


def loop(floats: Floats, segment: Any, before: Any, by_result: Any, by_state: Any) -> tuple[Any, Any, Floats]:
    """Return results, states and gradients in float64, token by token, forwards and backwards."""
    x = jax.tree.map(lambda one: np.asarray(one, np.float64), floats)
    result, last, back = np.zeros_like(x.v), np.zeros_like(x.initial), jax.tree.map(np.zeros_like, x)
    rows, tokens = segment.shape
    for b, h, g in np.ndindex(rows, HEADS, GROUP):
        q, k, v = x.q[b, :, h], x.k[b, :, h], x.v[b, :, h, g]
        factor = np.exp(x.decay[b, :, h, g]).reshape(tokens, -1)
        kept, corrects = [], x.strength is not None
        strength = x.strength[b, :, h, g] if corrects else np.ones(tokens)
        goes_on = segment[b] == np.concatenate([before[b : b + 1], segment[b, :-1]])
        state = x.initial[b, h, g]
        for t in range(tokens):
            old = state * goes_on[t]
            faded = factor[t][:, None] * old
            error = v[t] - corrects * (faded.T @ k[t])
            state = faded + np.outer(k[t], strength[t] * error)
            kept.append((old, faded, error, state))
            result[b, t, h, g] = state.T @ q[t]
        last[b, h, g] = state
        by = by_state[b, h, g].astype(np.float64)
        for t in reversed(range(tokens)):
            old, faded, error, state = kept[t]
            by = by + np.outer(q[t], by_result[b, t, h, g])
            back.q[b, t, h] += state @ by_result[b, t, h, g]
            if corrects:
                back.strength[b, t, h, g] = error @ (by.T @ k[t])
            by_error = strength[t] * (by.T @ k[t])
            back.v[b, t, h, g] = by_error
            back.k[b, t, h] += by @ (strength[t] * error) - corrects * (faded @ by_error)
            by = by - corrects * np.outer(k[t], by_error)
            by_decay = (by * faded).sum(1)
            back.decay[b, t, h, g] = by_decay if x.decay.ndim == 5 else by_decay.sum()
            by = factor[t][:, None] * by * goes_on[t]
        back.initial[b, h, g] = by
    return result, last, back


def run(name: str, floats: Floats, segment: Any, before: Any, by_result: Any, by_state: Any) -> Any:
    """Return what `delta_rule` returns, and its gradients."""

    def rule(floats: Floats) -> Any:
        return delta_rule(operands(floats, segment), start_at(before, floats), name)

    value, pull = jax.vjp(rule, floats)
    return *value, *pull(type(value)(by_result, by_state))


compiled = jax.jit(run, static_argnums=0)


def segments(tokens: int, cuts: Any) -> np.ndarray:
    """Return a row in which a document begins at each of `cuts`."""
    return np.searchsorted(np.sort(np.asarray(cuts, int)), np.arange(tokens), side="right").astype(np.int32) + 1


def compare(name: str, floats: Floats, segment: Any, before: Any) -> None:
    """Compare a backend with the loop."""
    rng = np.random.default_rng(7)
    back = [rng.standard_normal(x.shape).astype(np.float32) for x in (floats.v, floats.initial)]
    found = compiled(name, floats, segment, before, *back)
    wanted = loop(floats, segment, before, *back)
    names = ["result", "state", *(name for name in Floats._fields if getattr(floats, name) is not None)]
    wanted = jax.tree.leaves(wanted)
    largest = [np.abs(x).max() for x in wanted]
    # A gradient may cancel to nothing; its terms are of the order of the other gradients.
    floor = 0.2 * max(largest[2:])
    for what, one, other, most in zip(names, jax.tree.leaves(found), wanted, largest, strict=True):
        assert np.abs(np.asarray(one) - other).max() <= NEAR * max(most, floor), (name, what)


@pytest.mark.parametrize(
    ("per_channel", "corrects"),
    [(False, True), (True, True), (False, False), pytest.param(True, False, marks=pytest.mark.weekly)],
    ids=["per head", "per channel", "per head, no strengths", "per channel, no strengths"],
)
def test_documents_anywhere(per_channel, corrects):
    """Documents begin in the middle of chunks, at their borders and at the first token; decays reach exp(-300)."""

    @settings(max_examples=12)
    @given(
        cuts=st.lists(st.integers(1, 149), max_size=4),
        largest=st.sampled_from([0.0, 1.0, 300.0]),
        before=st.lists(st.integers(0, 1), min_size=2, max_size=2),
        equal=st.booleans(),
        seed=st.integers(0, 5),
    )
    @example(cuts=[64, 128], largest=1.0, before=[1, 0], equal=False, seed=0)
    @example(cuts=[], largest=0.0, before=[1, 1], equal=True, seed=0)
    @example(cuts=[63, 65], largest=300.0, before=[0, 1], equal=True, seed=0)
    def check(cuts: Any, largest: float, before: Any, equal: bool, seed: int) -> None:
        floats = make(150, per_channel, largest, seed, equal, corrects)
        segment = np.stack([segments(150, cuts), segments(150, [100])])
        for name in BACKENDS:
            compare(name, floats, segment, np.asarray(before, np.int32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "PIECE", 2)
        check()


@pytest.mark.parametrize("tokens", [1, 9, 64, pytest.param(1100, marks=pytest.mark.weekly)])
def test_lengths(tokens):
    """One token; less than a chunk; a chunk; pieces of the size that users get."""
    segment = np.stack([segments(tokens, [3, 40]), segments(tokens, [5])])
    for name in BACKENDS if tokens < 1000 else ["chunked"]:
        compare(name, make(tokens, False, 2.0), segment, np.array([1, 0], np.int32))


@pytest.mark.parametrize("corrects", [True, False])
def test_a_large_decay_does_not_blur_small_ones(corrects):
    """Behind a decay of exp(-1e6), a state that fades by exp(-0.001) per token is exact."""
    floats, segment = make(64, False, 0.0, corrects=corrects), np.ones((2, 64), np.int32)
    decay = np.full_like(floats.decay, -1e-3)
    decay[:, 5] = -1e6
    compare("chunked", floats._replace(decay=decay), segment, np.ones(2, np.int32))


@pytest.mark.parametrize("largest", [0.0, 3.0])
def test_the_inverse_of_a_unit_triangular_matrix(largest):
    """For equal keys too, of which powers of the strict part are as large as 1e18."""
    rng = np.random.default_rng(0)
    strict = np.tril(np.ones((64, 64)) if not largest else rng.uniform(-0.4, 0.4, (64, 64)), -1).astype(np.float32)
    wanted = np.linalg.inv(np.eye(64) + strict.astype(np.float64))
    np.testing.assert_allclose(chunked.invert(jnp.asarray(strict)), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["per head", "no strengths", "per channel, no strengths"])
def test_spans_one_behind_the_other(kind):
    """The map of a span takes the state before it to that after it, and maps compose in the order of tokens."""
    floats = make(90, "channel" in kind, 0.02, corrects="no" not in kind)
    before = np.ones(2, np.int32)
    segment: Any = np.ones((2, 90), np.int32)
    segment[1, 70:] = 2
    initial = floats.initial

    @jax.jit
    def maps() -> Any:
        at = [0, 40, 90]
        spans = [
            span_map(operands(cut(floats, a, b), segment[:, a:b]), jnp.asarray(segment[:, max(a - 1, 0)]))
            for a, b in itertools.pairwise(at)
        ]
        both = then(*spans)
        return times(both.factor, jnp.asarray(initial)) + both.term, both.factor

    state, factor = maps()
    wanted, *_ = loop(floats, segment, before, np.zeros_like(floats.v), np.zeros_like(initial))[1:]
    np.testing.assert_allclose(state, wanted, atol=1e-5)
    assert not np.asarray(factor)[1].any()  # another document begins
    assert np.asarray(factor)[0].any()


def test_memory_and_what_a_gradient_keeps():
    """For 4,096 tokens no array is larger than an operand: there is a state per piece, not per token."""
    tokens, key = 4096, 16
    shape = (1, tokens, 1, key)
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    shapes = Floats(like(*shape), like(*shape), like(1, tokens, 1, 1, key), like(1, tokens, 1, 1), *[like(1)] * 2)

    def loss(q: Any, k: Any, v: Any, decay: Any) -> Any:
        segment = jnp.ones((1, tokens), jnp.int32)
        return delta_rule(Operands(q, k, v, decay, decay, segment), implementation="chunked").result.sum()

    text: Any = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes[:4]).compile().as_text()
    assert largest_array(text) <= tokens * key


def test_a_policy_may_save_the_loop(monkeypatch):
    """With its results and states saved, a gradient reads the text forwards once and backwards once."""
    monkeypatch.setattr(chunked, "PIECE", 1)
    floats, segment = make(150, False, 1.0), np.ones((2, 150), np.int32)

    def loops(saved: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(saved)
        read = lambda f: delta_rule(operands(f, segment), implementation="chunked").result.sum()  # noqa: E731
        text: Any = jax.jit(jax.value_and_grad(jax.checkpoint(read, policy=policy))).lower(floats).compile().as_text()
        return text.count(" while(")

    assert loops(ATTENTION) < loops("nothing")


def test_half_precision_operands():
    """bfloat16 operands give a bfloat16 result of float32's sums, and a float32 state."""
    floats, segment, before = make(70, False, 1.0), np.ones((2, 70), np.int32), np.ones(2, np.int32)
    narrow = floats._replace(**{name: jnp.asarray(getattr(floats, name), jnp.bfloat16) for name in "qkv"})
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), narrow)
    zeros = np.zeros_like(floats.v), np.zeros_like(floats.initial)
    wanted = loop(wide, segment, before, *zeros)
    for name in BACKENDS:
        found = delta_rule(operands(narrow, segment), start_at(before, floats), name)
        assert (found.result.dtype, found.state.dtype) == ("bfloat16", "float32")
        np.testing.assert_allclose(found.state, wanted[1], atol=1e-5)
        np.testing.assert_allclose(
            np.asarray(found.result, np.float32), wanted[0], atol=2**-8 * np.abs(wanted[0]).max()
        )


def test_rows_on_devices():
    """Inside shard_map: results are those of one device, without a collective."""
    mesh, rows = auto_mesh(data=2), PartitionSpec("data")
    floats, segment = make(70, True, 1.0), np.ones((2, 70), np.int32)

    def rule(floats: Floats, segment: Any) -> Any:
        return delta_rule(operands(floats, segment), implementation="chunked")

    split = jax.jit(jax.shard_map(rule, mesh=mesh, in_specs=(rows, rows), out_specs=rows))
    for one, other in zip(split(floats, segment), jax.jit(rule)(floats, segment), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    program: Any = split.lower(floats, segment).compile().as_text()
    assert "all-reduce" not in program
    assert "all-gather" not in program


def test_no_tokens():
    """The state stays."""
    floats = make(1, False, 1.0)
    start = start_at(np.ones(2, np.int32), floats)
    found = delta_rule(operands(cut(floats, 0, 0), np.zeros((2, 0), np.int32)), start)
    np.testing.assert_array_equal(found.state, floats.initial)
    assert found.result.shape == (BATCH, 0, HEADS, GROUP, VALUE)


def test_backends_by_name(monkeypatch):
    """Names are checked, and a new backend is taken by its own."""
    some = operands(make(9, False, 1.0), np.ones((2, 9), np.int32))
    with refused("delta_rule: no backend 'chunkd'", "did you mean 'chunked'"):
        delta_rule(some, implementation="chunkd")
    monkeypatch.setitem(BACKENDS, "spare", BACKENDS["reference"])
    with refused("delta_rule: there is another backend 'spare'"):
        register("spare", Backend(lambda operands, start: BACKENDS["reference"].rule(operands, start)))
    register("spare", BACKENDS["reference"])
    found, wanted = (delta_rule(some, implementation=name).state for name in ("spare", "reference"))
    np.testing.assert_array_equal(found, wanted)
    with refused("delta_rule: no backend 'chunkd'"):
        span_map(some, jnp.ones(2, jnp.int32), "chunkd")
