"""Latent attention against a loop with the keys and values of every head, for whole texts and with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import attention, complex_rotation, rms_norm

from moezoo.nn.cache import Past, Slots
from moezoo.nn.latent_attention import LatentAttention, LatentSizes
from moezoo.nn.positions import Context
from moezoo.nn.rotary import QueryScale, Rotary, Unscaled
from moezoo.parallel.context_parallel import Coordinates
from moezoo.parallel.execution import Execution
from moezoo.parallel.mesh_execution import on_mesh

BATCH, SEQ, EMBED, HEADS, LORA, NOPE, ROPE, VALUE = 2, 6, 7, 3, 5, 4, 2, 3
POSITIONS = np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1))
AT = Coordinates(jnp.asarray(POSITIONS), jnp.ones_like(jnp.asarray(POSITIONS)))


class Sharper(Unscaled):
    """An extension that only multiplies scores."""

    @property
    def score_scale(self):
        """The factor."""
        return 1.5


def wide(weight):
    """Return a weight in float64."""
    return np.asarray(weight, np.float64)


def by_definition(layer, x):
    """Return the result with the keys and values of every head made."""
    if layer.query is not None:
        q = np.einsum("bsd,dnh->bsnh", x, wide(layer.query))
    else:
        latent = rms_norm(x @ wide(layer.query_down), layer.query_norm.scale, 1e-6)
        q = np.einsum("bsl,lnh->bsnh", latent, wide(layer.query_up))
    rotated = (lambda y: y) if layer.rotary is None else (lambda y: complex_rotation(y, POSITIONS, 100.0))
    q = np.concatenate([q[..., :NOPE], rotated(q[..., NOPE:])], axis=-1)
    down = x @ wide(layer.kv_down)
    latent = rms_norm(down[..., :LORA], layer.kv_norm.scale, 1e-6)
    shared = rotated(down[..., None, LORA:])
    plain = np.einsum("bsl,lnh->bsnh", latent, wide(layer.key_up))
    k = np.concatenate([plain, np.broadcast_to(shared, (*plain.shape[:3], ROPE))], axis=-1)
    v = np.einsum("bsl,lnh->bsnh", latent, wide(layer.value_up))
    q *= 1 + 0.7 * np.log(1 + POSITIONS // 2)[..., None, None]
    scale = (1.0 if layer.rotary is None else 1.5) * (NOPE + ROPE) ** -0.5
    y = attention(q[:, :, :, None], k, v, POSITIONS, np.ones_like(POSITIONS), scale)[:, :, :, 0]
    return np.einsum("bsnh,nhd->bsd", y, wide(layer.out))


@pytest.mark.parametrize("q_lora", [None, 4])
def test_equals_a_loop(q_lora):
    assert_equal_to_a_loop(q_lora, Rotary(ROPE, 100.0, Sharper()))


def test_without_rotation():
    assert_equal_to_a_loop(None, None)


def assert_equal_to_a_loop(q_lora, rotary):
    """For the text; and for its last token with a cache of the others, where no key or value of a head is made."""
    sizes = LatentSizes(HEADS, q_lora, LORA, NOPE, ROPE, VALUE)
    options = {"rotary": rotary, "query_scale": QueryScale(0.7, 2), "out_std": 1.0, "dtype": jnp.dtype("float32")}
    layer = LatentAttention(EMBED, sizes, **options, key=jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, EMBED), np.float32)

    @jax.jit
    def both(layer, x):
        whole = layer(x, Context(AT, AT), on_mesh(Execution()))
        # A stack of one layer, whose last slot is empty.
        slots = jax.tree.map(lambda a: a.at[:, -1].set(0)[None], whole.kept)
        last = Coordinates(*(a[:, -1:] for a in AT))
        past = Past(Slots(SEQ, slots), jnp.int32(0), jnp.int32(SEQ - 1), AT)
        return whole.y, layer(x[:, -1:], Context(last, last), on_mesh(Execution()), past).y

    whole, last = both(layer, x)
    wanted = by_definition(layer, x.astype(np.float64))
    # Averages of values of order one: some 50 roundings to float32.
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=50 * 2.0**-24 * np.abs(wanted).max())
    np.testing.assert_allclose(last, wanted[:, -1:], rtol=0, atol=50 * 2.0**-24 * np.abs(wanted).max())


def test_the_factor_on_queries_is_rounded_once_and_finite_at_padding():
    at = Coordinates(jnp.array([[-1, 0, 7, 8, 40]]), jnp.array([[0, 1, 1, 1, 1]]))
    scaled = QueryScale(0.1, 8)(jnp.full((1, 5, 1, 1), 3, jnp.bfloat16), Context(at, at))
    wanted = [3 + 0.3 * np.log(1 + periods) for periods in (0, 0, 0, 1, 5)]
    np.testing.assert_array_equal(scaled.ravel(), np.asarray(wanted, jnp.bfloat16))
