"""Mixers by the delta rule and state space duality, against loops over tokens in float64; split, and behind a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from refusals import refused

from moezoo.nn.cache import Past
from moezoo.nn.delta import Activations, ChannelDecay, DeltaMixer, DeltaSizes, FullGate, HeadDecay, LowRankGate
from moezoo.nn.positions import make_context
from moezoo.nn.short_convolution import ShortConvolution, last
from moezoo.nn.state_space import StateSpaceMixer, StateSpaceSizes
from moezoo.parallel.axes import parameter_table
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import Rules
from moezoo.parallel.traces import equations

EMBED, BATCH, SEQ, EPSILON = 8, 2, 24, 1e-5
SIZES = DeltaSizes(key_heads=2, value_heads=4, key_dim=4, value_dim=3)
SAME = DeltaSizes(key_heads=4, value_heads=4, key_dim=4, value_dim=3, taps=3)
MAMBA = StateSpaceSizes(heads=4, head_dim=3, groups=2, state_dim=4)
# Steps that are clamped on both sides, and no biases of convolutions.
CLAMPED = StateSpaceSizes(heads=4, head_dim=3, groups=2, state_dim=4, bias="none", least_step=0.03, most_step=0.1)
F32 = jnp.dtype("float32")
# Sums of some hundred products of numbers of order one, each rounded to float32.
PRECISION = 200 * 2.0**-24


@functools.cache
def mixer(name: str) -> DeltaMixer | StateSpaceMixer:
    """Return a mixer of each kind, with numbers in place of ones and zeros."""
    keys = jax.random.split(jax.random.key(0), 4)
    draw = np.random.default_rng(0)
    moved = lambda x: x + draw.uniform(-0.3, 0.3, x.shape).astype(np.float32)  # noqa: E731
    if "mamba" in name:
        sizes = MAMBA if name == "mamba" else CLAMPED
        made = StateSpaceMixer(EMBED, sizes, epsilon=EPSILON, out_std=1.0, dtype=F32, key=keys[2])
        return jax.tree.map(moved, made)
    sizes = SIZES if name == "gated" else SAME
    if name == "gated":
        parts = HeadDecay(EMBED, sizes, dtype=F32, key=keys[0]), FullGate(EMBED, sizes, dtype=F32, key=keys[1])
    else:
        lowest = -5.0 if name == "kimi safe" else None
        decay = ChannelDecay(EMBED, sizes, rank=3, lowest=lowest, dtype=F32, key=keys[0])
        parts = decay, LowRankGate(EMBED, sizes, rank=3, dtype=F32, key=keys[1])
    made = DeltaMixer(EMBED, sizes, *parts, epsilon=EPSILON, out_std=1.0, dtype=F32, key=keys[2])
    return jax.tree.map(moved, made)


def silu(x: np.ndarray) -> np.ndarray:
    """Return x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(x))."""
    return np.logaddexp(0, x)


def filtered(x: np.ndarray, weight: Any, convolution: Any) -> np.ndarray:
    """Return a projection of the tokens of one document behind a convolution and silu."""
    made, taps = np.einsum("td,dhk->thk", x, weight), len(convolution.weight)
    y = np.zeros_like(made) if convolution.bias is None else np.broadcast_to(convolution.bias, made.shape).copy()
    for t in range(len(x)):
        for back in range(min(taps, t + 1)):
            y[t] += convolution.weight[taps - 1 - back] * made[t - back]
    return silu(y)


def naive_mamba(m: Any, x: np.ndarray) -> np.ndarray:
    """Return the result of a mixer by state space duality, as `naive` does."""
    c, b, v = (filtered(x, *pair) for pair in zip((m.read, m.write, m.value), m.convolutions, strict=True))
    step = softplus(x @ m.step + m.step_bias)
    step = np.minimum(np.maximum(step, m.least_step), np.inf if m.most_step is None else m.most_step)
    heads, groups = v.shape[1], b.shape[1]
    each, out = heads // groups, np.zeros_like(v)
    for h in range(heads):
        state = np.zeros((v.shape[2], b.shape[2]))
        for t in range(len(x)):
            state = np.exp(-np.exp(m.rate[h]) * step[t, h]) * state
            state = state + step[t, h] * np.outer(v[t, h], b[t, h // each])
            out[t, h] = state @ c[t, h // each] + m.skip[h] * v[t, h]
    out = out * silu(np.einsum("td,dhv->thv", x, m.gate))
    for g in range(groups):
        mine = out[:, g * each : (g + 1) * each]
        out[:, g * each : (g + 1) * each] = mine / np.sqrt((mine**2).mean((1, 2), keepdims=True) + EPSILON)
    return np.einsum("thv,hvd->td", out * m.norm.scale, m.out)


def naive(m: Any, x: np.ndarray) -> np.ndarray:
    """Return the result for the tokens [tokens, embed] of one document, in float64, token by token."""
    m = jax.tree.map(lambda w: np.asarray(w, np.float64), m)
    x = x.astype(np.float64)
    if isinstance(m, StateSpaceMixer):
        return naive_mamba(m, x)
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    q, k, v = (filtered(x, *pair) for pair in zip((m.query, m.key, m.value), m.convolutions, strict=True))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q = q / np.sqrt(q.shape[-1])
    d, g = m.decay, m.gate
    if hasattr(d, "weight"):
        decay = (-np.exp(d.rate) * softplus(x @ d.weight + d.bias))[..., None]
        gate = silu(np.einsum("td,dhv->thv", x, g.weight))
    else:
        at = np.einsum("td,dr,rhk->thk", x, d.down, d.up) + d.bias
        rate = np.exp(d.rate)[:, None]
        decay = -rate * softplus(at) if d.lowest is None else d.lowest * sigmoid(rate * at)
        gate = sigmoid(np.einsum("td,dr,rhv->thv", x, g.down, g.up))
    strength, heads = sigmoid(x @ m.strength), v.shape[1]
    each = heads // k.shape[1]
    out = np.zeros_like(v)
    for h in range(heads):
        state = np.zeros((k.shape[2], v.shape[2]))
        for t in range(len(x)):
            state = np.exp(decay[t, h])[:, None] * state
            state = state + np.outer(k[t, h // each], strength[t, h] * (v[t, h] - state.T @ k[t, h // each]))
            out[t, h] = state.T @ q[t, h // each]
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPSILON) * m.norm.scale
    return np.einsum("thv,hvd->td", normed * gate, m.out)


def coordinates(*lengths: list[int], tokens: int = SEQ) -> Coordinates:
    """Return rows of documents of these lengths, with padding behind them."""
    position, segment = np.zeros((2, len(lengths), tokens), np.int32)
    for row, documents in enumerate(lengths):
        at = 0
        for number, length in enumerate(documents, 1):
            position[row, at : at + length], segment[row, at : at + length] = np.arange(length), number
            at += length
    return Coordinates(jnp.asarray(position), jnp.asarray(segment))


# Documents begin next to each other, in the middle of chunks, and one fills its row.
AT = coordinates([2, 1, 9, 12], [24])
X, COTANGENT = np.random.default_rng(1).standard_normal((2, BATCH, SEQ, EMBED)).astype(np.float32)


def run(execution: Any, order: Any, m: Any, x: Any, at: Any, cotangent: Any) -> Any:
    """Return the layer's value, and its gradients by weights and input; heads are summed."""

    def layer(m: Any, x: Any) -> Any:
        return m(x, make_context(at, execution, order), execution).leave(execution.inner_group("heads"))

    value, pull = jax.vjp(layer, m, x)
    return value, *pull(cotangent)


