"""Gated short convolutions, against a loop over tokens in float64; in parts, on meshes, and behind a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from refusals import refused

from moezoo.nn.base import TokenFlops
from moezoo.nn.cache import Past
from moezoo.nn.gated_convolution import GatedConvolution
from moezoo.nn.positions import make_context
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh import MeshShape, make_mesh
from moezoo.parallel.mesh_execution import on_mesh
from moezoo.parallel.rules import Rules

EMBED, SEQ, TAPS, F32 = 8, 24, 3, jnp.dtype("float32")
# Sums of some ten products of numbers of order one, each rounded to float32.
PRECISION = 50 * 2.0**-24
# Documents begin next to each other and in the middle of chunks; one fills its row.
SEGMENT = np.array([[1] * 2 + [2] + [3] * 9 + [4] * 11 + [0], [1] * 24], np.int32)
AT = Coordinates(jnp.zeros(SEGMENT.shape, jnp.int32), jnp.asarray(SEGMENT))
X, COTANGENT = np.random.default_rng(1).standard_normal((2, 2, SEQ, EMBED)).astype(np.float32)


@functools.cache
def mixer(biases: Any = "none") -> GatedConvolution:
    """Return a mixer whose biases are not zero."""
    made = GatedConvolution(EMBED, TAPS, biases=biases, out_std=1.0, dtype=F32, key=jax.random.key(0))
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + draw.uniform(-0.3, 0.3, x.shape).astype(np.float32), made)


def naive(m: Any, x: np.ndarray) -> np.ndarray:
    """Return the result for the tokens [tokens, embed] of one document, token by token."""
    m, x = jax.tree.map(lambda w: np.asarray(w, np.float64), m), x.astype(np.float64)
    biases = [m.input_gate_bias, m.output_gate_bias, m.value_bias, m.filter_bias, m.out_bias]
    before, after, value, of_filter, out = (0 if bias is None else bias for bias in biases)
    inputs = (x @ m.input_gate + before) * (x @ m.value + value)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(len(m.filters), t + 1)):
            y[t] += m.filters[-1 - back] * inputs[t - back]
    return ((x @ m.output_gate + after) * (y + of_filter)) @ m.out + out


def run(execution: Any, order: Any, m: Any, x: Any, at: Any, cotangent: Any) -> Any:
    """Return the layer's value, and its gradients by weights and input; channels are summed."""

    def layer(m: Any, x: Any) -> Any:
        return m(x, make_context(at, execution, order), execution).leave(execution.inner_group("heads"))

    value, pull = jax.vjp(layer, m, x)
    return value, *pull(cotangent)


@functools.cache
def alone(biases: str) -> Any:
    """Return value and gradients on one device."""
    return jax.jit(functools.partial(run, on_mesh(Execution()), "contiguous"))(mixer(biases), X, AT, COTANGENT)


@pytest.mark.parametrize("biases", ["none", "all"])
def test_documents_are_read_alone(biases):
    """A packed document has the result of its own loop."""
    value = np.asarray(alone(biases)[0])
    for row, segments in enumerate(SEGMENT):
        for number in range(1, segments.max() + 1):
            mine = segments == number
            np.testing.assert_allclose(value[row][mine], naive(mixer(biases), X[row][mine]), atol=PRECISION)


MESHES = {
    "contiguous": (MeshShape(data=2, context=4), {}, "contiguous"),
    "balanced": (MeshShape(context=4), {}, "balanced"),
    "channels": (MeshShape(tensor=2, context=2), {"heads": ("tensor",), "kv_heads": ("tensor",)}, "balanced"),
}


