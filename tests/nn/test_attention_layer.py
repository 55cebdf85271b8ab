"""Attention against a loop over queries and keys; rotary positions against complex numbers; RMSNorm by its formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moezoo.nn.attention import Attention
from moezoo.nn.norm import RMSNorm
from moezoo.nn.positions import Context, LayerNumbers, make_context
from moezoo.nn.rope import frequencies, rotate
from moezoo.nn.rotary import Rotary
from moezoo.parallel.context_parallel import Place
from moezoo.parallel.execution import Execution

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM, EMBED = 2, 12, 4, 2, 4, 6
GROUP = HEADS // KV_HEADS
# Averages of values of order one under weights from scores of order ten: some 50 roundings to float32.
PRECISION = 50 * 2.0**-24

# Documents of 5, 4 and 3 tokens; and one of 8 with padding (segment 0) behind it.
SEGMENTS = np.asarray([[1] * 5 + [2] * 4 + [3] * 3, [1] * 8 + [0] * 4], np.int32)
POSITIONS = np.asarray([[*range(5), *range(4), *range(3)], [*range(8), *range(4)]], np.int32)
TOKEN_POSITIONS = Place(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))


def loop(q, k, v, positions, segments, window):
    """Query by query: the keys it sees, their weights, the weighted sum of their values; in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    result = np.zeros(q.shape)
    for b, i, head, member in np.ndindex(q.shape[:4]):
        seen = [
            j
            for j in range(k.shape[1])
            if segments[b, i] == segments[b, j]
            and positions[b, j] <= positions[b, i]
            and (window is None or positions[b, i] - positions[b, j] < window)
        ]
        scores = [q[b, i, head, member] @ k[b, j, head] / np.sqrt(q.shape[-1]) for j in seen]
        weights = np.exp(np.asarray(scores) - max(scores))
        weights /= weights.sum()
        result[b, i, head, member] = sum(w * v[b, j, head] for w, j in zip(weights, seen, strict=True))
    return result


def block(window=3):
    """The attention layer."""
    options = {"rotary": Rotary(HEAD_DIM, 100.0), "window": window, "out_std": 1.0, "dtype": jnp.dtype("float32")}
    return Attention(EMBED, HEADS, KV_HEADS, HEAD_DIM, **options, key=jax.random.key(0))


def loop_block(layer, x, window):
    """The layer by its definition: project, rotate as complex numbers, attend, project."""
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("bsd,dnh->bsnh", x, np.asarray(w, np.float64)) for w in (layer.query, layer.key, layer.value))
    q, k = complex_rotation(q, POSITIONS, layer.rotary.base), complex_rotation(k, POSITIONS, layer.rotary.base)
    y = loop(q.reshape(BATCH, SEQ, KV_HEADS, GROUP, HEAD_DIM), k, v, POSITIONS, SEGMENTS, window)
    return np.einsum("bsnh,nhd->bsd", y.reshape(BATCH, SEQ, HEADS, HEAD_DIM), np.asarray(layer.out, np.float64))


def complex_rotation(x, positions, base):
    """Each pair (x[i], x[i + half]) is a complex number, turned by position * base ** (-2 i / head_dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * base ** (-2 * np.arange(half) / x.shape[-1])
    turned = (np.asarray(x, np.float64)[..., :half] + 1j * np.asarray(x, np.float64)[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def layer_and_gradients(execution, layer, x, positions, cotangent):
    """The layer's value and gradients by its weights and input."""
    value, pull = jax.vjp(lambda layer, x: layer(x, make_context(positions, execution), execution).y, layer, x)
    return value, *pull(cotangent)


@functools.cache
def on_one_device():
    """The layer without a mesh."""
    program = functools.partial(layer_and_gradients, Execution())
    return jax.jit(program)(block(), *inputs())


def inputs():
    """Activations, their positions, and what flows back."""
    x, cotangent = np.random.default_rng(0).standard_normal((2, BATCH, SEQ, EMBED), np.float32)
    return x, TOKEN_POSITIONS, cotangent