@functools.cache
def alone(name: str) -> Any:
    """Return value and gradients on one device."""
    return jax.jit(functools.partial(run, on_mesh(Execution()), "contiguous"))(mixer(name), X, AT, COTANGENT)


def test_axes_of_convolutions():
    """They are split, and refused, by the heads of keys and of values."""
    names = {path: axes.names for path, axes, _ in parameter_table(mixer("gated"))}
    heads = [names[f".convolutions[{i}].weight"][1] for i in range(3)]
    assert heads == ["key_heads", "key_heads", "value_heads"]


def test_initial_decays():
    """Rates are as documented; those of Kimi have biases with which a channel forgets at most a tenth per rate."""
    sizes = DeltaSizes(key_heads=64, value_heads=64, key_dim=4, value_dim=3)
    by_head = HeadDecay(EMBED, sizes, dtype=F32, key=jax.random.key(0))
    by_channel = ChannelDecay(EMBED, sizes, rank=3, dtype=F32, key=jax.random.key(0))
    for decay in (by_head, by_channel):
        rates = np.exp(decay.rate)
        assert 0.01 <= rates.min() < 2
        assert 14 < rates.max() <= 16
    assert np.unique(by_head.bias).tolist() == [1]
    steps = np.logaddexp(0, np.asarray(by_channel.bias, np.float64))
    np.testing.assert_allclose([np.log(steps).mean(), np.log(steps).std()], [-4.6, np.log(100) / 12**0.5], atol=0.3)
    assert 0.99e-3 <= steps.min() < 1.2e-3
    assert 0.09 < steps.max() <= 0.101
    sizes = StateSpaceSizes(heads=256, groups=1, head_dim=1)
    mamba = StateSpaceMixer(EMBED, sizes, epsilon=EPSILON, out_std=1.0, dtype=F32, key=jax.random.key(0))
    np.testing.assert_allclose(np.exp(mamba.rate), np.arange(1, 257), rtol=1e-5)
    steps = np.logaddexp(0, np.asarray(mamba.step_bias, np.float64))
    np.testing.assert_allclose([np.log(steps).mean(), np.log(steps).std()], [-4.6, np.log(100) / 12**0.5], atol=0.3)
    assert np.unique(mamba.skip).tolist() == [1]


