"""The attention layer against a loop over queries and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import attention, complex_rotation, rms_norm

from moezoo.nn.attention import Attention
from moezoo.nn.positions import Context
from moezoo.nn.rotary import CountScale, Proportional, Rotary
from moezoo.parallel.collectives import ALONE
from moezoo.parallel.context_parallel import Coordinates, Stretches
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM, EMBED = 2, 12, 4, 2, 4, 6
# Averages of values of order one under weights from scores of order ten: some 50 roundings to float32.
PRECISION = 50 * 2.0**-24

# Documents of 5, 4 and 3 tokens; and one of 8 followed by padding (segment 0).
SEGMENTS = np.asarray([[1] * 5 + [2] * 4 + [3] * 3, [1] * 8 + [0] * 4], np.int32)
POSITIONS = np.asarray([[*range(5), *range(4), *range(3)], [*range(8), *range(4)]], np.int32)
AT = Coordinates(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))

# Options of a layer: none; norms of each head, biases, and half of the dimensions rotated; norms of whole projections
# and a bound on all numbers; norms around one, and a gate; values made of keys, normed, and scores with a factor;
# values that are narrower than keys, and multiplied, and no rotation; norms after the rotation, and stretches; a factor
# on queries.
PARTS = {
    "plain": {"rotary": Rotary(HEAD_DIM, 100.0)},
    "head": {"norm_over": "head", "biases": "all", "rotary": Rotary(2, 100.0)},
    "gate": {"norm_over": "head", "norm_around_one": True, "gated": True, "rotary": Rotary(2, 100.0)},
    "keys": {"norm_over": "head", "norm_values": True, "values_from": "keys", "scale": 0.7}
    | {"rotary": Rotary(HEAD_DIM, 100.0, Proportional(0.5))},
    "narrow": {"biases": "inputs", "value_dim": 3, "value_scale": 0.7, "gated": True, "rotary": None},
    "projection": {"norm_over": "projection", "clip": 0.7, "rotary": Rotary(HEAD_DIM, 100.0)},
    "turned": {"norm_turned": True, "rotary": Rotary(HEAD_DIM, 100.0), "window": Stretches(3)},
    "no positions": {"rotary": None, "query_scale": CountScale(0.7, 2)},
}


@pytest.mark.parametrize("name", PARTS)
def test_equals_a_loop(name):
    """Query head n is served by key-value head n // 2, as in released weights."""
    common = {"norm_eps": 0.1, "window": 3, "out_std": 1.0, "dtype": jnp.dtype("float32")}
    layer = Attention(EMBED, HEADS, KV_HEADS, HEAD_DIM, **{**common, **PARTS[name]}, key=jax.random.key(0))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((BATCH, SEQ, EMBED), np.float32)
    layer = jax.tree.map(lambda x: x + jnp.asarray(0.3 * rng.standard_normal(x.shape) * (x.ndim < 3), x.dtype), layer)

    def part(weight, bias, norm, turned):
        y = np.einsum("bsd,dnh->bsnh", x.astype(np.float64), np.asarray(weight, np.float64))
        y = y if bias is None else y + np.asarray(bias, np.float64)
        if norm is not None:
            together = y.reshape(BATCH, SEQ, -1) if name == "projection" else y
            y = rms_norm(together, np.asarray(norm.scale) + (name == "gate"), 0.1).reshape(y.shape)
        y = np.clip(y, -0.7, 0.7) if name == "projection" else y
        if not turned:
            return y
        if name == "keys":  # of two pairs the first one rotates
            return np.where(np.arange(HEAD_DIM) % 2, y, complex_rotation(y, POSITIONS, 100.0))
        if layer.rotary is None:
            return y
        dims = layer.rotary.dims
        y = np.concatenate([complex_rotation(y[..., :dims], POSITIONS, 100.0), y[..., dims:]], axis=-1)
        return rms_norm(y, 1.0, 0.1) if name == "turned" else y

    q = part(layer.query, layer.query_bias, layer.query_norm, True)
    k = part(layer.key, layer.key_bias, layer.key_norm, True)
    v = part(layer.key if layer.value is None else layer.value, layer.value_bias, None, False)
    if name == "keys":
        assert layer.value is None
        v = rms_norm(v, 1.0, 0.1)
    v = 0.7 * v if name == "narrow" else v
    if name == "no positions":
        q = q * (1 + 0.7 * np.log(1 + (POSITIONS + 1) // 2))[:, :, None, None]
    q = q.reshape(BATCH, SEQ, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    reach = {"stretch": 3} if name == "turned" else {"window": 3}
    y = attention(q, k, v, POSITIONS, SEGMENTS, 0.7 if name == "keys" else HEAD_DIM**-0.5, **reach)
    y = y.reshape(BATCH, SEQ, HEADS, -1)
    if layer.gate is not None:
        y = y / (1 + np.exp(-part(layer.gate, layer.gate_bias, None, False)))
    wanted = np.einsum("bsnh,nhd->bsd", y, np.asarray(layer.out, np.float64))
    wanted += 0 if layer.out_bias is None else np.asarray(layer.out_bias, np.float64)
    context = Context(AT, AT)
    found = jax.jit(lambda layer, x: layer(x, context, on_mesh(Execution())).leave(ALONE))(layer, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=PRECISION * np.abs(wanted).max())