@pytest.mark.parametrize("where", MESHES)
def test_devices_that_share_a_sequence_and_channels(where):
    """Value and gradients are those of one device; chunks begin within documents."""
    shape, kept, order = MESHES[where]
    mesh = make_mesh(shape)
    rules = Rules("mine", kept, kept, ("data",), ("context",))
    execution = on_mesh(Execution(mesh=mesh, rules=rules, sequence_order=order))
    lies, split, m = execution.token_order(SEQ), execution.tokens_spec, mixer("all")
    weights: Any = execution.specs(m)
    assert (weights.filters == PartitionSpec(None, "tensor")) == (where == "channels")
    mapped = jax.shard_map(
        functools.partial(run, execution, order),
        mesh=mesh,
        in_specs=(weights, split, split, split),
        out_specs=(split, weights, split),
    )
    found = jax.jit(mapped)(m, *jax.tree.map(lambda x: x[:, lies], (X, AT, COTANGENT)))
    back = np.argsort(lies)
    found = found[0][:, back], found[1], found[2][:, back]
    for result, want in zip(jax.tree.leaves(found), jax.tree.leaves(alone("all")), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=PRECISION * max(1, np.abs(want).max()))


@pytest.mark.parametrize("prompt", [1, 2, 7])
def test_token_by_token_behind_a_prompt(prompt):
    """A prompt with padding before it, then tokens one by one, give what the whole text gives."""
    m, execution, pad = mixer("all"), on_mesh(Execution()), 3
    whole, out = naive(m, X[0]), np.asarray(m.out_bias)
    x = np.concatenate([np.ones((1, pad, EMBED), np.float32), X[:1]], axis=1)
    segment = np.array([[0] * pad + [1] * SEQ], np.int32)

    def at(first: int, after: int) -> Any:
        position = jnp.arange(first, after, dtype=jnp.int32)[None]
        return make_context(Coordinates(position, jnp.asarray(segment[:, first:after])), execution)

    read = jax.jit(lambda x, context: m(x, context, execution)[:2])
    step = jax.jit(lambda x, state, context: m(x, context, execution, Past(state, jnp.int32(0), jnp.int32(0)))[:2])
    y, kept = read(x[:, : pad + prompt], at(0, pad + prompt))
    np.testing.assert_allclose(np.asarray(y[0, pad:]) + out, whole[:prompt], atol=PRECISION)
    state = jax.tree.map(lambda x: x[None], m.state(SEQ).fill(kept))
    for t in range(prompt, SEQ):
        y, fresh = step(x[:, pad + t : pad + t + 1], state, at(pad + t, pad + t + 1))
        np.testing.assert_allclose(np.asarray(y[0, 0]) + out, whole[t], atol=PRECISION)
        state = state.advance(fresh[None], jnp.int32(t))
    declared: Any = m.state(SEQ).inputs
    assert state.inputs.shape[2:] == tuple(declared.sizes.values()) == (TAPS - 1, EMBED)


def test_half_precision_and_a_count_of_flops():
    """Activations keep their dtype; the filter sums in float32."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), mixer("all"))
    execution, x = on_mesh(Execution()), jnp.asarray(X, jnp.bfloat16)
    found = jax.jit(lambda m, x: m(x, make_context(AT, execution, "contiguous"), execution))(narrow, x)
    assert found.y.dtype == found.kept.dtype == jnp.bfloat16
    wanted = naive(jax.tree.map(lambda w: np.asarray(w, np.float32), narrow), np.asarray(x, np.float32)[1])
    error = np.abs(np.asarray(found.leave(execution.inner_group("heads")), np.float64)[1] - wanted)
    assert error.mean() <= 2**-8 * np.abs(wanted).max()
    assert narrow.token_flops() == TokenFlops(2 * TAPS * EMBED)


def test_chunks_that_are_shorter_than_a_filter_reaches_are_refused():
    mesh = make_mesh(MeshShape(context=4))
    execution = on_mesh(Execution(mesh=mesh, rules=Rules("mine", {}, {}, (), ("context",))))

    def read(length: int) -> Any:
        at, split = Coordinates(*(jnp.ones((1, length), jnp.int32),) * 2), PartitionSpec(None, "context")
        layer = lambda x, at: mixer()(x, make_context(at, execution, "contiguous"), execution).y  # noqa: E731
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(split, split), out_specs=split)
        return jax.eval_shape(mapped, jnp.ones((1, length, EMBED)), at)

    read(8)
    with refused("chunks of 1 tokens are shorter than the 2 tokens that a layer reads of the chunk before"):
        read(4)
    assert mixer().least_chunk() == 2