# Norms of each head, biases, and half of the dimensions turned; norms of whole projections, and a bound on all numbers;
# numbers that a scan over layers would bring.
PARTS = {
    "head": ({"norm_over": "head", "biases": "all", "rotary": Rotary(2, 100.0)}, None),
    "projection": ({"norm_over": "projection", "clip": 0.7, "rotary": Rotary(HEAD_DIM, 100.0)}, None),
    "numbers": ({"rotary": Rotary(HEAD_DIM, 100.0)}, LayerNumbers(7.0, 0.5)),
}


@pytest.mark.parametrize("name", PARTS)
def test_optional_parts_equal_a_loop(name):
    options, numbers = PARTS[name]
    common = {"norm_eps": 0.1, "window": 3, "out_std": 1.0, "dtype": jnp.dtype("float32")}
    layer = Attention(EMBED, HEADS, KV_HEADS, HEAD_DIM, **common, **options, key=jax.random.key(0))
    rng = np.random.default_rng(3)
    layer = jax.tree.map(lambda x: x + jnp.asarray(0.3 * rng.standard_normal(x.shape) * (x.ndim < 3), x.dtype), layer)
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731

    def part(weight, bias, norm, turned):
        y = np.einsum("bsd,dnh->bsnh", wide(inputs()[0]), wide(weight))
        y = y if bias is None else y + wide(bias)
        if norm is not None:
            dims = (2, 3) if name == "projection" else 3
            scale = wide(norm.scale).reshape(y.shape[2:] if name == "projection" else HEAD_DIM)
            y = y / np.sqrt((y**2).mean(dims, keepdims=True) + 0.1) * scale
        y = np.clip(y, -0.7, 0.7) if name == "projection" else y
        if not turned:
            return y
        dims, base = layer.rotary.dims, 100.0 if numbers is None else 7.0
        return np.concatenate([complex_rotation(y[..., :dims], POSITIONS, base), y[..., dims:]], axis=-1)

    q = part(layer.query, layer.query_bias, layer.query_norm, True) * (1 if numbers is None else 0.5)
    k = part(layer.key, layer.key_bias, layer.key_norm, True)
    v = part(layer.value, layer.value_bias, None, False)
    y = loop(q.reshape(BATCH, SEQ, KV_HEADS, GROUP, HEAD_DIM), k, v, POSITIONS, SEGMENTS, 3)
    wanted = np.einsum("bsnh,nhd->bsd", y.reshape(BATCH, SEQ, HEADS, HEAD_DIM), wide(layer.out))
    wanted += 0 if layer.out_bias is None else wide(layer.out_bias)
    context = Context(TOKEN_POSITIONS, TOKEN_POSITIONS, numbers)
    found = jax.jit(lambda layer, x: layer(x, context, Execution()).y)(layer, inputs()[0])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=PRECISION * np.abs(wanted).max())


def test_the_layer_equals_a_loop():
    """Query head n is served by key-value head n // 2, as in the released weights."""
    wanted = loop_block(block(), inputs()[0], window=3)
    np.testing.assert_allclose(on_one_device()[0], wanted, rtol=0, atol=PRECISION * np.abs(wanted).max())


@pytest.mark.parametrize("base", [100.0, 1e6])
def test_rope_is_a_complex_rotation(base):
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, HEADS, 8), np.float32)
    positions = np.random.default_rng(1).integers(0, 64, (BATCH, SEQ)).astype(np.int32)
    rotated = rotate(jnp.asarray(x), jnp.asarray(positions), frequencies(8, base))
    # An angle up to 64 radians is rounded by 64 * 2 ** -24 each time, three times before the sine.
    np.testing.assert_allclose(rotated, complex_rotation(x, positions, base), rtol=0, atol=4 * 64 * 2.0**-24 * 4)
    assert rotate(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), frequencies(8, base)).dtype == jnp.bfloat16


def test_rms_norm():
    x = 3 * np.random.default_rng(0).standard_normal((BATCH, SEQ, EMBED), np.float32)
    norm = RMSNorm(EMBED, 0.1, dtype=jnp.dtype("float32"))
    scale = np.arange(1, EMBED + 1, dtype=np.float32)
    object.__setattr__(norm, "scale", jnp.asarray(scale))
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * scale
    np.testing.assert_allclose(norm(jnp.asarray(x)), wanted, rtol=10 * 2.0**-24)
    # In bfloat16 only the input, the normalised value and the product are rounded, not the mean.
    narrow = norm(jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float64), wanted, rtol=4 * 2.0**-8)