def test_what_a_gradient_keeps():
    """Of what the rule reads, the inputs of the convolutions, decays and strengths: no queries and keys, and states."""
    m, execution = mixer("gated"), on_mesh(Execution())
    group = execution.inner_group("heads")
    layer = lambda m, x: m(x, make_context(AT, execution, "contiguous"), execution).leave(group)  # noqa: E731
    kept = jax.tree.leaves(jax.eval_shape(lambda m, x: jax.vjp(layer, m, x)[1], m, X))
    # Of pieces [piece, batch, heads, group, key_dim, value_dim]; operands in chunks have as many dimensions or more.
    assert [x.shape for x in kept if x.ndim > 5] == [(1, BATCH, 2, 2, 4, 3)]
    # The inputs of two convolutions.
    assert [x.shape for x in kept].count((BATCH, SEQ, 2, 4)) == 2


def test_sums_of_taps_are_made_again_behind_the_rule():
    """Sigmoids of two convolutions are made forwards, for the gradient of the rule, and for their own."""
    m, execution = mixer("gated"), on_mesh(Execution())
    layer = lambda m, x: m(x, make_context(AT, execution, "contiguous"), execution).y  # noqa: E731
    traced = jax.make_jaxpr(lambda m, x: jax.vjp(layer, m, x)[1](x))(m, X)
    made = [x.equation.outvars[0].aval for x in equations(traced) if x.equation.primitive.name == "logistic"]
    assert [getattr(x, "shape", ()) for x in made].count((BATCH, SEQ, 2, 4)) == 3 * 2


@pytest.mark.parametrize("name", ["gated", "kimi", "kimi safe", "mamba", "clamped mamba"])
def test_documents_are_read_alone(name):
    """A packed document has the result of its own loop."""
    value = np.asarray(alone(name)[0])
    for row in range(BATCH):
        for number in range(1, int(AT.segment[row].max()) + 1):
            mine = np.asarray(AT.segment[row]) == number
            np.testing.assert_allclose(value[row][mine], naive(mixer(name), X[row][mine]), atol=PRECISION)


@pytest.mark.parametrize("name", ["gated", "kimi", "mamba"])
def test_half_precision_layers(name):
    """In bfloat16, decays, strengths, norms and states stay float32: the result errs by a few roundings of inputs."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), mixer(name))
    x, execution = jnp.asarray(X, jnp.bfloat16), on_mesh(Execution())
    context = make_context(AT, execution, "contiguous")
    found = jax.jit(lambda m, x: m(x, context, execution))(narrow, x)
    assert found.y.dtype == jnp.bfloat16
    assert found.kept[1].dtype == jnp.float32
    wanted = naive(jax.tree.map(lambda w: np.asarray(w, np.float32), narrow), np.asarray(x, np.float32)[1])
    error = np.abs(np.asarray(found.y, np.float64)[1] - wanted)
    assert error.mean() <= 2**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["gated", "kimi"])
def test_what_stays_float32_in_half_precision(name):
    """Of a document of one token the state is strength k v^T: strengths, norms of keys and gates round as float32 does.

    Products of weights and a unit vector are exact, so nothing else rounds: half precision would err by up to 2^-9.
    """
    execution, exact = on_mesh(Execution()), 2.0**-21
    m: Any = jax.tree.map(lambda x: x.astype(jnp.bfloat16), mixer(name))
    x, ones = jnp.eye(EMBED, dtype=jnp.bfloat16)[:, None], jnp.ones((EMBED, 1), jnp.int32)
    context = make_context(Coordinates(0 * ones, ones), execution, "contiguous")
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    before = jnp.full((EMBED, m.convolutions[0].reach), -1, jnp.int32)

    def filtered(weight: Any, convolution: Any) -> np.ndarray:
        old = jnp.zeros((EMBED, convolution.reach, *weight.shape[1:]), jnp.bfloat16)
        return wide(convolution(weight[:, None], ones, old, before)[:, 0])

    k, v = filtered(m.key, m.convolutions[1]), filtered(m.value, m.convolutions[2])
    k = np.repeat(k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6), v.shape[1] // k.shape[1], axis=1)
    written = v / (1 + np.exp(-wide(m.strength)))[..., None]
    state = jax.jit(lambda m, x: m(x, context, execution).kept[1])(m, x)
    np.testing.assert_allclose(state, k[..., None] * written[..., None, :], rtol=exact)

    gate = jax.jit(lambda gate, x: gate(Activations(x, x), execution.inner_group("heads"))[:, 0])(m.gate, x)
    if name == "gated":
        wanted = silu(wide(m.gate.weight))
    else:
        wanted = 1 / (1 + np.exp(-wide(jnp.einsum("dr,rhv->dhv", m.gate.down, m.gate.up))))
    np.testing.assert_allclose(gate, wanted, rtol=exact)


MESHES = {
    "contiguous": (MeshShape(data=2, context=4), {}, "contiguous"),
    "balanced": (MeshShape(context=4), {}, "balanced"),
    "heads": (MeshShape(tensor=2, context=2), {"heads": ("tensor",), "kv_heads": ("tensor",)}, "balanced"),
}


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("name", ["gated", "kimi", "mamba"])
def test_devices_that_share_a_sequence_and_heads(name, where):
    """Value and gradients are those of one device; several chunks lie in one document, several documents in one."""
    shape, kept, order = MESHES[where]
    mesh = make_mesh(shape)
    rules = Rules("mine", kept, kept, ("data",), ("context",))
    execution = on_mesh(Execution(mesh=mesh, rules=rules, sequence_order=order))
    lies, split = execution.token_order(SEQ), execution.tokens_spec
    weights: Any = execution.specs(mixer(name))
    mapped = jax.shard_map(
        functools.partial(run, execution, order),
        mesh=mesh,
        in_specs=(weights, split, split, split),
        out_specs=(split, weights, split),
    )
    arrays = jax.tree.map(lambda x: x[:, lies], (X, AT, COTANGENT))
    found, back = jax.jit(mapped)(mixer(name), *arrays), np.argsort(lies)
    found = found[0][:, back], found[1], found[2][:, back]
    for result, want in zip(jax.tree.leaves(found), jax.tree.leaves(alone(name)), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=PRECISION * max(1, np.abs(want).max()))


@pytest.mark.parametrize("prompt", [1, 2, 7])
@pytest.mark.parametrize("name", ["gated", "kimi", "mamba"])
def test_token_by_token_behind_a_prompt(name, prompt):
    """A prompt with padding before it, then tokens one by one, give what the whole text gives; states stay as kept."""
    m, execution = mixer(name), on_mesh(Execution())
    whole = naive(m, X[0])
    pad = 3
    x = np.concatenate([np.ones((1, pad, EMBED), np.float32), X[:1]], axis=1)
    segment = np.concatenate([np.zeros((1, pad), np.int32), np.ones((1, SEQ), np.int32)], axis=1)

    def at(first: int, after: int) -> Any:
        tokens = jnp.asarray(segment[:, first:after])
        return make_context(Coordinates(jnp.arange(first, after, dtype=jnp.int32)[None], tokens), execution)

    read = jax.jit(lambda x, context: m(x, context, execution)[:2])
    y, kept = read(x[:, : pad + prompt], at(0, pad + prompt))
    np.testing.assert_allclose(y[0, pad:], whole[:prompt], atol=PRECISION)
    state = jax.tree.map(lambda x: x[None], m.state(SEQ).fill(kept))
    step = jax.jit(lambda x, state, context: m(x, context, execution, Past(state, jnp.int32(0), jnp.int32(0)))[:2])
    states = []
    for t in range(prompt, SEQ):
        states.append(state)
        y, fresh = step(x[:, pad + t : pad + t + 1], state, at(pad + t, pad + t + 1))
        np.testing.assert_allclose(y[0, 0], whole[t], atol=PRECISION)
        state = state.advance(jax.tree.map(lambda x: x[None], fresh), jnp.int32(t))
    # From a state that was kept, the same token gives the same numbers again.
    again, _ = step(x[:, pad + prompt : pad + prompt + 1], states[0], at(pad + prompt, pad + prompt + 1))
    np.testing.assert_allclose(again[0, 0], whole[prompt], atol=PRECISION)
    shapes = jax.tree.map(lambda kept: tuple(kept.sizes.values()), m.state(5), is_leaf=lambda x: hasattr(x, "sizes"))
    assert jax.tree.leaves(jax.tree.map(lambda x: x.shape[2:], state)) == jax.tree.leaves(shapes)


@pytest.mark.parametrize(("taps", "has_bias", "activates"), [(3, False, False), (4, True, True)])
def test_short_convolution(taps, has_bias, activates):
    """Against a loop; nothing crosses documents, and a text may be read in parts."""
    layer = ShortConvolution(taps, 2, 3, has_bias=has_bias, activates=activates, dtype=F32, key=jax.random.key(1))
    if has_bias:
        layer = jax.tree.map(lambda x: x + 0.5, layer)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 2, 3)), jnp.float32)
    segment = jnp.asarray([[1, 1, 1, 2, 2, 3, 3, 3, 3]], jnp.int32)
    wanted = np.zeros(x.shape, np.float32)
    for t in range(9):
        for back in range(taps):
            if t - back >= 0 and segment[0, t - back] == segment[0, t]:
                wanted[0, t] += np.asarray(layer.weight[taps - 1 - back]) * x[0, t - back]
        wanted[0, t] += 0 if layer.bias is None else np.asarray(layer.bias)
    wanted = silu(wanted) if activates else wanted
    zeros, none, same = jnp.zeros((1, taps - 1, 2, 3)), *(jnp.full((1, taps - 1), n, jnp.int32) for n in (-1, 3))
    np.testing.assert_allclose(layer(x, segment, zeros, none), wanted, atol=1e-6)
    cut, reach = 7, layer.reach
    rest = layer(x[:, cut:], segment[:, cut:], x[:, cut - reach : cut], segment[:, cut - reach : cut])
    np.testing.assert_allclose(rest, wanted[:, cut:], atol=1e-6)
    kept = last(x[:, :cut], segment[:, :cut], reach)
    rest = layer(x[:, cut:], segment[:, cut:], kept, same)
    np.testing.assert_allclose(rest, wanted[:, cut:], atol=1e-6)


def test_refusals():
    with refused("model.mamba.heads=6 is not a multiple of model.mamba.groups=4", "choose a multiple of 4"):
        StateSpaceSizes(heads=6, groups=4)
    with refused("model.mamba.most_step=0.1 is below model.mamba.least_step=0.2", "or null for no limit"):
        StateSpaceSizes(least_step=0.2, most_step=0.1)
    with refused("model.delta.value_heads=6 is not a multiple of model.delta.key_heads=4", "choose a multiple of 4"):
        DeltaSizes(4, 6, 8, 8)
    rules = Rules("mine", {}, {}, (), ("context",))
    mesh = make_mesh(MeshShape(context=4))
    execution = on_mesh(Execution(mesh=mesh, rules=rules))

    def read(order: Any, length: int) -> Any:
        at = Coordinates(*(jnp.ones((1, length), jnp.int32),) * 2)
        layer = lambda x, at: mixer("gated")(x, make_context(at, execution, order), execution).y  # noqa: E731
        split: Any = PartitionSpec(None, "context")
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(split, split), out_specs=split)
        return jax.eval_shape(mapped, jnp.ones((1, length, EMBED)), at)

    with refused("mixer DeltaMixer reads tokens in order", "the order on 4 devices is unknown"):
        read(None, 16)
    with refused("chunks of 2 tokens are shorter than the 3 tokens that a layer reads of the chunk before"):
        read("contiguous", 8)
